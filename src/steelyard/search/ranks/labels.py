"""What the ways in which a step may lie on ranks are called, and how it is said why not one.

Not for deciding that: see layout_search.py.
"""

from collections.abc import Iterable

from steelyard.ir.parallel_layout import ParallelLayout, spelled
from steelyard.ir.rule import Rule
from steelyard.plans.trade import Rejection
from steelyard.search.result import SearchResult
from steelyard.units import format_seconds


def tensors(rules: Iterable[Rule]) -> str:
    count = sum(rule.count for rule in rules)
    return f"{count} tensor{'s' if count > 1 else ''}"


def called(layout: ParallelLayout) -> str:
    if layout.shares:
        return f"among {layout.batch} ranks as {spelled(layout.shares)}"
    if layout.tensor == 1:
        return f"among {layout.batch} ranks"
    parts = f"parts on {layout.tensor} ranks"
    return parts if layout.batch == 1 else f"{parts}, the batch among {layout.batch} such groups"


def too_late(layout: ParallelLayout, seconds: float, found: SearchResult) -> Rejection:
    step = found.prediction.metrics.step_seconds.value
    plan, takes = format_seconds(step), format_seconds(seconds)
    # What is fastest may not fit the budget, and what fits may save too little.
    little = "saves less than a tenth of a step within the budget: " if seconds < step else ""
    return stages_refused(
        layout, f"{little}takes ~{takes} a step at least, the plan ~{plan} in all"
    )


def too_few(ranks: int, least_seconds: float, best_seconds: float) -> Rejection:
    """A number of ranks that could not be the fastest, so that the step was not captured for it."""
    least, best = format_seconds(least_seconds), format_seconds(best_seconds)
    reason = f"computes for ~{least} a step at least, on another number of ranks ~{best} in all"
    return Rejection(trade="shard_batch", label=f"among {ranks} ranks", reason=reason)


def stages_refused(layout: ParallelLayout, reason: str) -> Rejection:
    return Rejection(trade="shard_pipeline", label=layers(layout), reason=reason)


def layers(layout: ParallelLayout) -> str:
    return f"layers {on_ranks(layout)}"


def on_ranks(layout: ParallelLayout) -> str:
    """Of stages: in how many groups, too."""
    groups = f", in {layout.batch} groups that share the batch" if layout.batch > 1 else ""
    whose = f" times {layout.tensor} that share tensors" if layout.tensor > 1 else ""
    return f"on {layout.pipeline}{whose or ' ranks'}{groups}"


def slower(seconds: float, found: SearchResult, *, than: float | None = None) -> str:
    """Empty where it is not."""
    plan = found.prediction.metrics.step_seconds.value
    if seconds < (plan if than is None else than):
        return ""
    beside = f"the plan ~{format_seconds(plan)} in all"
    if than is not None:
        beside = f"without it ~{format_seconds(than)}"
    return f"takes ~{format_seconds(seconds)} a step before anything else, {beside}"
