"""Optimizer state in offload memory: the same bits, the predicted bytes, and hooks that run
once."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import steelyard as sy
from steelyard.api.memory_meter import resident_bytes
from steelyard.api.planned import Planned
from steelyard.api.step import Step
from steelyard.errors import BadInput, Infeasible, Mismatch, PlanFileError
from steelyard.ir.rule import Rule
from steelyard.offload.optimizer_state import why_undivided
from steelyard.planner.planner import Planner
from steelyard.predict import predict
from steelyard.run.checkpoint import state as checkpoint
from steelyard.run.checkpoint.state import Position
from steelyard.run.rng_state import random_state
from steelyard.trades.offload_state import OffloadStateRule
from tests.harness import floor_bytes, in_a_hurry

MIB = 1 << 20
LAYERS = 12
ADAM = partial(torch.optim.AdamW, lr=1e-3)
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "AdamW": ADAM,
    "Adam, amsgrad": partial(torch.optim.Adam, amsgrad=True),
    "SGD, momentum": partial(torch.optim.SGD, lr=1e-2, momentum=0.9, nesterov=True),
    "RMSprop, centered": partial(torch.optim.RMSprop, centered=True, momentum=0.9),
    "Adagrad": torch.optim.Adagrad,
    "Adadelta": torch.optim.Adadelta,
    "Adamax": torch.optim.Adamax,
    "NAdam": torch.optim.NAdam,
    "RAdam": torch.optim.RAdam,
}


pytestmark = pytest.mark.xdist_group("states")


@pytest.fixture(scope="module", autouse=True)
def _in_a_hurry(costs: Path) -> Iterator[None]:
    with in_a_hurry(costs):
        yield


class Wide(nn.Module):
    """A model with large weights and little computation."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(256, 256) for _ in range(LAYERS))
        self.tall = nn.Linear(256, 900, bias=False)
        self.unused = nn.Linear(256, 256)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        out: Tensor = self.tall(x)
        return out


def loss(model: nn.Module, x: Tensor) -> Tensor:
    out: Tensor = model(x)
    return out.square().mean()


def made() -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    return Wide(), torch.randn(2, 256)


@pytest.fixture(scope="module")
def offload_memory(tmp_path_factory: pytest.TempPathFactory) -> sy.OffloadMemory:
    return sy.OffloadMemory(tmp_path_factory.mktemp("far"), rate="2 GB/s", size="1 GiB")


def plan(make: Any, offload_memory: sy.OffloadMemory | None, **budget: Any) -> sy.Planned:
    model, x = made()
    cluster = sy.Cluster.here(offload_memory=offload_memory)
    return sy.plan(model, loss, x, optimizer=make, cluster=cluster, budget=sy.Budget(**budget))


@pytest.fixture(scope="module")
def adam(offload_memory: sy.OffloadMemory) -> sy.Planned:
    return plan(ADAM, offload_memory)


def rules(lead: int = 1) -> tuple[Rule, ...]:
    return (
        OffloadStateRule(what="optimizer", parameter="layers.*.weight", count=LAYERS, lead=lead),
        OffloadStateRule(what="optimizer", parameter="tall.weight", count=1, lead=lead),
    )


def told(planned: sy.Planned, chosen: tuple[Rule, ...]) -> sy.Planned:
    """Return the same plan with these rules in its file."""
    session = planned.session
    decisions = replace(
        planned.plan.decisions, rules=chosen, offload_memory=session.request.cluster.offload_memory
    )
    predicted = session.priced(session.apply_rules(chosen))
    return Planned(
        Planner(session), replace(planned.plan, decisions=decisions, predicted=predicted)
    )


def assert_same_state(ours: torch.optim.Optimizer, theirs: torch.optim.Optimizer) -> None:
    a, b = ours.state_dict(), theirs.state_dict()
    assert a["param_groups"] == b["param_groups"]
    assert a["state"].keys() == b["state"].keys()
    for index, expected in b["state"].items():
        kept = a["state"][index]
        assert list(kept) == list(expected)
        for key, value in expected.items():
            assert torch.equal(kept[key], value) if isinstance(value, Tensor) else True
            assert isinstance(value, Tensor) or kept[key] == value


def optimizer_of(step: Step) -> torch.optim.Optimizer:
    assert step.optimizer is not None
    return step.optimizer


