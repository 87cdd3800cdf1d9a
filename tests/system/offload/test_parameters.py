"""Weights and gradients in offload memory: the same bits, the predicted bytes, and always live."""

from __future__ import annotations

import copy
import os
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import steelyard as sy
from steelyard.api.memory_meter import resident_bytes
from steelyard.capture.tracing.optimizer import capture_update
from steelyard.errors import Infeasible, Mismatch
from steelyard.ir.program import Program
from steelyard.ir.rule import Rule, of_kind, to_rules
from steelyard.ir.saved_activations import saved_for_backward
from steelyard.offload.optimizer_state import OffloadedStates
from steelyard.offload.tier import OffloadFile
from steelyard.run.codegen import emit
from steelyard.run.step import LiveStep
from steelyard.trades.accumulate import AccumulateRule
from steelyard.trades.offload import with_transfers
from steelyard.trades.offload_state import MOVABLE, OffloadState, OffloadStateRule, movable
from steelyard.trades.recompute import RecomputeRule, recomputable, with_copies
from tests import zoo
from tests.harness import floor_bytes, in_a_hurry
from tests.support.graphs import Whole
from tests.support.live import captured
from tests.system.offload.test_optimizer_state import (
    ADAM,
    LAYERS,
    MIB,
    Wide,
    assert_same_checkpoints,
    assert_same_state,
    assert_same_weights,
    loss,
    made,
    optimizer_of,
    pair,
    plan,
    told,
)

pytestmark = pytest.mark.xdist_group("states")


@pytest.fixture(scope="module", autouse=True)
def _in_a_hurry(costs: Path) -> Iterator[None]:
    with in_a_hurry(costs):
        yield


@pytest.fixture(scope="module")
def offload_memory(tmp_path_factory: pytest.TempPathFactory) -> sy.OffloadMemory:
    return sy.OffloadMemory(tmp_path_factory.mktemp("far"), rate="2 GB/s", size="1 GiB")


@pytest.fixture(scope="module")
def adam(offload_memory: sy.OffloadMemory) -> sy.Planned:
    return plan(ADAM, offload_memory)


def rules(*whats: str, lead: int = 1) -> tuple[Rule, ...]:
    layers = OffloadStateRule(parameter="layers.*.weight", count=LAYERS, lead=lead)
    tall = OffloadStateRule(parameter="tall.weight", count=1, lead=lead)
    return tuple(replace(rule, what=what) for what in whats for rule in (layers, tall))


@pytest.mark.parametrize("lead", [0, 1, 2, 5])
@pytest.mark.parametrize("whats", [("weight",), ("gradient",), ("gradient", "weight"), MOVABLE])
def test_training_gives_the_same_bits_within_the_predicted_bytes(
    whats: Sequence[str], lead: int, adam: sy.Planned
) -> None:
    chosen = rules(*whats, lead=lead)
    ours, theirs, x = pair(adam, chosen)
    for _ in range(4):
        assert torch.equal(ours(x), theirs(x))
    assert_same_weights(ours, theirs)
    for a, b in zip(ours.live.model.parameters(), theirs.live.model.parameters(), strict=True):
        assert (a.grad is None) == (b.grad is None)
        assert a.grad is None or b.grad is None or torch.equal(a.grad, b.grad)
    said = told(adam, chosen).predicted.memory_bytes.value
    measured = ours.receipt().measured.memory_bytes
    assert measured is not None
    # The loss of the previous step, whose tangent torch keeps.
    assert abs(said - measured) <= 4
    if lead < 5:
        assert said < adam.predicted.memory_bytes.value
    ours.live.zero_grad()
    theirs.live.zero_grad()
    weights = (LAYERS * 256 + 900) * 256 * 4
    gone = sum({"weight": 1, "gradient": 0, "optimizer": 2}[what] for what in whats)
    assert resident_bytes(ours.live) == resident_bytes(theirs.live) - gone * weights
    assert_same_state(optimizer_of(ours), optimizer_of(theirs))


