"""Draws inline SVG: memory over one step, and the memory-time curve.

Colours are CSS classes of the page. Not for the page, which repeats every figure as text: see
html.py.
"""

import math
from collections.abc import Iterable, Sequence
from html import escape

from steelyard.plans.peak_memory import Timeline
from steelyard.report.document import ReportDocument
from steelyard.report.frontier import CurvePoint
from steelyard.units import format_bytes, format_seconds

WIDTH, HEIGHT = 860, 300
LEFT, RIGHT, TOP, BOTTOM = 76, 16, 26, 36
_MOST_INSTANTS = 1200
_TICKS = 5


class Axes:
    """Maps values (bytes, seconds) to coordinates of the drawing."""

    def __init__(self, *, x: tuple[float, float], y: tuple[float, float]) -> None:
        self._x, self._y = x, y

    def x(self, value: float) -> float:
        low, high = self._x
        share = (value - low) / (high - low) if high > low else 0.5
        return LEFT + share * (WIDTH - LEFT - RIGHT)

    def y(self, value: float) -> float:
        low, high = self._y
        share = (value - low) / (high - low) if high > low else 0.5
        return HEIGHT - BOTTOM - share * (HEIGHT - TOP - BOTTOM)


def timeline(tree: ReportDocument) -> str:
    """Draw the live bytes at each instruction, with the peak and the graph without trades."""
    plan = tree.timeline.thinned(_MOST_INSTANTS) if tree.timeline else None
    if plan is None or not plan.nbytes:
        return ""
    bare = tree.unplanned_timeline.thinned(_MOST_INSTANTS) if tree.unplanned_timeline else None
    drawn = [plan, bare] if bare and bare.nbytes else [plan]
    highest = max(max(t.nbytes) for t in drawn)
    # A budget far above would flatten the curve; the text names it.
    budget = tree.budget_bytes if tree.budget_bytes and tree.budget_bytes <= 3 * highest else 0
    top = max(highest, budget) * 1.06
    axes = Axes(x=(0.0, max(t.seconds[-1] for t in drawn) or 1.0), y=(0.0, top))
    parts = [_phases(plan, axes), grid(axes, top)]
    if len(drawn) == 2:
        parts.append(f'<polyline class="bare" points="{_steps(drawn[1], axes)}"/>')
    floor = f"{axes.y(0):.1f}"
    begin, end = axes.x(plan.seconds[0]), axes.x(plan.seconds[-1])
    area = f"{begin:.1f},{floor} {_steps(plan, axes)} {end:.1f},{floor}"
    parts.append(f'<polygon class="held" points="{area}"/>')
    if budget:
        y = axes.y(budget)
        parts.append(line("budget", LEFT, y, WIDTH - RIGHT, y))
        parts.append(text(WIDTH - RIGHT, y - 5, "budget", "end"))
    parts.append(_peak_mark(plan, axes))
    parts.append(_times(axes, plan.seconds[-1]))
    return _svg(parts, f"Memory during one step, peak {format_bytes(max(plan.nbytes))}")


def curve(points: Sequence[CurvePoint]) -> str:
    """Draw step time (upwards) over memory (to the right); this plan is a filled circle."""
    if len(points) < 2:
        return ""
    memory, step = [p.memory.value for p in points], [p.step.value for p in points]
    margin = (max(step) - min(step)) * 0.12
    axes = Axes(x=(min(memory), max(memory)), y=(min(step) - margin, max(step) + margin))
    path = " ".join(f"{axes.x(m):.1f},{axes.y(s):.1f}" for m, s in zip(memory, step, strict=True))
    parts = [
        line("axis", LEFT, HEIGHT - BOTTOM, WIDTH - RIGHT, HEIGHT - BOTTOM),
        line("axis", LEFT, TOP, LEFT, HEIGHT - BOTTOM),
        f'<polyline class="bare" points="{path}"/>',
    ]
    for point in points:
        x, y = axes.x(point.memory.value), axes.y(point.step.value)
        kind = "here" if point.is_this_plan else "point"
        hint = escape(f"{point.memory}, {point.step} a step")
        parts.append(
            f'<circle class="{kind}" cx="{x:.1f}" cy="{y:.1f}" r="5"><title>{hint}</title></circle>'
        )
    for value in (min(memory), max(memory)):
        anchor = "start" if value == min(memory) else "end"
        parts.append(text(axes.x(value), HEIGHT - 12, f"~{format_bytes(value)}", anchor))
    parts += [
        text(LEFT - 8, axes.y(value) + 4, f"~{format_seconds(value)}", "end")
        for value in (min(step), max(step))
    ]
    return _svg(parts, "Step time over peak memory for every plan of the curve")


