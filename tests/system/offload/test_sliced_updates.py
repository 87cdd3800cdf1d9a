"""Trained weights in offload memory, read and updated in slices, are never whole."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import steelyard as sy
from steelyard.api.step import Step
from steelyard.capture.tracing.optimizer import capture_update
from steelyard.errors import Infeasible, Mismatch
from steelyard.ir.rule import Rule
from steelyard.offload.optimizer_state import OffloadedStates, why_unsliceable
from steelyard.offload.tier import OffloadFile
from steelyard.operators import is_pointwise
from steelyard.passes.offload.sliced_optimizer import why_whole
from steelyard.run.codegen import emit
from steelyard.run.step import LiveStep
from steelyard.search.single.granularity import offload_levels
from steelyard.trades import offload_state
from steelyard.trades.accumulate import AccumulateRule
from steelyard.trades.offload_state import OffloadState, OffloadStateRule, movable
from tests import zoo
from tests.harness import floor_bytes, in_a_hurry
from tests.support.graphs import Whole
from tests.support.live import captured
from tests.system.offload.test_optimizer_state import (
    ADAM,
    MIB,
    assert_same_checkpoints,
    assert_same_state,
    assert_same_weights,
    loss,
    optimizer_of,
    told,
)
from tests.system.offload.test_parameters import look_at, states_offered

pytestmark = pytest.mark.xdist_group("states")
SGD = partial(torch.optim.SGD, lr=1e-2, momentum=0.9)
WHATS = ("gradient", "optimizer", "weight")
# Each parameter belongs to one layer, whose computation is not sliced.
LAYERS = ("bare.weight", "biased.weight", "turned")


@pytest.fixture(scope="module", autouse=True)
def _in_a_hurry(costs: Path) -> Iterator[None]:
    with in_a_hurry(costs):
        yield


@pytest.fixture(scope="module")
def offload_memory(tmp_path_factory: pytest.TempPathFactory) -> sy.OffloadMemory:
    return sy.OffloadMemory(tmp_path_factory.mktemp("far"), rate="2 GB/s", size="1 GiB")


class Trained(nn.Module):
    """Products with trained weights in both orientations, on an input of three dims, one without
    a bias."""

    def __init__(self) -> None:
        super().__init__()
        self.biased = nn.Linear(64, 256)
        self.bare = nn.Linear(256, 300, bias=False)
        self.turned = nn.Parameter(torch.randn(300, 128) / 17)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.bare(torch.relu(self.biased(x)))) @ self.turned


def made(dtype: torch.dtype = torch.float32) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    return Trained().to(dtype), torch.randn(8, 4, 64, dtype=dtype)


def plan(
    make: Any, offload_memory: sy.OffloadMemory, model: nn.Module | None = None, x: Any = None
) -> sy.Planned:
    if model is None:
        model, x = made()
    return sy.plan(
        model, loss, x, optimizer=make, cluster=sy.Cluster.here(offload_memory=offload_memory)
    )


@pytest.fixture(scope="module")
def adam(offload_memory: sy.OffloadMemory) -> sy.Planned:
    return plan(ADAM, offload_memory)


def rules(
    *names: str, slices: int = 5, lead: int = 1, whats: tuple[str, ...] = WHATS
) -> tuple[Rule, ...]:
    return tuple(
        OffloadStateRule(what=what, parameter=name, slices=slices, lead=lead)
        for what in whats
        for name in names
    )


ALL = rules(*LAYERS)


def pair(planned: sy.Planned, chosen: tuple[Rule, ...]) -> tuple[Step, Step, Tensor]:
    """Return the step with these rules and the step without any, on equal models."""
    ours, x = made()
    theirs = copy.deepcopy(ours)
    return told(planned, chosen).apply(ours), planned.what_if().apply(theirs), x


def assert_as_said(planned: sy.Planned, step: Step) -> None:
    measured = step.receipt().measured.memory_bytes
    assert measured is not None
    # The loss of the previous step, whose tangent torch keeps.
    assert abs(planned.predicted.memory_bytes.value - measured) <= 4


def assert_close_weights(ours: Step, theirs: Step, *, within: float = 1e-5) -> None:
    for a, b in zip(ours.live.model.parameters(), theirs.live.model.parameters(), strict=True):
        assert torch.allclose(a, b, rtol=1e-4, atol=within)
        assert (a.grad is None) == (b.grad is None)
        assert a.grad is None or b.grad is None or torch.allclose(a.grad, b.grad, atol=1e-6)


@pytest.mark.parametrize(("slices", "lead"), [(4, 0), (3, 3), (7, 1)])
def test_a_sliced_weight_is_never_resident_as_a_whole(
    slices: int, lead: int, adam: sy.Planned
) -> None:
    chosen = rules(*LAYERS, slices=slices, lead=lead)
    ours, theirs, x = pair(adam, chosen)
    for _ in range(3):
        assert float(ours(x)) == pytest.approx(float(theirs(x)), rel=1e-5)
    assert_close_weights(ours, theirs)
    planned = told(adam, chosen)
    assert_as_said(planned, ours)
    whole = told(adam, tuple(replace(rule, slices=0) for rule in chosen))
    assert planned.predicted.memory_bytes.value < whole.predicted.memory_bytes.value
    assert ours.offload_file is not None
    before = ours.offload_file.moved_bytes
    ours(x)
    assert planned.predicted.communication_bytes.value == ours.offload_file.moved_bytes - before


OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "AdamW": ADAM,
    "Adam, amsgrad, maximize": partial(
        torch.optim.Adam, amsgrad=True, maximize=True, weight_decay=0.1
    ),
    "SGD": partial(torch.optim.SGD, lr=1e-2),
    "SGD, momentum": partial(
        torch.optim.SGD, lr=1e-2, momentum=0.9, nesterov=True, weight_decay=0.1
    ),
    "RMSprop": partial(torch.optim.RMSprop, lr=1e-3, centered=True, momentum=0.9),
    "NAdam": torch.optim.NAdam,
}


class First(nn.Module):
    """A model in which nothing before the weight needs a gradient, so that no sum over its rows
    is sliced."""

    def __init__(self) -> None:
        super().__init__()
        self.large = nn.Linear(128, 512)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = torch.tanh(self.large(x))
        return out


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_update_in_slices_comes_to_the_same_bits(
    name: str, offload_memory: sy.OffloadMemory
) -> None:
    torch.manual_seed(0)
    model, x = First(), torch.randn(16, 128)
    planned = plan(OPTIMIZERS[name], offload_memory, model, x)
    whats = ("gradient", "weight") if name == "SGD" else WHATS
    chosen = tuple(
        replace(rule, slices=0) if rule.what == "gradient" else rule
        for rule in rules("large.weight", slices=5, whats=whats)
    )
    twin = copy.deepcopy(model)
    fitting = told(planned, chosen)
    ours, theirs = fitting.apply(model), planned.what_if().apply(twin)
    for number in range(3):
        torch.manual_seed(number)
        same = [torch.randn_like(p) for p in model.parameters()]
        for step in (ours, theirs):
            step.live.zero_grad()
            step.backward(x)
            for parameter, gradient in zip(step.live.model.parameters(), same, strict=True):
                assert parameter.grad is not None
                parameter.grad.copy_(gradient)
            optimizer_of(step).step()
    assert_same_weights(ours, theirs)
    assert_same_state(optimizer_of(ours), optimizer_of(theirs))
    for _ in range(2):
        ours(x)
    assert_as_said(fitting, ours)


def test_micro_batches_accumulate_into_offloaded_slices(adam: sy.Planned) -> None:
    split = AccumulateRule(micro_batches=2)
    for lead in (0, 2):
        planned = told(adam, (split, *rules(*LAYERS, lead=lead)))
        ours, x = made()
        theirs = copy.deepcopy(ours)
        a, b = planned.apply(ours), told(adam, (split,)).apply(theirs)
        for _ in range(3):
            assert float(a(x)) == pytest.approx(float(b(x)), rel=1e-5)
        assert_close_weights(a, b)
        assert_as_said(planned, a)


def test_sliced_updates_round_half_precision_as_before(offload_memory: sy.OffloadMemory) -> None:
    model, x = made(torch.bfloat16)
    planned = plan(partial(torch.optim.SGD, lr=1e-2, momentum=0.9), offload_memory, model, x)
    twin = copy.deepcopy(model)
    fitting = told(planned, ALL)
    ours, theirs = fitting.apply(model), planned.what_if().apply(twin)
    for _ in range(3):
        assert float(ours(x)) == pytest.approx(float(theirs(x)), rel=1e-2)
    for a, b in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.allclose(a, b, rtol=1e-2, atol=1e-3)
    # Half-precision kernels allocate a workspace, which is smaller for a slice than for the whole.
    measured = ours.receipt().measured.memory_bytes
    assert measured is not None
    assert measured <= fitting.predicted.memory_bytes.value + 4 <= 1.03 * measured


def test_a_user_loop_accumulates_clips_and_schedules(adam: sy.Planned) -> None:
    ours, theirs, x = pair(adam, ALL)
    norms = []
    for step in (ours, theirs):
        model, optimizer = step.live.model, optimizer_of(step)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
        for number in range(4):
            optimizer.zero_grad(set_to_none=number % 2 == 0)
            step.backward(x)
            step.backward(2 * x)
            norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)))
            optimizer.step()
            schedule.step()
    assert norms[:4] == pytest.approx(norms[4:], rel=1e-5)
    assert_close_weights(ours, theirs)
    for kept in (optimizer_of(ours).state, optimizer_of(theirs).state):
        assert {float(state["step"]) for state in kept.values()} == {4.0}


def test_user_gradients_are_accumulated_in_place(adam: sy.Planned) -> None:
    ours, theirs, x = pair(adam, ALL)
    for step in (ours, theirs):
        bare = step.live.model.get_parameter("bare.weight")
        bare.grad = torch.ones_like(bare)
        step.backward(x)
        optimizer_of(step).step()
    assert_close_weights(ours, theirs)


def test_without_a_gradient_nothing_is_updated(adam: sy.Planned) -> None:
    ours, theirs, x = pair(adam, ALL)
    for step in (ours, theirs):
        optimizer_of(step).step()
        step(x)
        step.live.zero_grad()
        optimizer_of(step).step()
    assert_close_weights(ours, theirs)
    assert len(optimizer_of(ours).state_dict()["state"]) == 4


def test_sliced_parameters_are_readable_writable_and_loadable_between_steps(
    adam: sy.Planned,
) -> None:
    ours, theirs, x = pair(adam, ALL)
    seen: list[str] = []
    for step in (ours, theirs):
        model, optimizer = step.live.model, optimizer_of(step)
        optimizer.register_step_pre_hook(lambda *_: seen.append("before"))
        optimizer.register_step_post_hook(lambda *_: seen.append("after"))
        step(x)
        kept = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
        with torch.no_grad():
            model.get_parameter("turned").mul_(0.5)
            bare = model.get_parameter("bare.weight")
            bare.data = bare.data + 1.0  # a new storage: the offloaded value is unchanged
        step(x)
        assert model(x).shape == (8, 4, 128)
        model.load_state_dict(kept[0])
        optimizer.load_state_dict(kept[1])
        step(x)
    assert seen == ["before", "after"] * 6
    assert_close_weights(ours, theirs)
    bare = ours.live.model.get_parameter("bare.weight")
    with pytest.raises(Mismatch, match="exp_avg of this parameter is in offload memory"):
        optimizer_of(ours).state[bare]["exp_avg"]


def test_checkpoints_are_the_same_with_and_without_offload(
    offload_memory: sy.OffloadMemory, tmp_path: Path
) -> None:
    """The products of this layer are bitwise equal in slices and whole."""
    torch.manual_seed(0)
    model, x = First(), torch.randn(16, 128)
    planned = plan(ADAM, offload_memory, model, x)
    chosen = (*rules("large.weight", slices=4, whats=("optimizer", "weight")),)
    whole = rules("large.weight", slices=0, whats=("gradient",))
    twin = copy.deepcopy(model)
    ours = told(planned, (*chosen, *whole)).apply(model)
    theirs = told(planned, (*rules("large.weight", slices=4),)).apply(twin)
    assert_same_checkpoints(ours, theirs, x, tmp_path)


def test_hooks_are_refused_before_the_step_begins(
    adam: sy.Planned, offload_memory: sy.OffloadMemory
) -> None:
    ours, theirs, x = pair(adam, ALL)
    bare = ours.live.model.get_parameter("bare.weight")
    for register in (bare.register_hook, bare.register_post_accumulate_grad_hook):
        hook = register(lambda _: None)
        with pytest.raises(Mismatch, match=r"bare\.weight has a hook"):
            ours(x)
        hook.remove()
    for step in (ours, theirs):
        step(x)
    assert_close_weights(ours, theirs)
    # Hooks of another parameter run.
    ours.live.model.get_parameter("biased.bias").register_hook(lambda g: g * 0)
    ours(x)
    model, _ = made()
    model.get_parameter("bare.weight").register_hook(lambda g: g)
    hooked = plan(ADAM, offload_memory, model, x)
    with pytest.raises(Mismatch, match="it has hooks"):
        told(hooked, ALL)


def test_an_update_that_fails_leaves_parameters_whole(
    adam: sy.Planned, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next update starts again from a checkpoint."""
    ours, theirs, x = pair(adam, ALL)
    for step in (ours, theirs):
        step(x)
    assert ours.live.states is not None
    raw = ours.live.states._raw
    calls = iter([False] * 7 + [True] + [False] * 1000)

    def failing(given: torch.optim.Optimizer) -> object:
        if next(calls):
            raise RuntimeError("the plug was pulled")
        return raw(given)

    monkeypatch.setattr(ours.live.states, "_raw", failing)
    shapes = [p.shape for p in ours.live.model.parameters()]
    with pytest.raises(RuntimeError, match="plug"):
        ours(x)
    assert [p.shape for p in ours.live.model.parameters()] == shapes
    ours.live.model.load_state_dict(theirs.live.model.state_dict())
    optimizer_of(ours).load_state_dict(copy.deepcopy(optimizer_of(theirs).state_dict()))
    for step in (ours, theirs):
        step(x)
    assert_close_weights(ours, theirs)


