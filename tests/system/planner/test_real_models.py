"""Plans for real models, run: the results of PyTorch, and the predicted bytes."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest

from steelyard.ir.analysis.sliced_body import body_workspace_bytes
from steelyard.ir.metrics import Estimate
from steelyard.plans.budget import Budget, Effort
from steelyard.predict import step_seconds
from steelyard.predict.cost_table import CostTable, OperatorCost
from steelyard.predict.step import PEAK_SHARE
from steelyard.search import SearchResult, StepSearch
from steelyard.trades.accumulate import Accumulate, AccumulateRule
from steelyard.trades.chunk import Chunk
from tests.harness import DEVICE, Trial, budgets, predicted_above, trial_of
from tests.zoo.case import next_token_loss, tokens
from tests.zoo.own import GPT
from tests.zoo.workers import on_its_worker

pytestmark = pytest.mark.slow


# The models have random masks, BatchNorm statistics, two stacks of blocks, and tied weights.
@pytest.mark.parametrize(
    "name", [on_its_worker(name) for name in ("gpt", "resnet_bn", "hf_t5", "hf_gpt2")]
)
def test_plans_compute_the_eager_results_within_the_predicted_memory(name: str) -> None:
    trial = trial_of(name)
    costs = trial.costs()
    searching = trial.searching(costs)
    eager = trial.eager()
    seconds = []
    for budget in budgets(searching, 4):
        found = searching.find(budget)
        assert found.prediction.metrics.memory_bytes.value <= (budget.memory_bytes or 0)
        outcome = trial.run(found.program)
        assert outcome.difference(eager) is None
        predicted = predicted_above(found.program, costs)
        assert outcome.peak_bytes == pytest.approx(predicted, rel=PEAK_SHARE)
        assert found.gap is not None
        assert found.gap.least_seconds <= found.gap.step_seconds
        seconds.append(found.prediction.metrics.step_seconds.value)
    assert seconds == sorted(seconds, reverse=True)
    assert seconds[0] > seconds[-1]


# In the first model it is worth keeping only the large result of one operator; otherwise a
# recomputed copy reads it.
@pytest.mark.parametrize("name", [on_its_worker(name) for name in ("convnet_bn", "resnet_bn")])
def test_no_value_is_recomputed_that_could_be_kept(name: str) -> None:
    trial = trial_of(name)
    explored = trial.searching(trial.costs()).explored()
    for point in explored.chain:
        for choice in point.choices:
            less = explored.estimator.estimate(point.choices - {choice})
            assert less.peak_bytes > point.peak_bytes or less.seconds >= point.seconds


@pytest.mark.xdist_group("gpt")
def test_a_batch_is_cut_where_recomputing_alone_does_not_fit() -> None:
    trial = trial_of("gpt")
    costs = trial.costs(micro_batches=(1, 2, 4))
    searching = trial.searching(costs)
    budget = budgets(searching, 2)[0]
    assert budget.memory_bytes is not None
    less = type(budget)(memory_bytes=round(0.95 * budget.memory_bytes))
    found = searching.find(less)
    assert found.micro_batches > 1
    outcome = trial.run(found.program)
    assert outcome.difference(trial.eager(micro_batches=found.micro_batches)) is None
    predicted = predicted_above(found.program, costs)
    assert outcome.peak_bytes == pytest.approx(predicted, rel=PEAK_SHARE)


@pytest.mark.xdist_group("gpt")
def test_micro_batches_hold_no_more_than_predicted() -> None:
    trial = trial_of("gpt")
    program = trial.apply_rules([AccumulateRule(micro_batches=4)])
    costs = trial.costs(micro_batches=(1, 4))
    assert trial.run(program).peak_bytes <= predicted_above(program, costs)


def wordy() -> Trial:
    """Return a step with a vocabulary that is worth slicing, and a batch that can be split."""
    model = GPT(layers=2, width=16, heads=2, vocabulary=1536, length=64)
    return Trial(model, next_token_loss, tokens(8, 64, 1536))


def from_least_to_more_than_plain(searching: StepSearch) -> dict[int, SearchResult]:
    """Return budgets from the least memory to more than that of the plain step."""
    low = searching.least_bytes(enough_bytes=0)
    high = round(1.05 * searching.explored().plain.peak_bytes)
    limits = (low + (high - low) * step // 11 for step in range(12))
    return {limit: searching.find(Budget(memory_bytes=limit)) for limit in limits}


def seconds_of(found: SearchResult) -> float:
    return found.prediction.metrics.step_seconds.value


def in_no_time(trial: Trial) -> dict[str, OperatorCost]:
    """Return costs with which slices of the whole batch are faster than the unsliced
    computation."""
    stream = Chunk()
    offers, _ = stream.offers(trial.plain, trial.source)
    graphs = [stream.rewrite(trial.plain, o.rules, trial.source).graph for o in offers]
    return {
        node.signature: OperatorCost(
            seconds=Estimate.exactly(1e-9), workspace_bytes=body_workspace_bytes(node.body)
        )
        for graph in graphs
        for node in graph.nodes
        if node.body is not None
    }


def test_faster_slices_are_taken_without_a_memory_budget() -> None:
    trial = wordy()
    costs = CostTable(device=DEVICE, operators=in_no_time(trial))
    searching = trial.searching(costs, trades=(Chunk(),))
    found = [*from_least_to_more_than_plain(searching).values()]
    assert "chunk" in {r.trade for r in found[-1].rules}
    assert all(seconds_of(tight) >= seconds_of(loose) for tight, loose in pairwise(found))


def test_micro_batches_are_tried_without_the_slices_of_the_whole_batch() -> None:
    trial = wordy()
    halved = {2: Estimate.exactly(0.1)}
    costs = CostTable(device=DEVICE, operators=in_no_time(trial), cut_steps=halved)
    # With less effort, no split is tried if a plan is hardly slower than the step without trades.
    searching = trial.searching(costs, trades=(Accumulate(), Chunk()), effort=Effort.FULL)
    found = from_least_to_more_than_plain(searching)
    fastest = min(found.values(), key=seconds_of)
    assert [r.trade for r in fastest.rules] == ["accumulate"]
    peak = fastest.prediction.metrics.memory_bytes.value
    for limit, planned in found.items():
        assert peak > limit or seconds_of(planned) == seconds_of(fastest), "it would have fitted"


def test_the_measured_slowdown_of_micro_batches_applies_to_sliced_steps_too() -> None:
    trial = wordy()
    offers, _ = Chunk().offers(trial.plain, trial.source)
    cut = trial.apply_rules([AccumulateRule(micro_batches=2), *offers[-1].rules])
    assert cut.repeats == 2
    assert any(node.body for node in cut.graph.nodes)
    costs = CostTable(device=DEVICE)
    slower = replace(costs, cut_steps={2: Estimate.exactly(1.5)})
    assert step_seconds(cut, slower).value == pytest.approx(1.5 * step_seconds(cut, costs).value)
    assert step_seconds(trial.plain, slower) == step_seconds(trial.plain, costs)
