"""Values of the forward pass that are fetched in slices for the products that read them: the
same sums, the predicted bytes, and never the whole value."""

from __future__ import annotations

import copy
import errno
import os
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import steelyard as sy
from steelyard.errors import Infeasible, Mismatch, PlanFileError, RunFailed
from steelyard.ir.program import Program
from steelyard.ir.saved_activations import saved_for_backward
from steelyard.passes.offload.sliced_activation_matmuls import sliceable_inputs
from steelyard.trades import offload
from steelyard.trades.chunk import Chunk
from steelyard.trades.offload import OffloadRule, with_transfers
from steelyard.trades.quantize_activations import quantizable, with_codes
from steelyard.trades.recompute import recomputable, with_copies
from tests.harness import Outcome, Trial, costs_of, floor_bytes, in_a_hurry, predicted_above

pytestmark = pytest.mark.xdist_group("far")
# The optimizer updates all parameters at once, so none can be offloaded, and only values are left.
SGD = partial(torch.optim.SGD, lr=1e-2, foreach=True)


class Turned(nn.Module):
    """A layer like transformers' Conv1D, whose weight and gradient are transposed."""

    def __init__(self, given: int, made: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(given, made) / given**0.5)
        self.bias = nn.Parameter(torch.randn(made))

    def forward(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, x.shape[-1])
        return torch.addmm(self.bias, flat, self.weight).view(*x.shape[:-1], -1)


class Block(nn.Module):
    """A perceptron whose input is read by two layers, and whose inner value by one."""

    def __init__(self, layer: Callable[[int, int], nn.Module], width: int = 64) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = layer(width, 4 * width), layer(4 * width, width)
        self.side = layer(width, width)

    def forward(self, x: Tensor) -> Tensor:
        near = self.norm(x)
        out: Tensor = x + self.down(F.dropout(F.gelu(self.up(near)), 0.2)) + self.side(near)
        return out


def square(model: nn.Module, x: Tensor) -> Tensor:
    out: Tensor = model(x)
    return out.float().square().mean()


def bare(given: int, made: int) -> nn.Module:
    return nn.Linear(given, made, bias=False)


def tower(layer: Callable[[int, int], nn.Module], *shape: int, height: int = 1) -> Trial:
    torch.manual_seed(0)
    blocks = nn.Sequential(*(Block(layer) for _ in range(height)))
    return Trial(blocks, square, torch.randn(*shape, 64))


def able(program: Program) -> list[str]:
    made_again = {line.node for line in program.recomputed}
    values = saved_for_backward(program, least_bytes=1) - made_again
    return sorted(sliceable_inputs(program, values))


def assert_close(ours: Outcome, theirs: Outcome, *, within: float = 1e-5) -> None:
    assert float(ours.loss) == pytest.approx(float(theirs.loss), rel=within)
    for name, gradient in theirs.gradients.items():
        mine = ours.gradients[name]
        assert (mine is None) == (gradient is None), name
        if mine is not None and gradient is not None:
            assert (mine - gradient).abs().max() <= within * gradient.abs().max() + 1e-9, name


LAYERS = {"linear": nn.Linear, "no bias": bare, "turned": Turned}


@pytest.mark.parametrize(
    ("name", "shape"), [("linear", (600,)), ("no bias", (3, 200)), ("turned", (3, 200))]
)
def test_sliced_products_are_accumulated(name: str, shape: tuple[int, ...]) -> None:
    tried = tower(LAYERS[name], *shape)
    chosen = able(tried.plain)
    # Two layers read the first value, the output of the norm; the other is the result of dropout.
    assert len(chosen) == 2
    program = with_transfers(tried.plain, dict.fromkeys(chosen, (1, 1)), dict.fromkeys(chosen, 5))
    products = [n for n in program.graph.nodes if n.is_fetch_matmul]
    assert len(products) == 3
    outcome = tried.run(program)
    assert_close(outcome, tried.run(tried.plain))
    assert tried.run(program).difference(outcome) is None
    assert outcome.peak_bytes == predicted_above(program, costs_of(program.graph))
    names = {line.node for line in program.instructions}
    assert not any(f"{value}.fetched" in names for value in chosen)


# The cases cover fewer rows than a slice, one more or one less than two slices, and a last slice of
# one row.
@pytest.mark.parametrize(
    ("rows", "count"), [(1, 4), (63, 2), (64, 9), (129, 2), (257, 4), (577, 3)]
)
def test_slices_need_not_divide_the_rows(rows: int, count: int) -> None:
    tried = tower(nn.Linear, rows)
    chosen = able(tried.plain)
    times = dict.fromkeys(chosen, (0, count % 3))
    program = with_transfers(tried.plain, times, dict.fromkeys(chosen, count))
    outcome = tried.run(program)
    assert_close(outcome, tried.run(tried.plain))
    assert outcome.peak_bytes == predicted_above(program, costs_of(program.graph))
    # The slices never hold more than the whole value, even if there is only one.
    begun = [n for n in program.graph.nodes if n.is_slicing]
    assert len(begun) == 3
    for node in begun:
        assert node.collective is not None
        assert node.outputs[0].shape[1] * node.collective.hops >= rows
        assert node.outputs[0].nbytes <= node.collective.sent_bytes or node.collective.hops > 1