class Normed(torch.optim.SGD):
    """An optimizer that divides by the norm of each parameter, as LAMB and Adafactor do."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.div_(parameter.norm() + 1)
        return super().step(closure)


class Sized(torch.optim.SGD):
    """An optimizer that depends on the size of a parameter, which no operator shows."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.mul_(1 - 1 / parameter.numel())
        return super().step(closure)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (Normed, "linalg_vector_norm"),
        (Sized, "gives other results for some rows of a parameter"),
        (torch.optim.Rprop, "in its update is not"),
    ],
)
def test_an_update_that_would_differ_in_slices_is_refused(
    make: Any, said: str, offload_memory: sy.OffloadMemory
) -> None:
    planned = plan(partial(make, lr=1e-3), offload_memory)
    with pytest.raises(Mismatch, match=said):
        told(
            planned,
            ALL if make is torch.optim.Rprop else rules(*LAYERS, whats=("weight", "gradient")),
        )
    for able in OPTIMIZERS.values():
        assert why_unsliceable(able) == ""


@pytest.mark.parametrize(
    ("chosen", "said"),
    [
        (rules("turned", whats=("weight",)), "its gradient is not offloaded"),
        (rules("turned", whats=("weight", "gradient")), "optimizer state"),
        (rules("turned", whats=("optimizer",)), "its weight is not offloaded in slices"),
        (
            (
                *rules("turned", whats=("gradient", "optimizer")),
                *rules("turned", slices=0, whats=("weight",)),
            ),
            "its weight is not offloaded in slices",
        ),
    ],
)
def test_rules_that_do_not_go_together_are_refused(
    chosen: tuple[Rule, ...], said: str, adam: sy.Planned
) -> None:
    with pytest.raises(Mismatch, match=said) as refusal:
        told(adam, chosen)
    assert len(str(refusal.value).splitlines()) == 3


