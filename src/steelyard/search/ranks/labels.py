"""Labels of parallel layouts, and the reasons why a layout was not chosen.

Not for the choice itself: see layout_search.py.
"""

from collections.abc import Iterable

from steelyard.ir.parallel_layout import ParallelLayout, spelled
from steelyard.ir.rule_kinds import BatchSharding, ParameterRule, PipelineStageEnd
from steelyard.plans.trade import Rejection
from steelyard.search.rejection import rejected, takes
from steelyard.search.result import SearchResult
from steelyard.units import format_seconds


def tensor_count(rules: Iterable[ParameterRule]) -> str:
    count = sum(rule.count for rule in rules)
    return f"{count} tensor{'s' if count > 1 else ''}"


def layout_label(layout: ParallelLayout) -> str:
    if layout.shares:
        return f"among {layout.data} ranks as {spelled(layout.shares)}"
    if layout.tensor == 1:
        return f"among {layout.data} ranks"
    parts = f"sharded over {layout.tensor} ranks"
    return parts if layout.data == 1 else f"{parts}, the batch among {layout.data} such groups"


def pipeline_too_slow(layout: ParallelLayout, seconds: float, found: SearchResult) -> Rejection:
    step = found.prediction.metrics.step_seconds.value
    # The fastest pipeline may not fit the budget, and a pipeline that fits may save too little.
    prefix = (
        "saves less than a tenth of the step time within the budget: " if seconds < step else ""
    )
    reason = prefix + takes(seconds, step, bound="at least")
    return rejected(PipelineStageEnd, layers_label(layout), reason)


def rank_count_too_slow(ranks: int, least_seconds: float, best_seconds: float) -> Rejection:
    """Return the rejection of a number of ranks whose lower bound exceeds the best known step.

    The step was not captured for this number of ranks.
    """
    least, best = format_seconds(least_seconds), format_seconds(best_seconds)
    reason = f"computes for at least ~{least} a step; another number of ranks takes ~{best} in all"
    return rejected(BatchSharding, f"among {ranks} ranks", reason)


def layers_label(layout: ParallelLayout) -> str:
    return f"layers {ranks_label(layout)}"


def ranks_label(layout: ParallelLayout) -> str:
    """Return the ranks of the pipeline stages as text, with tensor- and data-parallel degrees."""
    groups = f", in {layout.data} groups that share the batch" if layout.data > 1 else ""
    tensor_ranks = f" times {layout.tensor} that share tensors" if layout.tensor > 1 else ""
    return f"on {layout.pipeline}{tensor_ranks or ' ranks'}{groups}"
