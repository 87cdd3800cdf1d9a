"""The search for a plan: which trades to apply within a budget, and the reasons against others.

It returns the plan, the Pareto front that contains it, and a reason for each rejection. It needs no
torch; the caller provides the trades. Not for capturing, measuring or running.
"""

from steelyard.search.cluster.explain import explain_plan
from steelyard.search.cluster.policy_mixture import ALIKE
from steelyard.search.cluster.recompute_sets import recompute_sets
from steelyard.search.cluster.search import ClusterPlan, ClusterSearch
from steelyard.search.cluster.stage_assignment import RecomputeSet
from steelyard.search.cluster.to_rules import to_rules
from steelyard.search.memory_floor import Floor
from steelyard.search.ranks.layout_search import LayoutSearch
from steelyard.search.ranks.pipeline_search import PipelineSearch
from steelyard.search.result import Gap, SearchResult
from steelyard.search.single.search import ALLOWS_NONE, StepSearch

__all__ = [
    "ALIKE",
    "ALLOWS_NONE",
    "ClusterPlan",
    "ClusterSearch",
    "Floor",
    "Gap",
    "LayoutSearch",
    "PipelineSearch",
    "RecomputeSet",
    "SearchResult",
    "StepSearch",
    "explain_plan",
    "recompute_sets",
    "to_rules",
]