def test_micro_batches_accumulate_into_offloaded_gradients(adam: sy.Planned) -> None:
    split = AccumulateRule(micro_batches=2)
    ours, x = made()
    theirs = copy.deepcopy(ours)
    planned = told(adam, (split, *rules(*MOVABLE)))
    a = planned.apply(ours)
    b = told(adam, (split,)).apply(theirs)
    for _ in range(3):
        assert torch.equal(a(x), b(x))
    assert_same_weights(a, b)
    measured = a.receipt().measured.memory_bytes
    assert measured is not None
    assert abs(planned.predicted.memory_bytes.value - measured) <= 4


# The models cover dropout, buffers that change, tied weights, a weight used twice, hooks that read,
# weights that are views, and weights without a gradient.
MODELS = ("mlp", "gpt", "gpt_sdpa", "lstm", "resnet_bn", "moe", "edge_tied_module",
          "edge_tied_transposed", "edge_frozen_block", "edge_where_masked")  # fmt: skip


def _is_same(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.isnan(), b.isnan()) and torch.equal(a.nan_to_num(), b.nan_to_num())


@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("name", [c.name for c in zoo.CASES if c.name in MODELS])
def test_random_copies_and_transfers_do_not_change_any_model(
    name: str, parts: int, tmp_path: Path
) -> None:
    case, rng = zoo.case(name), random.Random(name)
    model, criterion, batch = case.make()
    twin = copy.deepcopy(model)
    before, constants, reads = captured(model, criterion, batch, micro_batches=parts)
    without = frozenset(before.graph.unused)
    before = replace(before, update=capture_update(model, ADAM, without_gradient=without))
    memory = OffloadFile(sy.OffloadMemory(tmp_path, rate="4 GB/s", size="1 GiB"))
    program = _at_random(before, rng)
    optimizer = ADAM(p for p in model.parameters() if p.requires_grad)
    named = dict(model.named_parameters())
    states = OffloadedStates(optimizer, program, parameters=named, memory=memory)
    ours = LiveStep(
        model, program, constants=constants, batch=batch, optimizer=optimizer, states=states,
        runner=partial(emit, offload_file=memory, tensors=states.tensors), reads=reads,
    )  # fmt: skip
    plain, constants, reads = captured(twin, criterion, batch, micro_batches=parts)
    theirs = LiveStep(
        twin, plain, constants=constants, batch=batch, reads=reads,
        optimizer=ADAM(p for p in twin.parameters() if p.requires_grad),
    )  # fmt: skip
    for given in case.batches(3):
        torch.manual_seed(1)
        a = ours(given)
        torch.manual_seed(1)
        assert _is_same(a, theirs(given))
    for (key, a), b in zip(model.state_dict().items(), twin.state_dict().values(), strict=True):
        assert _is_same(a, b), key
    memory.close()


def _at_random(before: Program, rng: random.Random) -> Program:
    again = [v for v in sorted(recomputable(before.graph)) if rng.random() < 0.3]
    copied = with_copies(before, again)
    able = sorted(saved_for_backward(copied) - {i.node for i in copied.recomputed})
    times = {v: (rng.randrange(4), rng.randrange(4)) for v in able if rng.random() < 0.3}
    moving = with_transfers(copied, times)
    found = [
        OffloadStateRule(what=what, parameter=name, lead=rng.randrange(4))
        for what in MOVABLE
        for name in movable(moving, what, least_bytes=1)
    ]
    assert {rule.what for rule in found} >= {"gradient", "weight"}
    chosen = [rule for rule in found if rng.random() < 0.8]
    program = OffloadState().rewrite(moving, chosen, Whole(before.graph))
    assert program.problems() == []
    assert program.graph.fingerprint == before.graph.fingerprint
    assert program.flops == copied.flops
    return program


def test_offloaded_parameters_are_readable_and_writable_between_steps(adam: sy.Planned) -> None:
    ours, theirs, x = pair(adam, rules(*MOVABLE))
    kept = {}
    for step in (ours, theirs):
        model = step.live.model
        tall, first = model.get_parameter("tall.weight"), model.get_parameter("layers.0.weight")
        step(x)
        kept[step] = copy.deepcopy(model.state_dict())
        with torch.no_grad():
            tall.mul_(0.5)
            first.data = first.data + 1.0  # a new storage: the offloaded value is unchanged
        step(x)
        assert model(x).shape == (2, 900)
        model.load_state_dict(kept[step])
        step(x)
    for name, value in kept[theirs].items():
        assert torch.equal(kept[ours][name], value)
    assert_same_weights(ours, theirs)