def test_half_precision_is_added_up_in_single() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Block(nn.Linear)).bfloat16()
    tried = Trial(model, square, torch.randn(1024, 64, dtype=torch.bfloat16))
    chosen = able(tried.plain)
    program = with_transfers(tried.plain, dict.fromkeys(chosen, (0, 1)), dict.fromkeys(chosen, 16))
    outcome, plain = tried.run(program), tried.run(tried.plain)
    assert_close(outcome, plain, within=1e-2)


@pytest.mark.parametrize("seed", range(2))
def test_sliced_activations_combine_with_all_other_trades(seed: int) -> None:
    """A GPT-2 in micro-batches, with some values offloaded, some recomputed, and some in 8 bits."""
    transformers = pytest.importorskip("transformers")
    rng = random.Random(seed)
    torch.manual_seed(seed)
    config = transformers.GPT2Config(
        n_layer=1, n_embd=64, n_head=2, vocab_size=1000, n_positions=96, bos_token_id=0,
        eos_token_id=0, use_cache=False,
    )  # fmt: skip
    model = transformers.GPT2LMHeadModel(config)
    tried = Trial(model, lambda m, x: m(input_ids=x, labels=x).loss, torch.randint(1000, (4, 96)))
    parts = 1 + seed % 2
    program = Program.plain(tried.source.graph(micro_batches=parts)).repeated(parts)
    offers, _ = Chunk().offers(program, tried.source)
    if seed and offers:
        program = Chunk().rewrite(program, offers[0].rules, tried.source)
    copied = [v for v in sorted(recomputable(program.graph)) if rng.random() < 0.2]
    program = with_copies(program, copied)
    coded = [v for v in sorted(quantizable(program)) if rng.random() < 0.1]
    program = with_codes(program, [v for v in coded if v not in copied])
    chosen = able(program)
    assert len(chosen) > 2
    values = sorted(saved_for_backward(program) - set(copied))
    times = {v: (rng.randrange(4), rng.randrange(4)) for v in values if rng.random() < 0.8}
    slices = {v: rng.choice((2, 3, 7)) for v in chosen if v in times}
    ours, theirs = with_transfers(program, times, slices), with_transfers(program, times)
    outcome = tried.run(ours)
    assert_close(outcome, tried.run(theirs))
    assert abs(outcome.peak_bytes - predicted_above(ours, costs_of(ours.graph))) <= 4


class Pooled(nn.Module):
    """A frozen table of words, a narrow layer that reads many words together, and a head.

    The head's gradients exist before that layer's, so the value that is fetched for it sets the
    peak.
    """

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding.from_pretrained(torch.randn(100, 64))
        self.mix = nn.Linear(1024, 128)
        self.head = nn.Sequential(nn.Linear(128, 2048), nn.ReLU(), nn.Linear(2048, 512))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(torch.tanh(self.mix(self.words(x).flatten(-2))).mean(1))
        return out


def pooled() -> tuple[nn.Module, Tensor]:
    """Return a step with one sample, so that the batch cannot be split."""
    torch.manual_seed(0)
    return Pooled(), torch.randint(100, (1, 2048, 16))


@pytest.fixture(scope="module", autouse=True)
def _in_a_hurry(costs: Path) -> Iterator[None]:
    with in_a_hurry(costs):
        yield


@pytest.fixture(scope="module")
def offload_memory(tmp_path_factory: pytest.TempPathFactory) -> sy.OffloadMemory:
    return sy.OffloadMemory(tmp_path_factory.mktemp("far"), rate="2 GB/s", size="1 GiB")


def least(offload_memory: sy.OffloadMemory) -> tuple[sy.Planned, int]:
    model, x = pooled()
    planned = sy.plan(
        model, square, x, optimizer=SGD, cluster=sy.Cluster.here(offload_memory=offload_memory)
    )
    with pytest.raises(Infeasible) as refusal:
        planned.what_if(memory=floor_bytes(planned))
    assert refusal.value.least_bytes is not None
    return planned, refusal.value.least_bytes


@pytest.fixture(scope="module")
def fitting(offload_memory: sy.OffloadMemory) -> sy.Planned:
    """Return the plan with the least memory, which needs slices."""
    planned, nbytes = least(offload_memory)
    return planned.what_if(memory=nbytes)


def sliced_rule(planned: sy.Planned) -> Any:
    (rule,) = (r for r in planned.plan.decisions.rules if r.trade == "offload" and r.slices)
    return rule