def pair(planned: sy.Planned, chosen: tuple[Rule, ...]) -> tuple[Step, Step, Tensor]:
    """Return the step with these rules and the step without any, on equal models."""
    ours, x = made()
    theirs = copy.deepcopy(ours)
    return told(planned, chosen).apply(ours), planned.what_if().apply(theirs), x


def assert_same_weights(ours: Step, theirs: Step) -> None:
    for (name, a), b in zip(
        ours.live.model.named_parameters(), theirs.live.model.parameters(), strict=True
    ):
        assert torch.equal(a, b), name


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_gives_the_same_bits_within_the_predicted_bytes(
    name: str, offload_memory: sy.OffloadMemory
) -> None:
    planned = plan(OPTIMIZERS[name], offload_memory)
    for lead in (0, 1, 2) if name == "AdamW" else (1,):
        ours, theirs, x = pair(planned, rules(lead))
        for _ in range(4):
            assert torch.equal(ours(x), theirs(x))
        assert_same_weights(ours, theirs)
        said = told(planned, rules(lead)).predicted.memory_bytes.value
        measured = ours.receipt().measured.memory_bytes
        assert measured is not None
        # The loss of the previous step, whose tangent torch keeps.
        assert abs(said - measured) <= 4
        near = resident_bytes(ours.live)
        assert near < resident_bytes(theirs.live) - LAYERS * 256 * 256 * 4
        assert_same_state(optimizer_of(ours), optimizer_of(theirs))


def test_less_prefetching_takes_less_memory(adam: sy.Planned) -> None:
    peaks = [told(adam, rules(lead)).predicted.memory_bytes.value for lead in (0, 1, 2)]
    assert peaks == sorted(set(peaks))
    assert peaks[0] < adam.predicted.memory_bytes.value


def test_a_transfer_that_is_waited_for_slows_nothing(adam: sy.Planned) -> None:
    """Without a lead, nothing runs during a transfer, so only the calls themselves take time."""
    alone = told(adam, rules(0)).predicted
    more = alone.computation_seconds.value - adam.predicted.computation_seconds.value
    session = adam.session
    links = session.prices.costs.links.values()
    whole = session.prices.costs.whole_step.value
    count = 2 * (LAYERS + 1)
    calls = whole * count * sum(link.call_seconds for link in links)
    late = whole * count * sum(link.disturbs * link.latency_seconds for link in links)
    assert calls - late - 1e-9 <= more <= calls + 1e-9


def test_waiting_longer_than_a_transfer_saves_no_more_time(adam: sy.Planned) -> None:
    session = adam.session
    costs = session.prices.costs
    slow = {a: replace(k, latency_seconds=1.0, disturbs=0.9) for a, k in costs.links.items()}
    late = predict(session.apply_rules(rules(0)), replace(costs, links=slow)).metrics
    assert late.exposed_communication_seconds.value > 1.0
    assert late.computation_seconds.value >= adam.predicted.computation_seconds.value


def test_state_offload_is_chosen_where_nothing_else_fits(adam: sy.Planned, tmp_path: Path) -> None:
    near = plan(ADAM, None)
    with pytest.raises(Infeasible, match="--offload-dir") as refusal:
        near.what_if(memory=floor_bytes(near))
    least = refusal.value.least_bytes
    assert least is not None
    fitting = adam.what_if(memory=least - MIB)
    (taken,) = (t for t in fitting.plan.taken if t.trade == "offload_state")
    assert taken.buys_bytes >= MIB
    assert taken.pays_seconds > 0
    assert fitting.plan.decisions.offload_memory is not None
    assert fitting.predicted.memory_bytes.value <= least - MIB
    assert fitting.predicted.communication_bytes.value > 0
    assert "offload_state" in str(fitting)
    assert fitting.why_not("offload_state").startswith("offload_state was applied")
    assert "which the budget does not require" in adam.what_if(memory="1 GiB").why_not(
        "offload_state"
    )
    model, x = made()
    fitting.save(tmp_path / "a.plan.toml")
    again = sy.load(tmp_path / "a.plan.toml", model, loss, x, optimizer=ADAM)
    assert again.plan.decisions.rules == fitting.plan.decisions.rules
    assert again.predicted.memory_bytes.value == fitting.predicted.memory_bytes.value
    step = again.apply(model)
    for _ in range(3):
        step(x)
    assert step.receipt().measured.memory_bytes <= least - MIB
    assert step.offload_file.moved_bytes > 0


