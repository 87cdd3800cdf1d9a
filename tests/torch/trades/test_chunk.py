"""The region around a huge value, computed in slices: the same step in less memory."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import steelyard as sy
from steelyard.errors import Mismatch
from steelyard.ir.analysis.sliced_body import body_workspace_bytes
from steelyard.ir.graph import Graph
from steelyard.ir.program import Program
from steelyard.ir.rule import Rule
from steelyard.measure.operators import benchmark as operators
from steelyard.operators import nll_loss_weight
from steelyard.predict.cost_table import CostTable
from steelyard.trades.accumulate import Accumulate, AccumulateRule
from steelyard.trades.chunk import Chunk, ChunkRule
from steelyard.trades.recompute import Recompute
from tests.harness import DEVICE, Outcome, Trial, costs_of, predicted_above
from tests.zoo.hf import _RECIPES

WORDS, WIDTH = 1536, 16
CHUNK = Chunk()
# Kernels round their workspace up to this size.
_SMALL_CHANGE_BYTES = 64


class Scores(nn.Module):
    def __init__(self, *, bias: bool = True, words: int = WORDS) -> None:
        super().__init__()
        self.word = nn.Embedding(words, WIDTH)
        self.mix = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, words, bias=bias)

    def forward(self, ids: Tensor) -> Tensor:
        scores: Tensor = self.head(torch.tanh(self.mix(self.word(ids))))
        return scores


def ids(samples: int = 8, length: int = 48) -> Tensor:
    made = torch.randint(WORDS, (samples, length))
    made[0, : length // 3] = -100  # as padding would be
    return made


Loss = Callable[[nn.Module, Any], Tensor]


def scored(use: Callable[[Tensor, Tensor], Tensor]) -> Loss:
    """Return a model; ``use`` takes the scores of all rows and the targets."""
    return lambda model, batch: use(model(batch.clamp(min=0)).flatten(0, 1), batch.flatten())


def handwritten(scores: Tensor, targets: Tensor) -> Tensor:
    right = scores.gather(1, targets.clamp(min=0)[:, None]).squeeze(1)
    return ((scores.logsumexp(1) - right) * (targets >= 0)).sum() / (targets >= 0).sum()


def with_penalty(scores: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(scores, targets) + 1e-3 * scores.logsumexp(1).square().mean()


def per_class(scores: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(scores, targets, weight=torch.linspace(0.5, 2, WORDS))


def next_word(model: nn.Module, batch: Tensor) -> Tensor:
    scores = model(batch.clamp(min=0))[:, :-1]
    return F.cross_entropy(scores.reshape(-1, WORDS), batch[:, 1:].reshape(-1))


LOSSES: dict[str, Loss] = {
    "mean": scored(F.cross_entropy),
    "sum": scored(lambda s, t: F.cross_entropy(s, t, reduction="sum")),
    "scaled": scored(lambda s, t: F.cross_entropy(s / 3.0, t) * 0.5),
    "softcapped": scored(lambda s, t: F.cross_entropy(30 * torch.tanh(s / 30), t)),
    "smoothed": scored(lambda s, t: F.cross_entropy(s, t, label_smoothing=0.1)),
    "weighed": scored(per_class),
    "with a penalty": scored(with_penalty),
    "by hand": scored(handwritten),
    "in double precision": scored(lambda s, t: F.cross_entropy(s.double(), t).float()),
    "squared": scored(lambda s, t: (s - 1).square().sum() * 1e-4 + 0 * t.sum()),
    "shifted": next_word,
}


def hf(name: str) -> Trial:
    recipe = _RECIPES[name]
    config = {**recipe.tiny, "vocab_size": WORDS}
    model, loss, batch = replace(recipe, tiny=config).build("tiny")
    repeats = math.ceil(512 / batch["labels"].numel())
    return Trial(model, loss, {k: v.repeat(repeats, 1) for k, v in batch.items()})


def applied(trial: Trial, program: Program | None = None) -> list[Program]:
    plain = trial.plain if program is None else program
    found, refusals = CHUNK.offers(plain, trial.source)
    assert found, refusals
    return [CHUNK.rewrite(plain, offer.rules, trial.source) for offer in found]


def assert_same(expected: Outcome, actual: Outcome, *, within: float = 2e-6) -> None:
    """Check equality up to rounding, because slices are summed in another order: a few units in
    the last place of the largest element."""
    assert actual.loss.item() == pytest.approx(expected.loss.item(), rel=within, nan_ok=True)
    for name, gradient in expected.gradients.items():
        ours = actual.gradients[name]
        assert (ours is None) == (gradient is None)
        if ours is not None and gradient is not None:
            most = float(gradient.abs().max())
            torch.testing.assert_close(
                ours, gradient, rtol=0, atol=within * max(most, 1e-30), equal_nan=True
            )


def shares(trial: Trial) -> list[float]:
    """Return, for each number of slices, the ratio of its peak to the plain one; each step is
    the same, and predicted to the byte."""
    plain = trial.run(trial.plain)
    found = []
    for program in applied(trial):
        assert program.problems() == []
        ours = trial.run(program)
        assert_same(plain, ours)
        predicted = predicted_above(program, costs_of(program.graph))
        assert abs(predicted - ours.peak_bytes) <= _SMALL_CHANGE_BYTES
        found.append(ours.peak_bytes / plain.peak_bytes)
    return found


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_over_many_words_is_computed_in_slices(name: str) -> None:
    torch.manual_seed(0)
    assert max(shares(Trial(Scores(), LOSSES[name], ids()))) <= 0.6


@pytest.mark.parametrize("name", LOSSES)
def test_memory_of_a_slice_is_known_without_measuring(name: str) -> None:
    torch.manual_seed(0)
    trial = Trial(Scores(), LOSSES[name], ids())
    for program in applied(trial):
        (node,) = (n for n in program.graph.nodes if n.body is not None)
        assert node.body is not None
        measured = costs_of(program.graph).workspace_bytes(node)
        assert abs(measured - body_workspace_bytes(node.body)) <= _SMALL_CHANGE_BYTES
        assert CostTable(device=DEVICE).workspace_bytes(node) == body_workspace_bytes(node.body)


def test_long_loops_are_measured_on_some_of_their_slices(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torch.manual_seed(0)
    trial = Trial(Scores(), LOSSES["mean"], ids(16, 96))
    has_time = operators._Table._has_time_for

    def short_of_time(table: Any, subject: Any, group: Any) -> bool:
        body = subject.node.body
        return has_time(table, subject, group) and (body is None or body.rows < 16 * 96)

    tables: list[operators._Table] = []
    shortest: list[Graph] = []
    measure, shortened = operators._Table.measure, operators.shortened

    def seen(table: Any, subjects: Any) -> None:
        tables.append(table)
        measure(table, subjects)

    def shortened_seen(*given: Any, **more: Any) -> Graph:
        shortest.append(shortened(*given, **more))
        return shortest[-1]

    for program in applied(trial):
        (node,) = (n for n in program.graph.nodes if n.body is not None)
        assert node.body is not None
        whole, _ = operators.measure_operators([program.graph], DEVICE)
        with monkeypatch.context() as patched:
            patched.setattr(operators._Table, "_has_time_for", short_of_time)
            patched.setattr(operators._Table, "measure", seen)
            patched.setattr(operators, "shortened", shortened_seen)
            part, survey = operators.measure_operators([program.graph], DEVICE)
        assert not survey.unmeasured
        assert part.is_measured(node)
        assert part.workspace_bytes(node) == whole.workspace_bytes(node)
        # The workspace of one slice or two, times the number of slices that have rows.
        (few,) = (n for n in shortest[-1].nodes if n.body is not None)
        assert few.body is not None
        assert few.body.rows < node.body.rows
        (took,) = (t.costs[few.signature] for t in tables if few.signature in t.costs)
        times = node.body.rows / few.body.rows
        assert part.seconds(node).value == pytest.approx(times * took.seconds.value)


@pytest.mark.parametrize(
    "name", ["gpt2", "llama", "bert", pytest.param("t5", marks=pytest.mark.slow), "gemma2"]
)
def test_the_heads_of_transformers_are_found_in_the_graph(name: str) -> None:
    torch.manual_seed(0)
    assert max(shares(hf(name))) <= 0.7


def test_rows_need_not_be_a_multiple_of_the_slices() -> None:
    torch.manual_seed(0)
    trial = Trial(Scores(bias=False), LOSSES["mean"], ids(7, 53))
    plain = trial.run(trial.plain)
    rule = ChunkRule(module="head", op="aten.mm.default", slices=9)
    program = CHUNK.rewrite(trial.plain, (rule,), trial.source)
    assert_same(plain, trial.run(program))


def test_half_precision_is_added_up_in_single() -> None:
    torch.manual_seed(0)
    model = Scores().bfloat16()
    trial = Trial(model, LOSSES["mean"], ids(16, 64))
    plain = trial.run(trial.plain)
    for program in applied(trial):
        ours = trial.run(program)
        assert_same(plain, ours, within=2**-7)


def test_a_batch_without_counted_targets_equals_eager() -> None:
    torch.manual_seed(0)
    batch = torch.full((8, 48), -100)
    trial = Trial(Scores(), LOSSES["mean"], batch)
    for program in applied(trial):
        ours = trial.run(program)
        assert torch.isnan(ours.loss)
        assert_same(trial.run(trial.plain), ours)


@pytest.mark.parametrize("weight", [None, torch.linspace(0.5, 2, 8)])
def test_the_weight_of_a_mean_is_that_of_the_kernel(weight: Tensor | None) -> None:
    targets = torch.randint(8, (20,))
    targets[::3] = -100
    scores = torch.randn(20, 8)
    for reduction in (1, 2):
        _, said = torch.ops.aten.nll_loss_forward(scores, targets, weight, reduction, -100)
        ours = nll_loss_weight(None, targets, weight, reduction, -100, torch.float32)
        assert ours.item() == pytest.approx(said.item(), rel=1e-6)


def test_parts_of_the_batch_are_sliced_and_weighed_as_without() -> None:
    torch.manual_seed(0)
    trial = Trial(Scores(), LOSSES["mean"], ids(16, 48))
    split = Accumulate().rewrite(trial.plain, (AccumulateRule(micro_batches=2),), trial.source)
    expected = trial.eager()
    for program in applied(trial, split):
        assert_same(expected, trial.run(program), within=1e-5)


def test_operators_outside_the_slices_are_recomputed_as_before() -> None:
    torch.manual_seed(0)
    trial = Trial(Scores(), LOSSES["mean"], ids())
    program = applied(trial)[0]
    recompute = Recompute()
    offers, _ = recompute.offers(program, trial.source)
    everything = next(o for o in offers if o.label.startswith("everything"))
    both = recompute.rewrite(program, everything.rules, trial.source)
    assert both.recomputed
    assert_same(trial.run(trial.plain), trial.run(both))


# --- steps in which nothing can be sliced ---------------------------------------------------------


def compared(scores: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(scores, targets) + 1e-6 * scores.max() ** 2


def across(scores: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(scores - scores.mean(0, keepdim=True), targets)


def sorted_first(scores: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(scores, targets) + 1e-6 * scores.sort(0).values[0].sum()


def pseudo_labelled(scores: Tensor, targets: Tensor) -> Tensor:
    sure = F.softmax(scores.detach(), 1).amax(1)
    return F.cross_entropy(scores, torch.where(sure < 1e-3, -100, targets))


def without_a_gradient(scores: Tensor, targets: Tensor) -> Tensor:
    return scores.square().sum() * 1e-4 + 0.1 * F.cross_entropy(scores.detach(), targets)


def dropped(scores: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(F.dropout(scores, 0.1), targets)


def drawing_later(scores: Tensor, targets: Tensor) -> Tensor:
    weights = F.dropout(scores.detach().logsumexp(1), 0.3)
    return F.cross_entropy(scores, targets) + 0.01 * weights.mean()


def laid_out_otherwise(scores: Tensor, targets: Tensor) -> Tensor:
    images = scores.view(16, 24, 16, 96).contiguous(memory_format=torch.channels_last)
    return images.square().sum() * 1e-4


REFUSED = (
    *(compared, across, sorted_first, pseudo_labelled, without_a_gradient, dropped),
    *(drawing_later, laid_out_otherwise),
)


@pytest.mark.parametrize("use", REFUSED)
def test_losses_that_compare_rows_are_refused_with_the_reason(
    use: Callable[[Tensor, Tensor], Tensor],
) -> None:
    trial = Trial(Scores(), scored(use), ids())
    offers, refusals = CHUNK.offers(trial.plain, trial.source)
    assert not offers
    assert all(refusal.reason for refusal in refusals)


def test_small_values_are_not_sliced() -> None:
    trial = Trial(Scores(words=WORDS), LOSSES["mean"], ids(2, 8))
    offers, (refusal,) = CHUNK.offers(trial.plain, trial.source)
    assert not offers
    assert "large" in refusal.reason


@pytest.mark.parametrize(
    ("rule", "said"),
    [
        (ChunkRule(module="mix", op="aten.addmm.default", slices=4), "cannot be sliced"),
        (ChunkRule(module="nowhere", op="aten.mm.default", slices=4), "matches 0"),
    ],
)
def test_an_impossible_rule_is_refused(rule: Rule, said: str) -> None:
    trial = Trial(Scores(), LOSSES["mean"], ids())
    with pytest.raises(Mismatch, match=said):
        CHUNK.rewrite(trial.plain, (rule,), trial.source)


# --- plans through the public API -----------------------------------------------------------------


def test_a_plan_slices_the_head_saves_it_and_trains_within_the_budget(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from steelyard.planner import calibration

    monkeypatch.setenv("STEELYARD_CACHE", str(tmp_path / "costs.sqlite"))
    monkeypatch.setattr(calibration, "_CALIBRATION_SECONDS", 1.0)
    monkeypatch.setattr(calibration, "_SPLIT_CALIBRATION_SECONDS", 1.0)

    def optimizer(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=0.1)

    torch.manual_seed(0)
    batch = ids(1, 384)  # one sample: micro-batches could be faster otherwise
    model = Scores()
    unplanned = sy.plan(model, LOSSES["mean"], batch, optimizer=optimizer)
    half = unplanned.plan.unplanned.peak.nbytes // 2
    planned = unplanned.what_if(memory=half)
    assert {t.trade for t in planned.plan.taken} == {"chunk"}
    assert "head in " in str(planned)
    assert "chunk was applied" in planned.why_not("chunk")
    assert any(r.trade == "recompute" for r in planned.plan.refused)
    path = tmp_path / "words.plan.toml"
    planned.save(path)
    assert "[[chunk]]" in path.read_text()
    again = sy.load(path, model, LOSSES["mean"], batch, optimizer=optimizer)
    assert again.plan.decisions.rules == planned.plan.decisions.rules
    assert again.predicted.memory_bytes == planned.predicted.memory_bytes
    twin = Scores()
    twin.load_state_dict(model.state_dict())
    step = again.apply(model)
    plain = optimizer(twin.parameters())
    for _ in range(4):
        plain.zero_grad()
        expected = LOSSES["mean"](twin, batch)
        expected.backward()  # type: ignore[no-untyped-call]  # torch's
        plain.step()
        assert step(batch).item() == pytest.approx(expected.item(), rel=1e-5)
    # A batch of another shape has another number of rows, perhaps only one.
    assert torch.isfinite(step(ids(4, 48)))
    assert torch.isfinite(step(torch.randint(WORDS, (1, 1))))
    (rule,) = (r for r in planned.plan.decisions.rules if r.trade == "chunk")
    (node,) = (n for n in step.live.program.graph.nodes if n.body is not None)
    assert node.body is not None
    assert node.body.parts == rule.slices
    measured = step.receipt().measured.memory_bytes
    assert measured is not None
    assert measured <= half


def test_the_slices_that_run_are_those_that_were_planned(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The number of slices need not divide the batch, unlike the number of micro-batches."""
    monkeypatch.setenv("STEELYARD_CACHE", str(tmp_path / "costs.sqlite"))
    torch.manual_seed(0)
    model, batch = Scores(), torch.randint(WORDS, (1, 1024))
    budget = sy.Budget(memory="6 MiB")
    planned = sy.plan(model, LOSSES["mean"], batch, budget=budget)
    (rule,) = (r for r in planned.plan.decisions.rules if r.trade == "chunk")
    step = planned.apply(model)
    for _ in range(3):
        step(batch)
    (node,) = (n for n in step.live.program.graph.nodes if n.body is not None)
    assert node.body is not None
    assert node.body.parts == rule.slices
    measured = step.receipt().measured.memory_bytes
    assert measured == pytest.approx(planned.predicted.memory_bytes.value, rel=0.01)


def test_values_that_overlap_are_sliced_once() -> None:
    class Wide(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(16, 256), nn.Linear(256, 16)
            self.head = nn.Linear(16, WORDS)

        def forward(self, x: Tensor) -> Tensor:
            scores: Tensor = self.head(self.down(F.gelu(self.up(x))))
            return scores

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        scores = model(batch[0])
        right = scores.gather(1, batch[1][:, None]).squeeze(1)
        return (scores.logsumexp(1) - right).sum() / 2048

    torch.manual_seed(0)
    batch = torch.randn(2048, 16), torch.randint(WORDS, (2048,))
    trial = Trial(Wide(), loss, batch)
    offers, _ = CHUNK.offers(trial.plain, trial.source)
    rules = {rule.module: rule for offer in offers for rule in offer.rules}
    program = CHUNK.rewrite(trial.plain, tuple(rules.values()), trial.source)
    assert_same(trial.run(trial.plain), trial.run(program), within=1e-5)


def test_rows_may_be_as_many_as_words() -> None:
    torch.manual_seed(0)
    assert max(shares(Trial(Scores(), LOSSES["mean"], ids(16, 96)))) <= 0.6