def test_slicing_lowers_the_memory_floor_set_by_fetched_values(
    fitting: sy.Planned, offload_memory: sy.OffloadMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(offload, "_LEAST_SLICED_BYTES", 1 << 40)
    _, whole = least(offload_memory)
    assert fitting.predicted.memory_bytes.value <= whole - (1 << 18)
    assert sliced_rule(fitting).slices == 4
    told = [t.label for t in fitting.plan.taken if t.trade == "offload"]
    assert any(label.startswith("words (1), in 4 slices") for label in told), told
    assert "in 4 slices" in str(fitting)


def test_training_is_unchanged_and_memory_is_as_predicted(
    fitting: sy.Planned, offload_memory: sy.OffloadMemory
) -> None:
    ours, x = pooled()
    theirs = copy.deepcopy(ours)
    step, plain = fitting.apply(ours), fitting.what_if().apply(theirs)
    for _ in range(3):
        assert float(step(x)) == pytest.approx(float(plain(x)), rel=1e-6)
    for (name, a), b in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        assert torch.allclose(a, b, rtol=1e-5, atol=1e-7), name
    measured = step.receipt().measured.memory_bytes
    assert measured is not None
    # The loss of the previous step, whose tangent torch keeps.
    assert abs(fitting.predicted.memory_bytes.value - measured) <= 4
    assert step.offload_file is not None
    before = step.offload_file.moved_bytes
    step(x)
    plain(x)
    assert fitting.predicted.communication_bytes.value == step.offload_file.moved_bytes - before
    # The batch has another length, with fewer rows and slices.
    assert float(step(x[:, :130])) == pytest.approx(float(plain(x[:, :130])), rel=1e-6)
    assert not any(Path(offload_memory.folder).iterdir())


def test_a_failing_disk_is_named_and_the_next_step_starts_clean(
    fitting: sy.Planned, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, x = pooled()
    step, weight = fitting.apply(model), model.get_parameter("mix.weight")
    step.backward(x)
    first, weight.grad = weight.grad, None

    def fail(*_: Any) -> int:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(os, "preadv", fail)
        with pytest.raises(RunFailed, match="failed: Input/output error"):
            step.backward(x)
    weight.grad = None
    step.backward(x)
    assert first is not None
    assert weight.grad is not None
    assert torch.equal(weight.grad, first)


def test_the_plan_file_holds_the_number_of_slices(fitting: sy.Planned, tmp_path: Path) -> None:
    path = tmp_path / "a.plan.toml"
    fitting.save(path)
    text = path.read_text()
    assert text.count("slices = 4") == 1
    model, x = pooled()
    again = sy.load(path, model, square, x, optimizer=SGD)
    assert again.plan.decisions.rules == fitting.plan.decisions.rules
    path.write_text(text.replace("slices = 4", "slices = 0"))
    whole = sy.load(path, model, square, x, optimizer=SGD)
    assert whole.predicted.memory_bytes.value > fitting.predicted.memory_bytes.value
    path.write_text(text.replace("slices = 4", "slices = -4"))
    with pytest.raises(PlanFileError, match="slices"):
        sy.load(path, model, square, x, optimizer=SGD)


def test_slicing_values_that_are_read_whole_is_refused() -> None:
    """A tanh reads its own result in the backward pass."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64))
    tried = Trial(model, square, torch.randn(512, 64))
    assert "tanh" not in able(tried.plain)
    rules = offload.to_rules(tried.plain.graph, ["tanh"], OffloadRule, slices=4)
    with pytest.raises(Mismatch, match=r"aten\.tanh\.default in 1 asks for 4 slices") as refusal:
        tried.apply_rules(rules)
    assert "set slices of that rule to 0" in str(refusal.value)
    assert tried.apply_rules([replace(rule, slices=0) for rule in rules]).problems() == []


class Otherwise(nn.Module):
    """A model whose product reads a value that is not row-major although a view of it is, or
    whose product sums over columns."""

    def __init__(self, *, across: bool) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(64, 64), nn.Linear(64, 64)
        self.other = nn.Parameter(torch.randn(48, 32))
        self._across = across

    def forward(self, x: Tensor) -> Tensor:
        if self._across:
            return (self.inner(x) * 3).flatten(0, 1).t() @ self.other
        out: Tensor = self.outer((self.inner(x).transpose(1, 2) * 3).transpose(1, 2))
        return out


@pytest.mark.parametrize("across", [False, True])
def test_slicing_is_not_offered_unless_the_product_sums_over_contiguous_rows(across: bool) -> None:
    torch.manual_seed(0)
    tried = Trial(Otherwise(across=across), square, torch.randn(4, 12, 64))
    assert "mul" in saved_for_backward(tried.plain)
    assert "mul" not in able(tried.plain)
    assert tried.plain.graph.by_name["mul"].outputs[0].is_contiguous == across