def test_more_memory_is_never_slower(adam: sy.Planned) -> None:
    curve = adam.frontier
    assert any(r.trade == "offload_state" for point in curve for r in point.rules)
    assert any(not point.rules for point in curve)
    for less, more in pairwise(curve):
        assert less.memory_bytes < more.memory_bytes
        assert less.step_seconds > more.step_seconds


def test_hooks_and_schedulers_see_one_step(adam: sy.Planned) -> None:
    ours, theirs, x = pair(adam, rules())
    seen: list[str] = []
    for step in (ours, theirs):
        optimizer = optimizer_of(step)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
        optimizer.register_step_pre_hook(lambda *_: seen.append("before"))
        optimizer.register_step_post_hook(lambda *_: seen.append("after"))
        for _ in range(3):
            step(x)
            schedule.step()
        assert seen == ["before", "after"] * 3
        seen.clear()
    assert_same_weights(ours, theirs)


def test_a_user_loop_steps_the_optimizer(adam: sy.Planned) -> None:
    ours, theirs, x = pair(adam, rules())
    for step in (ours, theirs):
        for _ in range(3):
            step.live.zero_grad()
            step.backward(x)
            torch.nn.utils.clip_grad_norm_(step.live.model.parameters(), 1e-3)
            optimizer_of(step).step()
    assert_same_weights(ours, theirs)


def test_offloaded_state_is_marked_and_can_be_fetched(
    adam: sy.Planned,
) -> None:
    ours, theirs, x = pair(adam, rules())
    for step in (ours, theirs):
        step(x)
    optimizer, weight = optimizer_of(ours), ours.live.model.get_parameter("tall.weight")
    assert optimizer.state[weight]["step"] == 1
    with pytest.raises(Mismatch, match="exp_avg of this parameter is in offload memory"):
        optimizer.state[weight]["exp_avg"]
    with pytest.raises(KeyError):
        optimizer.state[weight]["no such key"]
    assert_same_state(optimizer, optimizer_of(theirs))
    assert optimizer.state[weight]["exp_avg"].shape == weight.shape
    for step in (ours, theirs):
        step(x)
    with pytest.raises(Mismatch, match="offload memory"):
        optimizer.state[weight]["exp_avg"]
    # Another state, as if it came from a saved checkpoint.
    kept = copy.deepcopy(optimizer_of(theirs).state_dict())
    for step in (ours, theirs):
        step(x)
        optimizer_of(step).load_state_dict(copy.deepcopy(kept))
        step(x)
    assert_same_weights(ours, theirs)


def assert_same_checkpoints(ours: Step, theirs: Step, x: Tensor, folder: Path) -> None:
    """Check that checkpoints are equal to the byte, are loaded without holding everything, and
    resume equally."""
    for step in (ours, theirs):
        step(x)
    now = random_state({})
    position = Position(step=1, epoch=0, taken=0, now=now, began=now)
    for step, name in ((ours, "ours"), (theirs, "theirs")):
        (folder / name).mkdir()
        with step.live.states_readable():
            checkpoint.save(
                folder / name, model=step.live.model, optimizer=step.optimizer,
                position=position, plan="",
            )  # fmt: skip
    for name in ("model.safetensors", "optimizer.safetensors"):
        assert (folder / "ours" / name).read_bytes() == (folder / "theirs" / name).read_bytes()
    near = resident_bytes(ours.live)
    for _ in range(2):
        ours(x)
    with ours.live.states_loading() as allocator_for:
        checkpoint.load(
            folder / "ours",
            model=ours.live.model,
            optimizer=ours.optimizer,
            allocator_for=allocator_for,
        )
    assert resident_bytes(ours.live) == near
    for step in (ours, theirs):
        step(x)
    assert_same_weights(ours, theirs)


def test_a_checkpoint_is_streamed_when_saved_and_loaded(adam: sy.Planned, tmp_path: Path) -> None:
    assert_same_checkpoints(*pair(adam, rules()), tmp_path)