def test_a_gradient_alone_may_be_made_in_slices(adam: sy.Planned) -> None:
    ours, theirs, x = pair(adam, rules(*LAYERS, whats=("gradient",)))
    for _ in range(2):
        ours(x)
        theirs(x)
    assert_close_weights(ours, theirs)
    assert_as_said(told(adam, rules(*LAYERS, whats=("gradient",))), ours)


class Twice(nn.Module):
    """A model with a weight whose gradient is a sum of two products, and one that an embedding
    shares."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(300, 128)
        self.inner = nn.Linear(128, 128)
        self.head = nn.Linear(128, 300, bias=False)
        self.head.weight = self.words.weight

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(torch.tanh(self.inner(torch.tanh(self.inner(self.words(x))))))
        return out


def test_a_gradient_that_is_no_single_product_stays_whole(offload_memory: sy.OffloadMemory) -> None:
    """The update is still done in slices."""
    torch.manual_seed(0)
    model, x = Twice(), torch.randint(300, (4, 8))
    twin = copy.deepcopy(model)
    planned = plan(ADAM, offload_memory, model, x)
    fitting = told(planned, rules("inner.weight", "words.weight"))
    program = look_at(fitting)
    called = {n.op.partition("offload_")[2] for n in program.graph.nodes if "offload_" in n.op}
    assert "rows" not in called
    assert {"send_gradient", "begin_weight"} <= called
    ours, theirs = fitting.apply(model), planned.what_if().apply(twin)
    for _ in range(3):
        assert float(ours(x)) == pytest.approx(float(theirs(x)), rel=1e-5)
    assert_close_weights(ours, theirs)
    assert_as_said(fitting, ours)


class Head(nn.Module):
    """One layer of 16 MiB, and next to nothing else."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(256, 256)
        self.head = nn.Linear(256, 16384)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(torch.tanh(self.body(x)))
        return out


