"""Products with frozen weights in offload memory, and the operators that are executed in their
slices. The sums are the same, the bytes are as predicted, and nothing that only the next line
reads is whole."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import steelyard as sy
from steelyard.hardware.cluster import OFFLOAD_IN, OFFLOAD_OUT, Link
from steelyard.ir.graph import Node
from steelyard.ir.metrics import Estimate
from steelyard.ir.program import Program
from steelyard.ir.rule import Rule
from steelyard.ir.saved_activations import saved_for_backward
from steelyard.measure.operators.memory import meter_once
from steelyard.offload.optimizer_state import OffloadedStates
from steelyard.offload.tier import OffloadFile
from steelyard.operators import call
from steelyard.operators import sliced as carried_out
from steelyard.passes.offload.sliced_activation_matmuls import sliceable_inputs
from steelyard.predict import step_seconds
from steelyard.run.codegen import emit
from steelyard.run.step import LiveStep
from steelyard.trades.offload import with_transfers
from steelyard.trades.offload_state import OffloadState, OffloadStateRule, movable
from steelyard.trades.recompute import recomputable, with_copies
from tests.harness import Trial, costs_of, predicted_above
from tests.support.graphs import Whole
from tests.support.live import captured

pytestmark = pytest.mark.xdist_group("states")

WIDTH, INNER, SLICES = 128, 512, 4


@pytest.fixture
def memory(tmp_path: Path) -> Iterator[OffloadFile]:
    memory = OffloadFile(sy.OffloadMemory(tmp_path, rate="4 GB/s", size="1 GiB"))
    yield memory
    memory.close()


class Turned(nn.Linear):
    """A layer with a transposed weight, whose rows are terms of a sum."""

    def __init__(self, given: int, made: int, *, bias: bool = True) -> None:
        super().__init__(made, given, bias=False)
        self.added = nn.Parameter(torch.randn(made))

    def forward(self, x: Tensor) -> Tensor:
        return torch.addmm(self.added, x, self.weight)


class Left(nn.Linear):
    """A layer whose weight is the transposed left operand, so that its rows are terms of a sum."""

    def __init__(self, given: int, made: int, *, bias: bool = True) -> None:
        super().__init__(made, given, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return (self.weight.t() @ x.t()).t()


class Block(nn.Module):
    """A trained layer, followed by a frozen perceptron of some kind."""

    def __init__(
        self,
        between: Callable[[Any, Tensor], Tensor],
        *,
        bias: bool = True,
        up: type[nn.Linear] = nn.Linear,
    ) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.up = up(WIDTH, INNER, bias=bias)
        self.gate = nn.Linear(WIDTH, INNER, bias=bias)
        self.down = nn.Linear(INNER, WIDTH, bias=bias)
        self.scale = nn.Parameter(torch.ones(INNER))
        for frozen in (self.up, self.gate, self.down):
            frozen.requires_grad_(False)
        self.lora_a = nn.Parameter(torch.randn(8, WIDTH) / 8)
        self.lora_b = nn.Parameter(torch.randn(INNER, 8) / 8)
        self._between = between

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        return x + self.down(self._between(self, x))


def gelu(m: Block, x: Tensor) -> Tensor:
    return F.gelu(m.up(x))


def relu(m: Block, x: Tensor) -> Tensor:
    return torch.relu(m.up(x) * 2 + 1)


def gated(m: Block, x: Tensor) -> Tensor:
    return F.silu(m.gate(x)) * m.up(x)


def dropped(m: Block, x: Tensor) -> Tensor:
    return F.dropout(F.gelu(m.up(x)), 0.3)


def scaled(m: Block, x: Tensor) -> Tensor:
    return torch.tanh(m.up(x) * m.scale)


def adapted(m: Block, x: Tensor) -> Tensor:
    return F.gelu(m.up(x) + x @ m.lora_a.t() @ m.lora_b.t())


def heads(m: Block, x: Tensor) -> Tensor:
    """Return a step whose operators after the product work across columns, so that none is in
    the slices."""
    partition = m.up(x).unflatten(-1, (4, -1)).softmax(-1)
    return partition.flatten(-2)


def loss(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).float().square().mean()


@dataclass(frozen=True, kw_only=True)
class Case:
    between: Callable[[Any, Tensor], Tensor]
    # The operators behind the first product that reads offload memory, computed in its slices.
    inside: tuple[str, ...]
    shape: tuple[int, ...] = (24, WIDTH)
    bias: bool = True
    up: type[nn.Linear] = nn.Linear
    dtype: torch.dtype = torch.float32
    parts: int = 1
    again: bool = False


CASES = {
    "gelu": Case(between=gelu, inside=("addmm", "gelu")),
    "relu": Case(between=relu, inside=("addmm", "mul", "add", "relu")),
    "gated": Case(between=gated, inside=("addmm", "silu", "addmm", "mul")),
    "dropout": Case(between=dropped, inside=("addmm", "gelu", "masked_scale")),
    "scaled": Case(between=scaled, inside=("addmm", "mul", "tanh")),
    "adapters": Case(between=adapted, inside=("addmm", "add", "gelu")),
    "heads": Case(between=heads, inside=("addmm",)),
    "3 dims": Case(between=gelu, inside=("addmm", "view", "gelu", "view"), shape=(4, 6, WIDTH)),
    "3 dims, gated": Case(
        between=gated,
        inside=("mm", "_unsafe_view", "silu", "mm", "_unsafe_view", "mul", "view"),
        shape=(4, 6, WIDTH),
        bias=False,
    ),
    "no bias": Case(between=gelu, inside=("mm", "gelu"), bias=False),
    "bfloat16": Case(between=gated, inside=("addmm", "silu", "addmm", "mul"), dtype=torch.bfloat16),
    "a sum": Case(between=gelu, inside=("addmm",), up=Turned),
    "a sum, on the left": Case(between=relu, inside=("mm",), up=Left),
    "a sum, bfloat16": Case(between=gelu, inside=("addmm",), up=Turned, dtype=torch.bfloat16),
    "micro-batches": Case(between=dropped, inside=("addmm", "gelu", "masked_scale"), parts=2),
    "made again": Case(between=adapted, inside=("addmm", "add", "gelu"), again=True),
}


@pytest.mark.parametrize("name", CASES)
def test_operators_after_a_product_are_computed_per_slice(name: str, memory: OffloadFile) -> None:
    case = CASES[name]
    torch.manual_seed(0)
    model = Block(case.between, bias=case.bias, up=case.up).to(case.dtype)
    batch = torch.randn(*case.shape, dtype=case.dtype)
    twin = copy.deepcopy(model)
    before, constants, reads = captured(model, loss, batch, micro_batches=case.parts)
    program = before
    if case.again:
        program = with_copies(program, sorted(recomputable(program.graph)))
    read = {"up.weight", "down.weight", *(["gate.weight"] if case.between is gated else [])}
    program = OffloadState().rewrite(program, sliced(*sorted(read)), Whole(before.graph))
    assert told(loops(program)[0]) == case.inside
    assert program.graph.fingerprint == before.graph.fingerprint
    ours = live(model, program, memory, batch=batch, constants=constants, reads=reads)
    theirs = LiveStep(twin, before, constants=constants, batch=batch, reads=reads)
    for _ in range(2):
        seen = []
        for step in (ours, theirs):
            torch.manual_seed(1)
            step.zero_grad()
            seen.append(float(step.backward(batch)))
        assert seen[0] == pytest.approx(seen[1], rel=1e-6 if case.dtype is torch.float32 else 1e-2)
    exact = case.dtype is torch.float32
    for a, b in zip(model.parameters(), twin.parameters(), strict=True):
        assert (a.grad is None) == (b.grad is None)
        if a.grad is not None and b.grad is not None:
            assert (a.grad - b.grad).abs().max() <= (1e-5 if exact else 3e-2) * b.grad.abs().max()
    ours.zero_grad()
    metered = meter_once(lambda: ours.backward(batch))
    assert abs(predicted_above(program, costs_of(program.graph)) - metered.peak_bytes) <= 4


def sliced(*names: str, slices: int = SLICES) -> tuple[Rule, ...]:
    return tuple(
        OffloadStateRule(what="weight", parameter=name, slices=slices, lead=1) for name in names
    )


def loops(program: Program) -> list[Node]:
    nodes = (program.graph.by_name[i.node] for i in program.instructions if i.sink is None)
    return [node for node in nodes if node.is_fetch_matmul]


def told(node: Node) -> tuple[str, ...]:
    """Return the operators that a loop executes, except the transpose of the weight."""
    assert node.body is not None
    names = (call.op.split(".")[1] for call in node.body.calls[0][1])
    return tuple(name for name in names if name != "t")


def live(model: nn.Module, program: Program, memory: OffloadFile, **settings: Any) -> LiveStep:
    trained = (p for p in model.parameters() if p.requires_grad)
    optimizer = torch.optim.SGD(trained, lr=1e-2)
    states = OffloadedStates(
        optimizer, program, parameters=dict(model.named_parameters()), memory=memory
    )
    return LiveStep(
        model, program, optimizer=optimizer, states=states,
        runner=partial(emit, offload_file=memory, tensors=states.tensors), **settings,
    )  # fmt: skip


class Tower(nn.Module):
    """A model with blocks of several kinds in a row."""

    def __init__(self) -> None:
        super().__init__()
        kinds = (gated, dropped, adapted, gelu)
        self.blocks = nn.ModuleList(Block(between) for between in kinds)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


@pytest.mark.parametrize("seed", range(4))
def test_random_copies_and_transfers_do_not_change_training(seed: int, memory: OffloadFile) -> None:
    rng = random.Random(seed)
    torch.manual_seed(seed)
    model, batch = Tower(), torch.randn(24, WIDTH)
    twin = copy.deepcopy(model)
    before, constants, reads = captured(model, loss, batch)
    again = [v for v in sorted(recomputable(before.graph)) if rng.random() < 0.4]
    copied = with_copies(before, again)
    able = sorted(saved_for_backward(copied) - {i.node for i in copied.recomputed})
    times = {v: (rng.randrange(4), rng.randrange(4)) for v in able if rng.random() < 0.4}
    slices = {v: rng.choice((2, 3)) for v in sliceable_inputs(copied, sorted(times))}
    moving = with_transfers(copied, times, slices)
    frozen = [n for n, p in model.named_parameters() if not p.requires_grad and p.dim() == 2]
    rules = [
        replace(rule, slices=rng.choice((0, 2, 3, 8)), lead=rng.randrange(4))
        for rule in sliced(
            *(n for n in frozen if rng.random() < 0.8 and n in movable(moving, "weight"))
        )
    ]
    program = OffloadState().rewrite(moving, rules, Whole(before.graph))
    assert len(loops(program)) > 4
    ours = live(model, program, memory, batch=batch, constants=constants, reads=reads)
    theirs = LiveStep(twin, before, constants=constants, batch=batch, reads=reads)
    for step in (ours, theirs):
        torch.manual_seed(1)
        step.backward(batch)
    assert_same_gradients(model, twin)
    ours.zero_grad()
    metered = meter_once(lambda: ours.backward(batch))
    assert abs(predicted_above(program, costs_of(program.graph)) - metered.peak_bytes) <= 4


def assert_same_gradients(ours: nn.Module, theirs: nn.Module) -> None:
    for (name, a), b in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        assert (a.grad is None) == (b.grad is None), name
        if a.grad is not None and b.grad is not None:
            # The gradient of a key's bias is zero up to rounding.
            assert (a.grad - b.grad).abs().max() <= 1e-5 * b.grad.abs().max() + 1e-9, name


def test_values_read_only_in_slices_are_never_whole(memory: OffloadFile) -> None:
    """After frozen layers alone, no backward pass reads the values between product and result."""
    torch.manual_seed(0)
    model, batch = Block(gated), torch.randn(512, WIDTH)
    model.first.requires_grad_(False)
    model.out = nn.Linear(WIDTH, 1)

    def head(model: nn.Module, x: Tensor) -> Tensor:
        out: Tensor = model.get_submodule("out")(model(x))
        return out.square().mean()

    before, _, _ = captured(model, head, batch)
    program = OffloadState().rewrite(
        before, sliced("gate.weight", "up.weight", slices=8), Whole(before.graph)
    )
    (loop,) = loops(program)
    assert [given.name for given in loop.body.gives] == ["mul"]
    value = 512 * INNER * 4
    plain, priced = (predicted_above(p, costs_of(p.graph)) for p in (before, program))
    # One of three values is left, plus the buffers for slices and the slices of the values read
    # with it.
    assert priced < plain - 2 * value + 2 * 2 * WIDTH * INNER // 8 * 4 + 3 * value // 8 + 4096


@pytest.mark.parametrize("name", ["llama", "bert", "gpt2"])
def test_a_frozen_transformer_is_trained_with_sliced_weights(
    name: str, memory: OffloadFile
) -> None:
    """Only the norms and the layers before and after it are trained."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    if name == "llama":
        config = transformers.LlamaConfig(
            vocab_size=64, hidden_size=64, intermediate_size=256, num_hidden_layers=2,
            num_attention_heads=4, num_key_value_heads=2, use_cache=False,
        )  # fmt: skip
        parts = ("gate_proj.weight", "up_proj.weight", "down_proj.weight", "q_proj.weight")
        made = transformers.AutoModelForCausalLM
    elif name == "gpt2":
        # GPT-2's weights are transposed: the forward pass sums over slices, the backward pass
        # slices columns.
        config = transformers.GPT2Config(
            vocab_size=64, n_embd=64, n_layer=2, n_head=4, use_cache=False
        )
        parts = ("c_fc.weight", "mlp.c_proj.weight")
        made = transformers.AutoModelForCausalLM
    else:
        config = transformers.BertConfig(
            vocab_size=64, hidden_size=64, intermediate_size=256, num_hidden_layers=2,
            num_attention_heads=4,
        )  # fmt: skip
        parts = ("intermediate.dense.weight", "output.dense.weight")
        made = transformers.AutoModelForMaskedLM
    model = made.from_config(config)
    names = [n for n, p in model.named_parameters() if n.endswith(parts)]
    for key in names:
        model.get_parameter(key).requires_grad_(False)
    twin, ids = copy.deepcopy(model), torch.randint(64, (2, 16))

    def criterion(model: nn.Module, ids: Tensor) -> Tensor:
        out: Tensor = model(input_ids=ids, labels=ids).loss
        return out

    before, constants, reads = captured(model, criterion, ids)
    program = OffloadState().rewrite(before, sliced(*names, slices=2), Whole(before.graph))
    # One loop forward and one backward for each weight; in Llama, two weights share a forward loop.
    assert len(loops(program)) == (2 * len(names) - 2 if name == "llama" else 2 * len(names))
    ours = live(model, program, memory, batch=ids, constants=constants, reads=reads)
    theirs = LiveStep(twin, before, constants=constants, batch=ids, reads=reads)
    seen = []
    for step in (ours, theirs):
        torch.manual_seed(1)
        seen.append(float(step.backward(ids)))
    assert seen[0] == pytest.approx(seen[1], rel=1e-5)
    assert_same_gradients(model, twin)
    ours.zero_grad()
    metered = meter_once(lambda: ours.backward(ids))
    assert abs(predicted_above(program, costs_of(program.graph)) - metered.peak_bytes) <= 4


