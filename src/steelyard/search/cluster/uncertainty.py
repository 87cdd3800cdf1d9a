"""The uncertainty of times predicted for a declared cluster, and the layouts that it cannot rank.

Not for choosing a layout: see search.py. Not for calibrations: see hardware/calibration.py.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from steelyard.hardware.calibration import (
    DECLARED_DOUBT,
    Calibration,
    CalibrationCase,
    Parallelism,
    Score,
    percent,
)
from steelyard.ir.parallel_layout import ParallelLayout
from steelyard.search.cluster.search import ClusterPlan, ClusterSearch
from steelyard.units import format_seconds

# The largest number of layouts that are named, and of layouts that are searched to find these.
_MAX_NAMED, _MAX_SEARCHED = 3, 24


@dataclass(frozen=True, slots=True, kw_only=True)
class Rivals:
    """The layouts whose predicted times differ from the plan's by less than the prediction error.

    ``count`` is the number of layouts judged by their lower bound; ``named`` are some layouts
    judged by their plan. ``between`` is the relative error when two layouts are compared.
    ``is_measured`` is true if it comes from published steps.
    """

    count: int
    named: tuple[ClusterPlan, ...]
    between: float
    is_measured: bool


def error_sentences(search: ClusterSearch, layout: ParallelLayout) -> list[str]:
    """Return a sentence on the prediction error for each class of device."""
    case = search.case_of(layout)
    sentences = []
    for device, calibration in search.calibrations.items():
        of = f"step times on {device.kind}"
        if calibration is None:
            error = percent(search.doubt_of(layout))
            sentences.append(
                f"{of} may be off by {error}: no published step was compared with them"
            )
        else:
            sentences.append(f"{of} are {_of_calibration(calibration, case)}")
    return sentences


def rivals(search: ClusterSearch, best: ClusterPlan, limit_bytes: int) -> Rivals:
    """Return the layouts with other degrees that predictions cannot distinguish from the best
    one.
    """
    own_kind = Parallelism.of(tensor=best.layout.tensor, pipeline=best.layout.pipeline)
    known = [found for found in search.calibrations.values() if found is not None]

    def between(layout: ParallelLayout) -> float:
        errors = [
            found.between(own_kind, Parallelism.of(tensor=layout.tensor, pipeline=layout.pipeline))
            for found in known
        ]
        return max(errors, default=DECLARED_DOUBT)

    def is_within_error(layout: ParallelLayout, seconds: float) -> bool:
        return seconds <= best.step.step_seconds * (1 + between(layout))

    candidates = [
        candidate
        for candidate in search.candidates(best.layout.num_ranks)
        if degrees(candidate.layout) != degrees(best.layout)
        and is_within_error(candidate.layout, candidate.least_seconds)
    ]
    named: dict[tuple[int, ...], ClusterPlan] = {}
    for candidate in candidates[:_MAX_SEARCHED]:
        if len(named) == _MAX_NAMED:
            break
        if degrees(candidate.layout) not in named:
            plan = search.plan_layout(candidate, limit_bytes)
            if plan is not None and is_within_error(plan.layout, plan.step.step_seconds):
                named[degrees(candidate.layout)] = plan
    return Rivals(
        count=len({degrees(candidate.layout) for candidate in candidates}),
        named=tuple(sorted(named.values(), key=lambda plan: plan.step.step_seconds)),
        between=max(
            (between(candidate.layout) for candidate in candidates), default=between(best.layout)
        ),
        is_measured=bool(known),
    )


def rivals_note(found: Rivals) -> str:
    """Return the note on rivals, or '' if the plan's layout can be distinguished from all
    others.
    """
    if not found.named:
        return ""
    named = ", ".join(
        f"{describe_layout(plan.layout)} (~{format_seconds(plan.step.step_seconds)})"
        for plan in found.named
    )
    more = found.count - len(found.named)
    others = f" and up to {more} more" if more else ""
    error = percent(found.between)
    reason = f"declared rates may be off by {error}, and no published step was compared"
    if found.is_measured:
        reason = (
            "for nine of ten pairs of published steps the predicted ratio was accurate to within "
            f"{error}"
        )
    return f"not distinguishable from {named}{others}: {reason}"


def degrees(layout: ParallelLayout) -> tuple[int, ...]:
    return layout.data, layout.tensor, layout.pipeline, layout.state_stage


def describe_layout(layout: ParallelLayout) -> str:
    """Return a layout as text, such as ``data 8 x tensor 4, ZeRO-3``."""
    named_degrees = (
        ("data", layout.data),
        ("tensor", layout.tensor),
        ("pipeline", layout.pipeline),
    )
    sentences = " x ".join(f"{name} {degree}" for name, degree in named_degrees if degree > 1)
    zero = f", ZeRO-{layout.state_stage}" if layout.state_stage else ""
    return f"{sentences or 'one device'}{zero}"


def _of_calibration(calibration: Calibration, case: CalibrationCase) -> str:
    error = f"accurate to within {percent(calibration.doubt_of(case))}"
    reason = calibration.outside(case)
    range_note = (
        f"outside of the range that was fitted ({', '.join(reason)})"
        if reason
        else "inside the range that was fitted"
    )
    return "; ".join([f"{error}, {range_note}", *_errors(calibration, case)])


def _errors(calibration: Calibration, case: CalibrationCase) -> Iterator[str]:
    for score in calibration.scores:
        if score.kind and score.kind != case.kind.value:
            continue
        if score.inside:
            yield f"{_num_steps(score)} in the fitted range were {score.said}"
        elif score.kind:
            yield f"of these, {_num_steps(score)} {score.kind} were {score.said}"
        else:
            software = ", ".join(score.domain.software)
            yield f"{_num_steps(score)} outside of it ({software}) were {score.said}"


def _num_steps(score: Score) -> str:
    return f"{score.domain.rows} step{'s' if score.domain.rows > 1 else ''}"


def widest_error_note(search: ClusterSearch, layouts: Sequence[ParallelLayout]) -> str:
    """Return a sentence with the widest interval of several layouts."""
    error = max(search.doubt_of(layout) for layout in layouts)
    return (
        f"step times are accurate to within {percent(error)}; the plan for each number of devices "
        "gives the evidence"
    )