def test_a_layer_larger_than_the_budget_is_trained_within_it(
    offload_memory: sy.OffloadMemory, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    model, x = Head(), torch.randn(4, 256)
    planned = plan(ADAM, offload_memory, model, x)
    offered = {(r.parameter, r.what): r.slices for r in states_offered(planned)}
    assert {offered["head.weight", what] for what in ("weight", "gradient")} == {2}
    assert offered["head.weight", "optimizer"] == 8
    assert {n for (name, _), n in offered.items() if name != "head.weight"} == {0}
    with pytest.raises(Infeasible) as refusal:
        planned.what_if(memory=floor_bytes(planned))
    least = refusal.value.least_bytes
    assert least is not None
    fitting = planned.what_if(memory=least)
    path = tmp_path / "a.plan.toml"
    fitting.save(path)
    again = sy.load(path, model, loss, x, optimizer=ADAM)
    assert again.plan.decisions.rules == fitting.plan.decisions.rules
    twin = copy.deepcopy(model)
    ours, theirs = again.apply(model), planned.what_if().apply(twin)
    for _ in range(3):
        assert float(ours(x)) == pytest.approx(float(theirs(x)), rel=1e-5)
    assert_close_weights(ours, theirs)
    measured = ours.receipt().measured.memory_bytes
    assert measured is not None
    assert measured <= least < 24 * MIB
    # Without slices, the layer is resident four times.
    assert told(planned, tuple(replace(r, slices=0) for r in states_offered(planned)))
    whole = told(planned, tuple(replace(r, slices=0, lead=0) for r in states_offered(planned)))
    assert whole.predicted.memory_bytes.value > 64 * MIB


def test_the_reason_for_not_slicing_a_layer_is_given(offload_memory: sy.OffloadMemory) -> None:
    torch.manual_seed(0)
    planned = plan(partial(Normed, lr=1e-2), offload_memory, Head(), torch.randn(4, 256))
    assert "head.weight in slices: aten.linalg_vector_norm" in planned.why_not("offload_state")


def test_slices_are_considered_where_all_of_a_parameter_is_offloaded(adam: sy.Planned) -> None:
    levels = offload_levels(adam.session.base, [*ALL, *rules("biased.bias", slices=0)])
    for level in levels:
        whats = {r.what for r in level if r.parameter == "turned"}
        degrees = {r.slices for r in level if r.parameter == "turned"}
        assert degrees == ({5} if whats == set(WHATS) else {0} if whats else set())


# The models have products with and without a bias, a head of their own, and a cell that is called
# many times.
@pytest.mark.parametrize(("name", "parts"), [("mlp", 1), ("gpt", 2), ("lstm", 2)])
def test_every_model_trains_alike_with_all_possible_slices(
    name: str, parts: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for size in ("_LEAST_SLICED_BYTES", "_TRAINED_SLICE_BYTES", "_UPDATE_SLICE_BYTES"):
        monkeypatch.setattr(offload_state, size, 1024)
    case = zoo.case(name)
    model, criterion, batch = case.make()
    twin = copy.deepcopy(model)
    before, constants, reads = captured(model, criterion, batch, micro_batches=parts)
    without = frozenset(before.graph.unused)
    update = capture_update(model, SGD, without_gradient=without)
    update = replace(update, unsliceable=why_whole(update, is_pointwise=is_pointwise))
    before = replace(before, update=update)
    source = Whole(before.graph)
    able = {what: movable(before, what, least_bytes=1) for what in WHATS}
    slices = offload_state._slice_limits(before, able).of
    assert slices.keys() == set(WHATS)
    assert all(slices.values()), slices
    chosen = [
        OffloadStateRule(what=what, parameter=p, slices=max(slices[what].get(p, (0,))), lead=1)
        for what in WHATS
        for p in able[what]
    ]
    program = OffloadState().rewrite(before, chosen, source)
    assert program.problems() == []
    memory = OffloadFile(sy.OffloadMemory(tmp_path, rate="4 GB/s", size="1 GiB"))
    optimizer = SGD(p for p in model.parameters() if p.requires_grad)
    named = dict(model.named_parameters())
    states = OffloadedStates(optimizer, program, parameters=named, memory=memory)
    ours = LiveStep(
        model, program, constants=constants, batch=batch, optimizer=optimizer, states=states,
        runner=partial(emit, offload_file=memory, tensors=states.tensors), reads=reads,
    )  # fmt: skip
    plain, constants, reads = captured(twin, criterion, batch, micro_batches=parts)
    theirs = LiveStep(
        twin, plain, constants=constants, batch=batch, reads=reads,
        optimizer=SGD(p for p in twin.parameters() if p.requires_grad),
    )  # fmt: skip
    for given in case.batches(3):
        torch.manual_seed(1)
        a = ours(given)
        torch.manual_seed(1)
        assert float(a) == pytest.approx(float(theirs(given)), rel=1e-4)
    for (key, a), b in zip(model.state_dict().items(), twin.state_dict().values(), strict=True):
        assert torch.allclose(a, b, rtol=1e-3, atol=1e-5), key
    memory.close()