class Large(nn.Module):
    """One frozen weight of 16 MiB, and little else."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Linear(1024, 4096).requires_grad_(False)
        self.out = nn.Linear(4096, 1)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.out(torch.relu(self.wide(x)))
        return out


@pytest.mark.parametrize(
    ("latency", "slices"),
    [
        pytest.param(1.0, 4, id="where each message takes long, in few"),
        pytest.param(0.0, 16, id="where none does, in many: little waits for the first of them"),
    ],
)
def test_slices_are_chosen_by_their_prediction(latency: float, slices: int) -> None:
    trial = Trial(Large(), loss, torch.randn(64, 1024))
    link = Link(kind="declared", latency_seconds=latency, bytes_per_second=1e9, doubt=0.0)
    costs = replace(
        trial.costs(), links={OFFLOAD_IN: link, OFFLOAD_OUT: link}, offload_bytes=1 << 30
    )
    search = trial.searching(costs)
    found = search.find(sy.Budget(memory="15 MiB"))
    (rule,) = (r for r in found.rules if r.parameter == "wide.weight")
    assert rule.slices == slices
    # For a budget below that, the search takes the most slices that exist.
    tight = search.find(sy.Budget(memory="9 MiB"))
    (rule,) = (r for r in tight.rules if r.parameter == "wide.weight")
    assert rule.slices == 16


def test_a_sliced_loop_takes_the_sum_of_its_transfers_and_work() -> None:
    """The loop waits for the first slice, and computes with the last one alone."""
    trial = Trial(Large(), loss, torch.randn(64, 1024))
    before = trial.plain
    (rule,) = sliced("wide.weight", slices=4)
    program = OffloadState().rewrite(before, [replace(rule, lead=0)], Whole(before.graph))
    (loop,) = loops(program)
    plain = replace(trial.costs(), whole_step=Estimate.exactly(1.0))
    nodes = [program.graph.by_name[i.node] for i in program.instructions if i.sink is None]
    own = plain.seconds(loop).value
    others = sum(plain.seconds(node).value for node in nodes if not node.is_transfer) - own
    for copying, expected in ((4 * own, 4 * own + own / 4), (own / 4, own / 16 + own)):
        link = Link(
            kind="declared", latency_seconds=0.0, bytes_per_second=(16 << 20) / copying, doubt=0.0
        )
        costs = replace(plain, links={OFFLOAD_IN: link, OFFLOAD_OUT: link})
        assert step_seconds(program, costs).value == pytest.approx(others + expected)
        # The device itself issues the fetch of each slice.
        busy = replace(link, call_seconds=0.5)
        costs = replace(plain, links={OFFLOAD_IN: busy, OFFLOAD_OUT: busy})
        assert step_seconds(program, costs).value == pytest.approx(others + expected + 4 * 0.5)


@pytest.mark.parametrize("between", [gelu, gated, scaled], ids=lambda f: f.__name__)
def test_operators_after_the_same_product_give_the_same_bits(
    between: Callable[[Any, Tensor], Tensor],
) -> None:
    torch.manual_seed(0)
    before, _, _ = captured(Block(between), loss, torch.randn(24, WIDTH))
    read = sliced("up.weight", "gate.weight") if between is gated else sliced("up.weight")
    (loop, *_) = loops(OffloadState().rewrite(before, read, Whole(before.graph)))
    body = loop.body
    assert body is not None
    taken = [torch.randn(take.tensor.shape) for take in body.takes]
    values = dict(zip((given.name for given in body.gives), carried_out(body)(*taken), strict=True))
    values |= {take.name: x for take, x in zip(body.takes, taken, strict=True)}
    for node in body.calls[0][1]:
        if node.op not in ("aten.addmm.default", "aten.t.default"):
            whole = call(node, values)
            assert torch.equal(values.setdefault(node.name, whole), whole)
    assert len(body.counts()) > 1