def _svg(parts: Sequence[str], label: str) -> str:
    return (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(label)}">'
        f"{''.join(parts)}</svg>"
    )


def _steps(timeline: Timeline, axes: Axes) -> str:
    return staircase(zip(timeline.seconds, timeline.nbytes, strict=True), axes)


def staircase(levels: Iterable[tuple[float, int]], axes: Axes) -> str:
    """Return the points of a step function: memory is constant until the next instruction."""
    corners: list[str] = []
    height = ""
    for seconds, nbytes in levels:
        x = f"{axes.x(seconds):.1f}"
        if height:
            corners.append(f"{x},{height}")
        height = f"{axes.y(nbytes):.1f}"
        corners.append(f"{x},{height}")
    return " ".join(corners)


def _phases(timeline: Timeline, axes: Axes) -> str:
    """Draw a labelled background band for each phase."""
    parts: list[str] = []
    began = [
        (seconds, phase)
        for index, (seconds, phase) in enumerate(
            zip(timeline.seconds, timeline.phases, strict=True)
        )
        if index == 0 or timeline.phases[index - 1] is not phase
    ]
    ends = [*(seconds for seconds, _ in began[1:]), timeline.seconds[-1]]
    for (seconds, phase), end in zip(began, ends, strict=True):
        left, right = axes.x(seconds), axes.x(end)
        parts.append(
            f'<rect class="{phase.value}" x="{left:.1f}" y="{TOP}" '
            f'width="{right - left:.1f}" height="{HEIGHT - TOP - BOTTOM}"/>'
        )
        if right - left > 60:
            parts.append(text((left + right) / 2, 16, phase.value, "middle"))
    return "".join(parts)


def grid(axes: Axes, top: float) -> str:
    """Draw horizontal grid lines at round amounts."""
    step = 2.0 ** math.ceil(math.log2(top / _TICKS))
    parts = []
    for index in range(int(top / step) + 1):
        y = axes.y(index * step)
        parts.append(line("axis" if index == 0 else "grid", LEFT, y, WIDTH - RIGHT, y))
        parts.append(text(LEFT - 8, y + 4, format_bytes(index * step), "end"))
    return "".join(parts)


def _peak_mark(timeline: Timeline, axes: Axes) -> str:
    index = max(range(len(timeline.nbytes)), key=timeline.nbytes.__getitem__)
    x, y = axes.x(timeline.seconds[index]), axes.y(timeline.nbytes[index])
    anchor = "end" if x > WIDTH / 2 else "start"
    offset = -9 if anchor == "end" else 9
    return (
        line("peak", x, y, x, HEIGHT - BOTTOM)
        + f'<circle class="peak" cx="{x:.1f}" cy="{y:.1f}" r="4"/>'
        + text(x + offset, y - 7, f"peak ~{format_bytes(timeline.nbytes[index])}", anchor, "strong")
    )


def _times(axes: Axes, end: float) -> str:
    return text(LEFT, HEIGHT - 12, "0 s", "start") + text(
        axes.x(end), HEIGHT - 12, f"~{format_seconds(end)}", "end"
    )


def line(kind: str, x1: float, y1: float, x2: float, y2: float) -> str:
    return f'<line class="{kind}" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"/>'


def text(x: float, y: float, said: str, anchor: str, kind: str = "said") -> str:
    return (
        f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(said)}</text>'
    )