def test_a_user_loop_clips_accumulates_and_reads_gradients(adam: sy.Planned) -> None:
    ours, theirs, x = pair(adam, rules(*MOVABLE))
    norms = []
    for step in (ours, theirs):
        for _ in range(3):
            step.live.zero_grad()
            step.backward(x)
            step.backward(2 * x)
            weights = step.live.model.parameters()
            norms.append(torch.nn.utils.clip_grad_norm_(weights, 1e-3))
            optimizer_of(step).step()
    assert norms[:3] == norms[3:]
    assert_same_weights(ours, theirs)


def test_user_gradients_are_accumulated_in_place(adam: sy.Planned) -> None:
    ours, theirs, x = pair(adam, rules("gradient"))
    for step in (ours, theirs):
        tall = step.live.model.get_parameter("tall.weight")
        tall.grad = torch.ones_like(tall)
        step.backward(x)
        optimizer_of(step).step()
    assert_same_weights(ours, theirs)


def test_parameter_hooks_run_and_may_change_gradients(adam: sy.Planned) -> None:
    ours, theirs, x = pair(adam, rules(*MOVABLE))
    seen: list[str] = []
    for step in (ours, theirs):
        tall = step.live.model.get_parameter("tall.weight")
        tall.register_hook(lambda g: g * 2)
        tall.register_post_accumulate_grad_hook(lambda p: seen.append(str(p.grad.shape)))
        for _ in range(2):
            step(x)
    assert seen == [seen[0]] * 4
    assert_same_weights(ours, theirs)


def test_frozen_weights_need_no_optimizer(offload_memory: sy.OffloadMemory) -> None:
    model, x = made()
    assert isinstance(model, Wide)
    for layer in model.layers:
        layer.requires_grad_(False)
    twin = copy.deepcopy(model)
    planned = sy.plan(model, loss, x, cluster=sy.Cluster.here(offload_memory=offload_memory))
    frozen = OffloadStateRule(what="weight", parameter="layers.*.weight", count=LAYERS)
    trained = OffloadStateRule(what="weight", parameter="tall.weight")
    assert "would transfer" in planned.why_not("offload_state")
    with pytest.raises(Mismatch, match="no optimizer"):
        told(planned, (trained,))
    fitting = told(planned, (frozen,))
    step, plain = fitting.apply(model), planned.what_if().apply(twin)
    for _ in range(2):
        assert torch.equal(step.backward(x), plain.backward(x))
    assert_same_gradients(model, twin)
    assert fitting.predicted.memory_bytes.value < planned.predicted.memory_bytes.value
    # The weight is fetched and sent once in a step, by the optimizer: no pass sends it.
    assert step.offload_file is not None
    passes = {i.node for i in look_at(fitting).instructions if i.node.endswith(".send")}
    assert passes == set()


def look_at(planned: sy.Planned) -> Program:
    return planned.session.apply_rules(planned.plan.decisions.rules)


def assert_same_gradients(ours: nn.Module, theirs: nn.Module) -> None:
    for (name, a), b in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        assert (a.grad is None) == (b.grad is None), name
        assert a.grad is None or b.grad is None or torch.equal(a.grad, b.grad), name


def test_parameter_offload_is_chosen_where_state_offload_is_not_enough(
    adam: sy.Planned, tmp_path: Path
) -> None:
    least = adam.what_if(memory=10 * MIB)
    whats = {rule.what for rule in least.plan.decisions.rules if rule.trade == "offload_state"}
    assert whats == set(MOVABLE)
    told_of = [t for t in least.plan.taken if t.trade == "offload_state"]
    assert {t.label.split()[0] for t in told_of} == set(MOVABLE)
    assert all(t.buys_bytes > 0 and t.pays_seconds > 0 for t in told_of)
    path = tmp_path / "a.plan.toml"
    least.save(path)
    assert 'what = "gradient"' in path.read_text()
    model, x = made()
    again = sy.load(path, model, loss, x, optimizer=ADAM)
    assert again.plan.decisions.rules == least.plan.decisions.rules
    assert again.predicted.memory_bytes.value == least.predicted.memory_bytes.value <= 10 * MIB
    step = again.apply(model)
    for _ in range(3):
        step(x)
    assert step.receipt().measured.memory_bytes <= 10 * MIB


