"""Plans for real models, run: the same numbers as PyTorch, and the bytes that were predicted."""

from __future__ import annotations

import pytest

from steelyard.predict.predict import PEAK_SHARE
from tests import zoo
from tests.harness import Trial, budgets, predicted_above

pytestmark = pytest.mark.slow


# Random masks, statistics of BatchNorm, two stacks of blocks, tied weights.
@pytest.mark.parametrize("name", ["gpt", "resnet_bn", "hf_t5", "hf_gpt2"])
def test_plans_compute_what_eager_pytorch_does_in_the_memory_promised(name: str) -> None:
    trial = Trial(*zoo.case(name).make())
    costs = trial.costs()
    searching = trial.searching(costs)
    eager = trial.eager()
    seconds = []
    for budget in budgets(searching, 4):
        found = searching.find(budget)
        assert found.prediction.quad.memory_bytes.value <= (budget.memory_bytes or 0)
        outcome = trial.run(found.program)
        assert outcome.difference(eager) is None
        predicted = predicted_above(found.program, costs)
        assert outcome.peak_bytes == pytest.approx(predicted, rel=PEAK_SHARE)
        assert found.gap is not None
        assert found.gap.least_seconds <= found.gap.step_seconds
        seconds.append(found.prediction.quad.step_seconds.value)
    assert seconds == sorted(seconds, reverse=True)
    assert seconds[0] > seconds[-1]


def test_a_batch_is_cut_where_recomputing_alone_does_not_fit() -> None:
    trial = Trial(*zoo.case("gpt").make())
    costs = trial.costs(micro_batches=(1, 2, 4))
    searching = trial.searching(costs)
    budget = budgets(searching, 2)[0]
    assert budget.memory_bytes is not None
    less = type(budget)(memory_bytes=round(0.9 * budget.memory_bytes))
    found = searching.find(less)
    assert found.micro_batches > 1
    outcome = trial.run(found.program)
    assert outcome.difference(trial.eager(micro_batches=found.micro_batches)) is None
    predicted = predicted_above(found.program, costs)
    assert outcome.peak_bytes == pytest.approx(predicted, rel=PEAK_SHARE)
