"""The figures that the charts of the HTML page show, as JSON; charts.js draws them.

All names are text: the script inserts them as text nodes. Not for the tables: see chart_table.py.
"""

import json
from typing import Any

from steelyard.plans.lifetimes import MOST_INSTANTS, MemoryHistory, StepDetail
from steelyard.plans.peak_memory import Timeline
from steelyard.report.document import ReportDocument
from steelyard.report.page.chart_table import reason_of, where_of
from steelyard.report.page.schedule import blocks_of
from steelyard.report.peak_groups import Group, PeakTree, short_op, starred_path
from steelyard.report.quantities import Quantity
from steelyard.report.styled_text import unbroken
from steelyard.safe_text import printable
from steelyard.units import format_bytes, format_share

_MOST_NAME = 300
_LEAST_SHARE = 0.02


def chart_data(tree: ReportDocument, detail: StepDetail) -> dict[str, Any]:
    """Return the data of all charts; a chart without data is None."""
    names = _Names()
    return {
        "amounts": _amounts(tree),
        "peaks": [
            _peak(peak, title)
            for peak, title in ((tree.peak, "the plan"), (tree.unplanned_peak, "without trades"))
            if peak is not None and peak.groups
        ],
        "memory": [
            one
            for one in (
                _memory(tree.timeline, detail.planned, "the plan", names),
                _memory(tree.unplanned_timeline, detail.unplanned, "without trades", names),
            )
            if one is not None
        ][: 2 if tree.rules else 1],
        "budget": tree.budget_bytes,
        "curve": [
            {
                "nbytes": point.memory.value,
                "seconds": point.step.value,
                "said": said(
                    f"{point.memory}, {point.step} a step, {point.micro_batches} micro-batches, "
                    f"accuracy loss {point.accuracy_loss}"
                ),
                "here": point.is_this_plan,
            }
            for point in (tree.curve if len(tree.curve) > 1 else ())
        ],
        "schedule": [
            {
                "row": f"rank {row.rank}, {row.stream}",
                "stream": "wait" if row.is_waiting else "device" if row.is_device else "link",
                "blocks": [
                    [b.begin_seconds, b.end_seconds, names.index(b.where), names.index(b.what)]
                    for b in row.blocks
                ],
            }
            for row in blocks_of(detail.spans)
        ],
        "names": names.found,
    }


def to_script(data: dict[str, Any]) -> str:
    """Return JSON that is safe in a ``<script>`` element: it contains no ``<``, ``>`` or ``&``."""
    text = json.dumps(data, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def said(text: str) -> str:
    """Make a text one printable line of limited length."""
    return unbroken(printable(text, most=_MOST_NAME))


class _Names:
    """Each name once, in the order of first use."""

    def __init__(self) -> None:
        self._index: dict[str, int] = {}

    def index(self, name: str) -> int:
        return self._index.setdefault(said(name), len(self._index))

    @property
    def found(self) -> list[str]:
        return [*self._index]


def _amounts(tree: ReportDocument) -> list[dict[str, Any]]:
    """Return each measured amount relative to its prediction, with the predicted interval."""
    found = []
    for row in tree.rows:
        plan, measured = row.plan, row.measured
        if not isinstance(plan, Quantity) or not isinstance(measured, Quantity) or not plan.value:
            continue
        miss = "" if row.miss is None else f", {format_share(row.miss)}"
        found.append(
            {
                "label": row.label,
                "low": (plan.value if plan.low is None else plan.low) / plan.value,
                "high": (plan.value if plan.high is None else plan.high) / plan.value,
                "measured": measured.value / plan.value,
                "said": said(f"measured {measured}, predicted {plan}, {plan.interval}{miss}"),
            }
        )
    return found


def _peak(peak: PeakTree, title: str) -> dict[str, Any]:
    """Return the groups of a peak by the first part of their module path."""
    groups: dict[str, list[Group]] = {}
    for group in peak.groups:
        groups.setdefault(group.where.partition(".")[0], []).append(group)
    parts = {name: _tiles(found) for name, found in groups.items()}
    if peak.num_rest:
        rest = {"name": f"the rest, {peak.num_rest} lines", "value": peak.rest_bytes}
        text = f"~{format_bytes(peak.rest_bytes)}"
        parts["the rest"] = [{**rest, "line": "", "said": text, "size": text, "role": "rest"}]
    return {
        "title": title,
        "tiles": [{"name": said(name), "children": tiles} for name, tiles in parts.items()],
    }


def _tiles(groups: list[Group]) -> list[dict[str, Any]]:
    """Return a tile for each group; those too small for a label are one tile."""
    large = [group for group in groups if group.share >= _LEAST_SHARE]
    small = groups[len(large) :]
    if len(small) < 2:
        return [_tile(group) for group in groups]
    nbytes = sum(group.nbytes for group in small)
    size = said(f"~{format_bytes(nbytes)}")
    listed = ", ".join(f"{g.where} ~{format_bytes(g.nbytes)}" for g in small)
    rest = {"name": f"{len(small)} smaller", "value": nbytes, "line": "", "size": size}
    return [*map(_tile, large), {**rest, "said": said(listed), "role": small[0].role}]


def _tile(group: Group) -> dict[str, Any]:
    size = f"~{format_bytes(group.nbytes)}"
    times = f" x{group.count}" if group.count > 1 else ""
    return {
        "name": said(group.where),
        "value": group.nbytes,
        "line": said(group.line),
        "size": said(size),
        "said": said(f"{size}, {group.share * 100:.1f} %, {', '.join(group.what)}{times}"),
        "role": group.role,
    }


def _memory(
    timeline: Timeline | None, history: MemoryHistory | None, title: str, names: _Names
) -> dict[str, Any] | None:
    """Return the level at each instant, and if it is known, the tensors that are alive."""
    history = None if history is None else history.thinned()
    timeline = timeline.thinned(MOST_INSTANTS) if history is None and timeline else timeline
    timeline = timeline if history is None else history.timeline
    if timeline is None or not timeline.nbytes:
        return None
    starts = [i for i, p in enumerate(timeline.phases) if i == 0 or p is not timeline.phases[i - 1]]
    return {
        "title": title,
        "seconds": [_rounded(s) for s in timeline.seconds],
        "nbytes": timeline.nbytes,
        "phases": [[timeline.seconds[i], timeline.phases[i].value] for i in starts],
        "left_out": 0 if history is None else history.num_left_out,
        "alive": None
        if history is None
        else [
            [
                one.first,
                one.last,
                one.tensor.nbytes,
                names.index(starred_path(where_of(one.tensor))),
                names.index(one.tensor.line),
                names.index(short_op(one.tensor.what)),
                names.index(reason_of(one)),
            ]
            for one in history.lifetimes
        ],
    }


def _rounded(seconds: float) -> float:
    return float(f"{seconds:.6g}")
