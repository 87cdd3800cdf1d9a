"""Each effort of a search keeps the budget, and more effort gives no slower plan."""

from __future__ import annotations

import pytest

from steelyard.errors import Infeasible
from steelyard.plans.budget import Budget, Effort
from steelyard.search import StepSearch
from steelyard.search.single.explore import ENOUGH
from steelyard.trades.recompute import Recompute
from tests.support.declared import costs
from tests.unit.graphs.stored import stored_step

SHARES = (0.0, 0.1, 0.4, 0.8)


def _search(name: str, effort: Effort) -> StepSearch:
    source = stored_step(name)
    return StepSearch(
        source.plain, trades=(Recompute(),), source=source, costs=costs(), effort=effort
    )


@pytest.mark.parametrize("name", ["zoo-hf_bert", "zoo-mlp", "zoo-hf_vit"])
def test_more_effort_is_hardly_slower_and_never_beyond_the_budget(name: str) -> None:
    explored = _search(name, Effort.FULL).explored()
    least, most = explored.least.peak_bytes, explored.plain.peak_bytes
    for share in SHARES:
        budget = Budget(memory_bytes=int(least + share * (most - least)))
        seconds = {}
        for effort in Effort:
            found = _search(name, effort).find(budget)
            assert found.prediction.peak.nbytes <= budget.memory_bytes
            seconds[effort] = found.prediction.metrics.step_seconds.value
        assert seconds[Effort.NORMAL] <= seconds[Effort.QUICK] * (1 + 1e-9)
        assert seconds[Effort.NORMAL] <= seconds[Effort.FULL] * (1 + ENOUGH)


@pytest.mark.parametrize("effort", [*Effort])
def test_a_budget_below_the_least_memory_is_refused_with_that_least(effort: Effort) -> None:
    least = _search("zoo-hf_vit", Effort.FULL).explored().least.peak_bytes
    with pytest.raises(Infeasible) as refusal:
        _search("zoo-hf_vit", effort).find(Budget(memory_bytes=least - 1))
    assert refusal.value.least_bytes is not None
    assert refusal.value.least_bytes <= least * 1.001


def test_one_search_finds_more_with_each_budget_and_loses_nothing() -> None:
    search = _search("zoo-hf_bert", Effort.NORMAL)
    swept = _search("zoo-hf_bert", Effort.QUICK).explored()
    least, most = swept.least.peak_bytes, swept.plain.peak_bytes
    limits = [int(least + share * (most - least)) for share in (0.8, 0.3, 0.5, 0.3, 0.9)]
    seconds = [
        search.find(Budget(memory_bytes=limit)).prediction.metrics.step_seconds.value
        for limit in limits
    ]
    assert seconds[3] <= seconds[1]
    assert seconds[4] <= min(seconds[:4])
