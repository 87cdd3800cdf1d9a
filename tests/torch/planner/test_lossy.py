"""A plan that may lose accuracy is at least as fast as the exact one."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, cast

from hypothesis import given, settings
from hypothesis import strategies as st

from steelyard.planner.lossy import LossyPlanner
from tests.support.graphs import in_floats, random_step
from tests.unit.search.test_lossy import budgets, searching

if TYPE_CHECKING:
    from steelyard.planner.session import PlanningSession


@settings(deadline=None, max_examples=6)
@given(st.integers(0, 10**6))
def test_allowing_loss_makes_no_plan_slower(seed: int) -> None:
    """The search with loss alone may be slower: with 8-bit values, values that are compared or
    sorted are not recomputed. So both searches run."""
    graph = in_floats(random_step(seed, num_values=10))
    search, exact = searching(graph), searching(graph, lossy=False)
    session = SimpleNamespace(search=exact)
    for budget in budgets(exact, 3):
        ours = LossyPlanner(session=cast("PlanningSession", session))._find_best(search, budget)
        seconds = ours.prediction.metrics.step_seconds.value
        assert seconds <= exact.find(budget).prediction.metrics.step_seconds.value
        assert ours.prediction.peak.nbytes <= budget.memory_bytes
        if ours.gap is not None:
            assert ours.gap.least_seconds <= seconds * (1 + 1e-9)