def test_a_closure_is_refused(adam: sy.Planned) -> None:
    ours, _, x = pair(adam, rules())
    ours.backward(x)
    with pytest.raises(BadInput, match="closure"):
        optimizer_of(ours).step(lambda: 0.0)


class Bounded(torch.optim.SGD):
    """An optimizer that reads all gradients before it changes a weight."""

    def step(self, closure: Any = None) -> Any:
        grads = [p.grad for g in self.param_groups for p in g["params"] if p.grad is not None]
        most = max((float(g.abs().max()) for g in grads), default=1.0)
        for grad in grads:
            grad.div_(most)
        return super().step(closure)


class Counting(torch.optim.SGD):
    """An optimizer that keeps its number of steps among its settings, and reads it."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["done"] = group.get("done", 0) + 1
            group["lr"] = 0.1 / group["done"]
        return super().step(closure)


class Drawing(torch.optim.SGD):
    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.add_(torch.randn_like(parameter))
        return super().step(closure)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (partial(Bounded, lr=0.1, momentum=0.9), "gives other results for one parameter at a time"),
        (partial(Drawing, lr=0.1, momentum=0.9), "gives other results for one parameter at a time"),
        (partial(Counting, lr=0.1, momentum=0.9), ""),
        *((make, "") for make in OPTIMIZERS.values()),
    ],
)
def test_optimizers_that_need_all_parameters_at_once_are_recognized(make: Any, said: str) -> None:
    before = torch.random.get_rng_state()
    found = why_undivided(make, [2, 1, 0, 4])
    assert (said in found) if said else found == ""
    assert torch.equal(before, torch.random.get_rng_state())


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (partial(torch.optim.AdamW, foreach=True), "several parameters at once"),
        (partial(Drawing, lr=0.1, momentum=0.9), "gives other results for one parameter at a time"),
        (partial(torch.optim.SGD, lr=0.1), "no optimizer state is large"),
        (None, "there is no optimizer in the plan"),
    ],
)
def test_the_reason_for_no_offer_is_given(
    make: Any, said: str, offload_memory: sy.OffloadMemory
) -> None:
    planned = plan(make, offload_memory)
    assert said in planned.why_not("offload_state")
    with pytest.raises(Mismatch):
        told(planned, rules())


def test_without_offload_memory_the_reason_names_the_option() -> None:
    assert "--offload-dir" in plan(ADAM, None).why_not("offload_state")


@pytest.mark.parametrize(
    ("chosen", "said"),
    [
        ((replace(rules()[0], count=3),), "matches 12 parameters"),
        ((replace(rules()[0], parameter="layers.99.weight"),), "matches 0 parameters"),
        (
            (*rules(), replace(rules()[1], lead=3)),
            "two offload_state rules name optimizer of tall.weight",
        ),
    ],
)
def test_inapplicable_offload_rules_are_refused(
    chosen: tuple[Rule, ...], said: str, adam: sy.Planned
) -> None:
    with pytest.raises(Mismatch, match=said):
        told(adam, chosen)


def test_a_plan_file_without_offload_memory_is_refused(adam: sy.Planned, tmp_path: Path) -> None:
    path = tmp_path / "a.plan.toml"
    told(adam, rules()).save(path)
    text = path.read_text()
    start, end = text.index("[offload_memory]"), text.index("[[offload_state]]")
    path.write_text(text[:start] + text[end:])
    with pytest.raises(PlanFileError, match="offload_state"):
        sy.load(path, *made_with_loss(), optimizer=ADAM)


def made_with_loss() -> tuple[nn.Module, Any, Tensor]:
    model, x = made()
    return model, loss, x


def test_too_little_offload_memory_is_reported_before_the_run(
    adam: sy.Planned, tmp_path: Path
) -> None:
    path = tmp_path / "a.plan.toml"
    told(adam, rules()).save(path)
    path.write_text(path.read_text().replace('size = "1 GiB"', 'size = "2 MiB"'))
    with pytest.raises(Mismatch, match="may hold"):
        sy.load(path, *made_with_loss(), optimizer=ADAM)


def test_a_disk_that_fails_is_named(adam: sy.Planned, monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    ours, _, x = pair(adam, rules())
    ours(x)

    def fail(*_: object) -> int:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "preadv", fail)
    with pytest.raises(sy.SteelyardError, match="Input/output error"):
        ours(x)
