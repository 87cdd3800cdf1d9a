"""How sure the times of a plan for a declared cluster are, in words, and which layouts they do not
tell apart.

Not for choosing a layout: see search.py; nor for what calibrations mean: see
hardware/calibration.py.
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
from steelyard.ir.cluster_layout import ClusterLayout
from steelyard.search.cluster.search import ClusterPlan, ClusterSearch
from steelyard.units import format_seconds

# Layouts that are named, and how many are looked into to find them.
_MOST_NAMED, _MOST_LOOKED_INTO = 3, 24


@dataclass(frozen=True, slots=True, kw_only=True)
class Rivals:
    """Layouts whose predicted times differ from the plan's by no more than predictions do.

    ``count`` are all whose least time does; ``named`` some that were looked into. ``is_measured``:
    published steps say by how much predictions of two differ.
    """

    count: int
    named: tuple[ClusterPlan, ...]
    between: float
    is_measured: bool


def doubt_said(search: ClusterSearch, layout: ClusterLayout) -> list[str]:
    """Sentences on the error of predictions, for each class of device."""
    case = search.case_of(layout)
    said = []
    for device, calibration in search.calibrations.items():
        of = f"step times on {device.kind}"
        if calibration is None:
            doubt = percent(search.doubt_of(layout))
            said.append(f"{of} are give or take {doubt}: no published step was compared with them")
        else:
            said.append(f"{of} are {_of_calibration(calibration, case)}")
    return said


def rivals(search: ClusterSearch, best: ClusterPlan, limit_bytes: int) -> Rivals:
    """What other degrees of parallelism the predictions do not tell from the best."""
    mine = Parallelism.of(tensor=best.layout.tensor, pipeline=best.layout.pipeline)
    known = [found for found in search.calibrations.values() if found is not None]

    def between(layout: ClusterLayout) -> float:
        errors = [
            found.between(mine, Parallelism.of(tensor=layout.tensor, pipeline=layout.pipeline))
            for found in known
        ]
        return max(errors, default=DECLARED_DOUBT)

    def is_near(layout: ClusterLayout, seconds: float) -> bool:
        return seconds <= best.step.step_seconds * (1 + between(layout))

    near = [
        way
        for way in search.ways(best.layout.num_ranks)
        if degrees(way.layout) != degrees(best.layout) and is_near(way.layout, way.least_seconds)
    ]
    named: dict[tuple[int, ...], ClusterPlan] = {}
    for way in near[:_MOST_LOOKED_INTO]:
        if len(named) == _MOST_NAMED:
            break
        if degrees(way.layout) not in named:
            laid = search.laid(way, limit_bytes)
            if laid is not None and is_near(laid.layout, laid.step.step_seconds):
                named[degrees(way.layout)] = laid
    return Rivals(
        count=len({degrees(way.layout) for way in near}),
        named=tuple(sorted(named.values(), key=lambda laid: laid.step.step_seconds)),
        between=max((between(way.layout) for way in near), default=between(best.layout)),
        is_measured=bool(known),
    )


def rivals_said(found: Rivals) -> str:
    """Empty where the plan's layout is told apart from all others."""
    if not found.named:
        return ""
    named = ", ".join(
        f"{layout_said(laid.layout)} (~{format_seconds(laid.step.step_seconds)})"
        for laid in found.named
    )
    more = found.count - len(found.named)
    others = f" and up to {more} more" if more else ""
    off = percent(found.between)
    why = f"declared rates may be off by {off}, and no published step says more"
    if found.is_measured:
        why = f"of two published steps the ratio was predicted to within {off} in nine of ten pairs"
    return f"not told apart from {named}{others}: {why}"


def degrees(layout: ClusterLayout) -> tuple[int, ...]:
    return layout.data, layout.tensor, layout.pipeline, layout.state_stage


def layout_said(layout: ClusterLayout) -> str:
    """``data 8 x tensor 4, ZeRO-3``."""
    ways = (("data", layout.data), ("tensor", layout.tensor), ("pipeline", layout.pipeline))
    said = " x ".join(f"{name} {degree}" for name, degree in ways if degree > 1)
    zero = f", ZeRO-{layout.state_stage}" if layout.state_stage else ""
    return f"{said or 'one device'}{zero}"


def _of_calibration(calibration: Calibration, case: CalibrationCase) -> str:
    doubt = f"give or take {percent(calibration.doubt_of(case))}"
    why = calibration.outside(case)
    where = f"outside of what was fitted ({', '.join(why)})" if why else "like what was fitted"
    return "; ".join([f"{doubt}, {where}", *_errors(calibration, case)])


def _errors(calibration: Calibration, case: CalibrationCase) -> Iterator[str]:
    for score in calibration.scores:
        if score.kind and score.kind != case.kind.value:
            continue
        if score.inside:
            yield f"{_steps(score)} like those fitted were {score.said}"
        elif score.kind:
            yield f"of these, {_steps(score)} {score.kind} were {score.said}"
        else:
            software = ", ".join(score.domain.software)
            yield f"{_steps(score)} unlike them ({software}) were {score.said}"


def _steps(score: Score) -> str:
    return f"{score.domain.rows} step{'s' if score.domain.rows > 1 else ''}"


def all_doubts_said(search: ClusterSearch, layouts: Sequence[ClusterLayout]) -> str:
    """Of several layouts, the widest interval."""
    doubt = max(search.doubt_of(layout) for layout in layouts)
    return f"step times are give or take {percent(doubt)}; a plan of each says on what that stands"
