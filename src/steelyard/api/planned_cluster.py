"""A plan for a declared cluster, as returned to the user.

Not for finding it: see planner/declared_cluster.py. Not for plans that can run here: see
planned.py.
"""

from typing import Any

from steelyard.api.planned import Planned, budget_of
from steelyard.errors import BadInput
from steelyard.hardware.cluster import Cluster
from steelyard.planner.declared_cluster import DeclaredClusterPlanner
from steelyard.plans.budget import Budget, Minimize
from steelyard.plans.lifetimes import StepDetail
from steelyard.plans.plan import FrontierPoint, Plan
from steelyard.plans.trace_span import Span
from steelyard.predict.analytic.trace import analytic_spans
from steelyard.search import ClusterPlan
from steelyard.trades import check_trade


class PlannedForCluster(Planned):
    """A plan for a declared cluster: it can be printed and saved, but not applied."""

    def __init__(
        self,
        planner: DeclaredClusterPlanner,
        plan: Plan,
        chosen: ClusterPlan,
        minimize: Minimize | None,
    ) -> None:
        self._cluster_planner, self._chosen, self._minimize = planner, chosen, minimize
        self.plan = plan

    @property
    def frontier(self) -> tuple[FrontierPoint, ...]:
        return ()

    def with_frontier(self) -> "PlannedForCluster":
        return self

    def simulated(self) -> tuple[Span, ...]:
        """Return the timeline of one rank per stage; the other ranks of a stage have the same
        one.
        """
        search, chosen = self._cluster_planner.search, self._chosen
        return analytic_spans(search.stage_costs(chosen), search.stage_blocks(chosen))

    def detail(self) -> StepDetail:
        """Return the schedule alone; a declared cluster's blocks have no lines to count memory."""
        return StepDetail(spans=self.simulated())

    def _cluster(self) -> Cluster:
        return self._cluster_planner.request.cluster

    def _step_to_price(self) -> None:
        """The blocks of a deep model are captured, but not the whole step."""

    def why_not(self, trade: str) -> str:
        check_trade(trade)
        taken = [t.label for t in self.plan.taken if t.trade == trade]
        if taken:
            return f"{trade} was applied: {', '.join(taken[:5])}"
        reasons = [f"{r.label}: {r.reason}" for r in self.plan.refused if r.trade == trade]
        return "\n".join(reasons) or f"{trade} has no offer on this step"

    def what_if(self, **budget: Any) -> "PlannedForCluster":
        return plan_for_cluster(self._cluster_planner, budget_of(budget), self._minimize)

    def apply(
        self,
        model: Any = None,  # noqa: ARG002 - none can be trained so here
        *,
        sums_gradients: bool = False,  # noqa: ARG002
    ) -> Any:
        raise self._not_here("applied")

    def _not_here(self, done: str) -> BadInput:
        cluster = self._cluster_planner.request.cluster
        return BadInput(
            f"this plan is for {cluster.num_devices} devices of {cluster.tree.name} and cannot be "
            f"{done} here",
            expected="a plan for the ranks of this machine",
            remedy="plan with --ranks, or with cluster=Cluster.here(ranks=...)",
        )


def plan_for_cluster(
    planner: DeclaredClusterPlanner, budget: Budget, minimize: Minimize | None = None
) -> PlannedForCluster:
    """Return the fastest plan on the declared devices, or a plan on the fewest of them."""
    plan, chosen = planner.plan(budget, minimize)
    return PlannedForCluster(planner, plan, chosen, minimize)
