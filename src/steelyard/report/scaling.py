"""Renders a scaling study (step time over numbers of devices) as tables and as JSON.

Not for computing the study: see api/scaling_study.py.
"""

from collections.abc import Callable, Sequence
from typing import Any

from steelyard.plans.scaling_laws import Run, ScalePoint, Scaling, amdahl, gustafson
from steelyard.report.styled_text import Line, Tone, words
from steelyard.units import format_seconds, format_share

_LAYOUT = 1
_TOO_FEW = "a law needs at least two numbers of devices"


def rendered(scaling: Scaling, *, width: int) -> list[Line]:
    """Render two tables: the fixed batch with Amdahl's law, the growing batch with Gustafson's
    law.
    """
    same = [
        _row(
            point,
            point.same_batch,
            scaling.speed_up(point),
            _by_law(amdahl, times, scaling.serial_share),
        )
        for point, times in _with_times(scaling)
    ]
    grown = [
        _row(
            point,
            point.grown_batch,
            scaling.scaled_speed_up(point),
            _by_law(gustafson, times, scaling.constant_share),
        )
        for point, times in _with_times(scaling)
    ]
    title = f"{scaling.title}, on {scaling.cluster}"
    lines = [*words(title, width=width, tone=Tone.STRONG)]
    lines += _table("the same batch", "Amdahl", same)
    lines += words(_amdahl(scaling), width=width, tone=Tone.FAINT)
    lines += _table("the batch scaled with the devices", "Gustafson", grown)
    lines += words(_gustafson(scaling), width=width, tone=Tone.FAINT)
    for note in scaling.notes:
        lines += words(f"note  {note}", width=width)
    return lines


def _by_law(law: Callable[[float, float], float], times: float, share: float | None) -> str:
    return "" if share is None else f"{law(times, share):.2f}"


def _amdahl(scaling: Scaling) -> str:
    share, first = scaling.serial_share, scaling.points[0].devices
    if share is None:
        slow = scaling.slowest_of_the_same_batch
        if slow is None:
            return _TOO_FEW
        return (
            f"Amdahl: no serial share fits: {slow.devices:,} devices take longer than {first:,}, "
            "because of their communication"
        )
    if not share:
        return "Amdahl: the serial share is 0 %; more devices may need less recomputation"
    return f"Amdahl: the serial share is {_unsigned_share(share)} of the step on {first:,} devices"


def _gustafson(scaling: Scaling) -> str:
    share, first = scaling.constant_share, scaling.points[0].devices
    if share is None:
        slow = scaling.slowest_of_the_grown_batch
        if slow is None:
            return _TOO_FEW
        return (
            f"Gustafson: no constant share fits: {slow.devices:,} devices process fewer samples a "
            f"second than {first:,}, because of their communication"
        )
    if not share:
        return "Gustafson: the constant share is 0 %"
    return f"Gustafson: the constant share is {_unsigned_share(share)} of the step"


def _unsigned_share(share: float) -> str:
    return format_share(share).lstrip("+")


def _with_times(scaling: Scaling) -> list[tuple[ScalePoint, float]]:
    return [(point, scaling.times(point)) for point in scaling.points]


def _table(title: str, law: str, rows: Sequence[tuple[str, ...]]) -> list[Line]:
    head = ("devices", "layout", "step", "speed-up", law, "hours", "USD")
    filled = [i for i, _ in enumerate(head) if any(row[i] for row in rows)]
    widths = {i: max(len(row[i]) for row in (head, *rows)) for i in filled}
    lines: list[Line] = [((title, Tone.STRONG),)]
    for number, row in enumerate((head, *rows)):
        cells = (f"{row[i]:{'<' if i == _LAYOUT else '>'}{widths[i]}}" for i in filled)
        tone = Tone.PLAIN if number else Tone.FAINT
        lines.append(((f"  {'  '.join(cells)}", tone),))
    return lines


def _row(point: ScalePoint, run: Run | None, speed_up: float | None, law: str) -> tuple[str, ...]:
    devices = f"{point.devices:,}"
    if run is None or speed_up is None:
        return (devices, "none fits", "", "", law, "", "")
    return (
        devices,
        run.layout,
        f"~{format_seconds(run.step_seconds)}",
        f"{speed_up:.2f}",
        law,
        "" if run.hours is None else f"~{run.hours:,.1f}",
        "" if run.usd is None else f"~{run.usd:,.0f}",
    )


def to_json(scaling: Scaling) -> dict[str, Any]:
    return {
        "title": scaling.title,
        "cluster": scaling.cluster,
        "serial_share": scaling.serial_share,
        "constant_share": scaling.constant_share,
        "points": [
            {
                "devices": point.devices,
                "same_batch": _run_json(point.same_batch, scaling.speed_up(point)),
                "grown_batch": _run_json(point.grown_batch, scaling.scaled_speed_up(point)),
            }
            for point in scaling.points
        ],
        "notes": list(scaling.notes),
    }


def _run_json(run: Run | None, speed_up: float | None) -> dict[str, Any] | None:
    if run is None:
        return None
    return {
        "layout": run.layout,
        "samples": run.samples,
        "step_seconds": run.step_seconds,
        "speed_up": speed_up,
        "hours": run.hours,
        "usd": run.usd,
    }