class Twice(Wide):
    """A model whose weights are fetched twice in the forward pass."""

    def forward(self, x: Tensor) -> Tensor:
        for layer in (*self.layers, *self.layers):
            x = torch.tanh(layer(x))
        out: Tensor = self.tall(x)
        return out


def test_the_plan_reports_the_saving_of_8_bit_activations(offload_memory: sy.OffloadMemory) -> None:
    torch.manual_seed(0)
    model, cluster = Twice(), sy.Cluster.here(offload_memory=offload_memory)
    planned = sy.plan(model, loss, torch.randn(16, 256), optimizer=ADAM, cluster=cluster)
    with pytest.raises(Infeasible) as refusal:
        planned.what_if(memory=floor_bytes(planned))
    assert refusal.value.least_bytes is not None
    least = planned.what_if(memory=refusal.value.least_bytes)
    states = of_kind(least.plan.decisions.rules, OffloadStateRule)
    assert {rule.what for rule in states} == set(MOVABLE)
    assert "the accuracy budget is 0" in least.why_not("quantize_activations")


def test_an_older_plan_file_offloads_the_optimizer_state(adam: sy.Planned, tmp_path: Path) -> None:
    path = tmp_path / "a.plan.toml"
    told(adam, rules("optimizer")).save(path)
    path.write_text(path.read_text().replace('what = "optimizer"\n', ""))
    model, x = made()
    assert sy.load(path, model, loss, x, optimizer=ADAM).plan.decisions.rules == rules("optimizer")


def test_the_model_outlives_its_step(adam: sy.Planned) -> None:
    ours, theirs, x = pair(adam, rules(*MOVABLE))
    for step in (ours, theirs):
        step(x)
    model = ours.live.model
    assert ours.offload_file is not None
    ours.offload_file.close()
    del ours
    for a, b in zip(model.parameters(), theirs.live.model.parameters(), strict=True):
        assert torch.equal(a, b)
    assert torch.equal(model(x), theirs.live.model(x))


def test_a_disk_that_fails_is_named(adam: sy.Planned, monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    ours, _, x = pair(adam, rules("weight"))
    ours(x)

    def fail(*_: object) -> int:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "preadv", fail)
    with pytest.raises(sy.SteelyardError, match="Input/output error"):
        ours(x)


def test_an_aborted_update_leaves_no_pending_transfers(
    adam: sy.Planned, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, theirs, x = pair(adam, rules(*MOVABLE))
    for step in (ours, theirs):
        step.backward(x)
        optimizer_of(step).step()
        step.backward(x)
    optimizer_of(theirs).step()
    write, wait = os.pwrite, OffloadFile.await_sent
    waits = iter([KeyboardInterrupt])

    def late(*arguments: Any) -> int:
        time.sleep(0.05)
        return write(*arguments)

    def interrupted(memory: OffloadFile, transfer: Any) -> None:
        for interrupt in waits:
            raise interrupt
        wait(memory, transfer)

    monkeypatch.setattr(os, "pwrite", late)
    monkeypatch.setattr(OffloadFile, "await_sent", interrupted)
    with pytest.raises(KeyboardInterrupt):
        optimizer_of(ours).step()
    updated = 0
    expected = optimizer_of(theirs).state_dict()["state"]
    state = optimizer_of(ours).state_dict()["state"]
    weights = zip(ours.live.model.parameters(), theirs.live.model.parameters(), strict=True)
    for index, (mine, other) in enumerate(weights):
        if index in state and state[index]["step"] == 2:
            updated += 1
            assert torch.equal(mine, other)
            assert torch.equal(state[index]["exp_avg"], expected[index]["exp_avg"])
    assert updated


SGD = partial(torch.optim.SGD, lr=1e-2)


class Frozen(nn.Module):
    """Products with frozen weights in both orientations, one without a bias and one read twice."""

    def __init__(self, rows: int = 1024, columns: int = 1024) -> None:
        super().__init__()
        self.first = nn.Linear(columns, columns)
        self.biased = nn.Linear(columns, rows).requires_grad_(False)
        self.bare = nn.Linear(rows, columns, bias=False).requires_grad_(False)
        self.turned = nn.Parameter(torch.randn(columns, rows) / 32, requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.first(x))
        x = torch.tanh(self.bare(torch.relu(self.biased(x))))
        return torch.tanh(self.bare(torch.relu(x @ self.turned)))


def frozen(*names: str, slices: int) -> tuple[Rule, ...]:
    return tuple(
        OffloadStateRule(what="weight", parameter=name, slices=slices, lead=1) for name in names
    )


@pytest.fixture(scope="module")
def thawed(offload_memory: sy.OffloadMemory) -> sy.Planned:
    """Return a step whose weights are mostly frozen."""
    torch.manual_seed(0)
    cluster = sy.Cluster.here(offload_memory=offload_memory)
    return sy.plan(Frozen(), loss, torch.randn(64, 1024), optimizer=SGD, cluster=cluster)


@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("slices", [2, 3, 7])
def test_products_read_a_frozen_weight_slice_by_slice(
    slices: int, again: bool, thawed: sy.Planned
) -> None:
    moved = frozen("biased.weight", "bare.weight", "turned", slices=slices)
    session = thawed.session
    graph = session.base.graph
    copies = to_rules(graph, sorted(recomputable(graph)), RecomputeRule) if again else ()
    torch.manual_seed(0)
    model, x = Frozen(), torch.randn(64, 1024)
    twin = copy.deepcopy(model)
    planned = told(thawed, (*copies, *moved))
    ours, theirs = planned.apply(model), thawed.what_if().apply(twin)
    for _ in range(3):
        assert float(ours(x)) == pytest.approx(float(theirs(x)), rel=1e-6)
    for a, b in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.allclose(a, b, rtol=1e-4, atol=1e-6)
    measured = ours.receipt().measured.memory_bytes
    assert measured is not None
    assert abs(planned.predicted.memory_bytes.value - measured) <= 4
    whole = told(thawed, (*copies, *(replace(rule, slices=0) for rule in moved)))
    # The fetch of a product begins while the one before it computes: four slices are resident then.
    if slices > 4:
        assert planned.predicted.memory_bytes.value < whole.predicted.memory_bytes.value
    # The weights are read in four products forward, and in three more backward or recomputed.
    once = sum(p.nbytes for n, p in twin.named_parameters() if n in {r.parameter for r in moved})
    assert ours.offload_file is not None
    assert planned.predicted.communication_bytes.value >= 2 * once
    moved_bytes = ours.offload_file.moved_bytes
    ours(x)
    assert (
        planned.predicted.communication_bytes.value == ours.offload_file.moved_bytes - moved_bytes
    )


def test_slices_in_half_precision_take_the_predicted_bytes(
    offload_memory: sy.OffloadMemory,
) -> None:
    torch.manual_seed(0)
    model, x = Frozen().to(torch.bfloat16), torch.randn(64, 1024, dtype=torch.bfloat16)
    whole = sy.plan(
        model, loss, x, optimizer=SGD, cluster=sy.Cluster.here(offload_memory=offload_memory)
    )
    planned = told(whole, frozen("biased.weight", "bare.weight", "turned", slices=16))
    step = planned.apply(model)
    for _ in range(2):
        step(x)
    measured = step.receipt().measured.memory_bytes
    assert measured is not None
    assert abs(planned.predicted.memory_bytes.value - measured) <= 4


def test_weights_read_by_other_operators_are_fetched_whole(
    offload_memory: sy.OffloadMemory,
) -> None:
    class Both(Frozen):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * self.turned.sum()

    torch.manual_seed(0)
    planned = sy.plan(
        Both(),
        loss,
        torch.randn(64, 1024),
        optimizer=ADAM,
        cluster=sy.Cluster.here(offload_memory=offload_memory),
    )
    program = planned.session.apply_rules(frozen("turned", "bare.weight", slices=4))
    begun = {str(n.args[0]) for n in program.graph.nodes if n.op.endswith("begin_weight")}
    assert begun == {"parameter:bare.weight"}


def test_a_large_frozen_weight_is_offered_in_slices(thawed: sy.Planned, tmp_path: Path) -> None:
    """A weight of 4 MiB is not offered in slices; one of 16 MiB is, in slices of 4 and of 1 MiB."""
    assert {r.slices for r in states_offered(thawed)} == {0}
    torch.manual_seed(0)
    model, x = Frozen(rows=4096), torch.randn(16, 1024)
    cluster = sy.Cluster.here(
        offload_memory=sy.OffloadMemory(tmp_path, rate="2 GB/s", size="1 GiB")
    )
    large = sy.plan(model, loss, x, optimizer=ADAM, cluster=cluster)
    found = {(r.parameter, r.slices) for r in states_offered(large) if r.what == "weight"}
    names = ("biased.weight", "bare.weight", "turned")
    assert found == {("first.weight", 0), *((name, n) for name in names for n in (4, 16))}
    path = tmp_path / "a.plan.toml"
    chosen = (r for r in states_offered(large) if r.what == "weight" and r.slices in (0, 4))
    fitting = told(large, tuple(chosen))
    fitting.save(path)
    assert "slices = 4" in path.read_text()
    again = sy.load(path, model, loss, x, optimizer=ADAM)
    assert set(again.plan.decisions.rules) == set(fitting.plan.decisions.rules)


def states_offered(planned: sy.Planned) -> list[Rule]:
    offers = planned.session.search.offers
    return [rule for o in offers if o.trade == "offload_state" for rule in o.rules]


def test_a_partial_update_is_not_taken_for_new_values(
    adam: sy.Planned, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next update starts again: transfers that were in flight do not arrive in it."""
    ours, theirs, x = pair(adam, rules(*MOVABLE, lead=2))
    for step in (ours, theirs):
        step(x)
    optimizer = optimizer_of(ours)
    assert ours.live.states is not None
    raw = ours.live.states._raw
    calls = iter([False] * 3 + [True] + [False] * 1000)

    def failing(given: torch.optim.Optimizer) -> object:
        if next(calls):
            raise RuntimeError("the plug was pulled")
        return raw(given)

    monkeypatch.setattr(ours.live.states, "_raw", failing)
    with pytest.raises(RuntimeError, match="plug"):
        ours(x)
    # Load the state from before that step, from the twin, as from a checkpoint.
    ours.live.model.load_state_dict(theirs.live.model.state_dict())
    optimizer.load_state_dict(copy.deepcopy(optimizer_of(theirs).state_dict()))
    for _ in range(2):
        assert torch.equal(ours(x), theirs(x))
    assert_same_weights(ours, theirs)
    assert_same_state(optimizer, optimizer_of(theirs))


def test_checkpoints_are_the_same_with_and_without_offload(
    adam: sy.Planned, tmp_path: Path
) -> None:
    assert_same_checkpoints(*pair(adam, rules(*MOVABLE)), tmp_path)


def test_offloaded_values_bypass_the_page_cache(adam: sy.Planned) -> None:
    """Transfers bypass the page cache; only reading a weight between steps fills it."""
    ours, _, x = pair(adam, rules(*MOVABLE))
    for _ in range(2):
        ours(x)
    assert ours.offload_file is not None
    assert cached_bytes(ours.offload_file) == 0
    tall = ours.live.model.get_parameter("tall.weight")
    tall.detach().sum()
    assert cached_bytes(ours.offload_file) >= tall.nbytes


def cached_bytes(memory: OffloadFile) -> int:
    """Return how much of the file the system has in memory, according to mincore."""
    import ctypes
    import mmap
    import os

    size = os.fstat(memory._file).st_size
    pages = mmap.mmap(memory._file, size)
    found = (ctypes.c_ubyte * (-(-size // mmap.PAGESIZE)))()
    address = ctypes.addressof(ctypes.c_char.from_buffer(pages))
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.mincore(ctypes.c_void_p(address), ctypes.c_size_t(size), found) == 0
    return sum(page & 1 for page in found) * mmap.PAGESIZE
