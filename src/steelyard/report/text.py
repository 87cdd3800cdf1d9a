"""Renders the document tree as lines of text of a given width, with styles.

terminal.py chooses the colours. Not for the contents: see document.py.
"""

from collections.abc import Sequence

from steelyard.ir.metrics import EXACT
from steelyard.report.amounts_table import AmountRow
from steelyard.report.document import (
    ReportDocument,
    TakenOffer,
    describe_rule,
    refused_label,
)
from steelyard.report.frontier import CurvePoint
from steelyard.report.peak_groups import Group
from steelyard.report.quantities import Quantity
from steelyard.report.rank_memory import lines_of
from steelyard.report.styled_text import NARROW, Line, Tone, Zoom, headed, indented, shown
from steelyard.safe_text import printable
from steelyard.units import format_bytes, format_share

_MOST_REFUSED = 4
# The number of groups shown for the peak without trades.
_FEW_GROUPS = 5
_HEAD = 12  # the width of the column of heads


def render(
    tree: ReportDocument, *, width: int = 100, zoom: Zoom = Zoom.RECEIPT
) -> tuple[Line, ...]:
    width = max(20, width)
    body = {
        Zoom.RECEIPT: _receipt,
        Zoom.OFFERS: _offers,
        Zoom.PEAK: _peak,
        Zoom.FRONTIER: _frontier,
    }[zoom]
    return shown([*_header(tree, width), *body(tree, width)])


# --- the parts of every zoom ----------------------------------------------------------------------


def _header(tree: ReportDocument, width: int) -> list[Line]:
    name, budget = f"plan {tree.name}", f"budget: {tree.budget}"
    title = printable(tree.title)
    used = len(name) + 2 + len(title)
    if used + 3 + len(budget) <= width:
        gap = " " * (width - used - len(budget))
        return [
            ((name, Tone.STRONG), ("  ", Tone.PLAIN), (title, Tone.PLAIN), (gap, Tone.PLAIN),
             (budget, Tone.PLAIN)),
        ]  # fmt: skip
    first = headed(name + "  ", title, width, Tone.PLAIN, head_tone=Tone.STRONG)
    return [*first, *headed("", budget, width)]


def _column(head: str, text: str, width: int, tone: Tone = Tone.PLAIN) -> list[Line]:
    """Render ``head`` in the left column and ``text`` wrapped to its right."""
    return headed(f"{head:<{_HEAD}}", text, width, tone, head_tone=Tone.STRONG)


# --- the receipt ----------------------------------------------------------------------------------


def _receipt(tree: ReportDocument, width: int) -> list[Line]:
    lines = [*_table(tree, width), *_verdict(tree, width)]
    lines += _column("baselines", tree.baselines, width)
    if tree.largest:
        lines += _column("largest", tree.largest, width)
    if tree.fewest:
        lines += _column("fewest", tree.fewest, width)
    if tree.stands_in:
        lines += _column(tree.measured_is, tree.stands_in, width)
    if tree.ran:
        lines += _column("ran", ", ".join(tree.ran), width)
    for number, line in enumerate(lines_of(tree.ranks)):
        lines += _column("" if number else "rank memory", line, width)
    lines += _as_of(tree, width)
    lines += _taken(tree, width)
    lines += _refused(tree, width, most=_MOST_REFUSED)
    return lines + _last(tree, width)


def _as_of(tree: ReportDocument, width: int) -> list[Line]:
    return _column("reasons", tree.as_of, width) if tree.as_of else []


def _last(tree: ReportDocument, width: int) -> list[Line]:
    lines: list[Line] = []
    if tree.least.value:
        lines += _column("least", f"{tree.least} {tree.least_is}", width)
    for note in tree.notes:
        lines += _column("note", note, width)
    if tree.next_cent:
        lines += _column("next cent", tree.next_cent, width)
    return lines


def _verdict(tree: ReportDocument, width: int) -> list[Line]:
    return _column("memory", tree.verdict, width, Tone.GOOD if tree.fits else Tone.BAD)


def _table(tree: ReportDocument, width: int) -> list[Line]:
    titles = ["before", "plan"] + ([tree.measured_is, "miss"] if tree.is_receipt else [])
    rows = [(row, _cells(row, tree.is_receipt)) for row in tree.rows]
    columns = [max(len(t), *(len(cells[i]) for _, cells in rows)) for i, t in enumerate(titles)]
    label = max(len(row.label) for row in tree.rows)
    mark = len("  <- largest miss") if tree.is_receipt else 0
    if label + sum(c + 2 for c in columns) + mark > width:
        return _stacked(rows, titles, width)
    head = " " * label + "".join(f"  {t:>{c}}" for t, c in zip(titles, columns))
    lines: list[Line] = [((head, Tone.FAINT),)]
    for row, cells in rows:
        text = f"{row.label:<{label}}" + "".join(f"  {t:>{c}}" for t, c in zip(cells, columns))
        tone = Tone.BAD if row.is_outside else Tone.PLAIN
        lines.append(((text, tone), ("  <- largest miss" if row.is_largest else "", tone)))
    return lines


def _cells(row: AmountRow, is_receipt: bool) -> list[str]:
    cells = [str(row.before), str(row.plan)]
    if is_receipt:
        cells += [str(row.measured), "" if row.miss is None else format_share(row.miss)]
    return cells


def _stacked(rows: list[tuple[AmountRow, list[str]]], titles: list[str], width: int) -> list[Line]:
    """Render each amount on separate lines, for widths into which the table does not fit."""
    lines: list[Line] = []
    for row, cells in rows:
        lines.append(((row.label, Tone.STRONG),))
        for title, cell in zip(titles, cells):
            if cell:
                mark = " <- largest" if title == "miss" and row.is_largest else ""
                lines.append(((f"  {title:<9} {cell:>11}{mark}"[:width], Tone.PLAIN),))
    return lines


def _taken(tree: ReportDocument, width: int) -> list[Line]:
    if tree.rules and not tree.taken:
        # The plan was checked or edited by hand, so no search explained its decisions.
        lines: list[Line] = [((f"decisions ({len(tree.rules)})", Tone.STRONG),)]
        return lines + [l for r in tree.rules for l in indented(describe_rule(r), width)]
    head = f"taken ({tree.taken_is})"
    if not tree.taken:
        return [((head, Tone.STRONG), (": none needed", Tone.PLAIN))]
    return [((head, Tone.STRONG),), *_offers_taken(tree.taken, width)]


def _offers_taken(taken: Sequence[TakenOffer], width: int) -> list[Line]:
    """Render each offer on one line, shortened if necessary; on two lines if some do not fit."""
    columns = [(t.trade, t.label, t.paying, t.buying) for t in taken]
    short = [
        (t.trade, t.label, *(" ".join(c.split()[:3]) for c in (t.paying, t.buying))) for t in taken
    ]
    for rows in (columns, short):
        lines = ["  " + l for l in aligned(rows)]
        if all(len(printable(l, most=1000)) <= width for l in lines):
            return [((l, Tone.PLAIN),) for l in lines]
    return [
        line
        for trade, label, pays, buys in columns
        for text in (f"{trade}  {label}", f"  {pays}, {buys}")
        for line in indented(text, width)
    ]


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    return [
        "  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths)).rstrip() for row in rows
    ]


def _refused(tree: ReportDocument, width: int, *, most: int | None = None) -> list[Line]:
    """Render the refused offers; with ``most``, offers with the same reason are grouped."""
    if not tree.refused:
        return []
    lines: list[Line] = [((f"refused ({tree.refused_is})", Tone.STRONG),)]
    if most is None:
        for r in tree.refused:
            lines += indented(f"{r.trade}  {refused_label(r)}: {r.reason}", width)
        return lines
    labels: dict[tuple[str, str], list[str]] = {}
    for r in tree.refused:
        labels.setdefault((r.trade, r.reason), []).append(refused_label(r))
    for (trade, reason), group in list(labels.items())[:most]:
        others = f" and {len(group) - 1} more" if len(group) > 1 else ""
        lines += indented(f"{trade}  {group[0]}{others}: {reason}", width)
    rest = sum(len(group) for group in list(labels.values())[most:])
    if rest:
        lines += indented(f"and {rest} more: --zoom offers", width)
    return lines


# --- the offers, with the intervals of what was predicted -----------------------------------------


def _offers(tree: ReportDocument, width: int) -> list[Line]:
    lines = headed(
        "", "predicted, with the interval expected for the measurement", width, Tone.STRONG
    )
    for row in tree.rows:
        if isinstance(row.plan, Quantity) and row.plan.value:
            lines += indented(f"{row.label}: {row.plan}, {row.plan.interval}", width)
        else:
            lines += indented(f"{row.label}: {row.plan}", width)
    lines += _as_of(tree, width)
    lines += _taken(tree, width)
    for offer in tree.taken:
        for rule in offer.rules:
            lines += indented(f"  {describe_rule(rule)}", width)
    return [*lines, *_refused(tree, width), *_last(tree, width)]


# --- tensors alive at the peak --------------------------------------------------------------------


def _peak(tree: ReportDocument, width: int) -> list[Line]:
    peak = tree.peak
    place = ", ".join(p for p in (peak.where, peak.line) if p)
    lines = _column(
        "peak",
        f"~{format_bytes(peak.nbytes)} in the {peak.phase} pass, at {peak.at}"
        + (f" ({place})" if place else ""),
        width,
    )
    activations = peak.nbytes - peak.resident_bytes - peak.workspace_bytes
    text = (
        f"~{format_bytes(peak.resident_bytes)} resident for the whole step, "
        f"~{format_bytes(activations)} temporary"
    )
    if peak.workspace_bytes:
        text += f", ~{format_bytes(peak.workspace_bytes)} workspace of the kernel"
    lines += _column("of which", text, width)
    lines += headed("", "alive at the peak, by module and source line", width, Tone.STRONG)
    lines += _groups(peak.groups, width)
    if peak.num_rest:
        lines += indented(f"the rest, {peak.num_rest} lines: ~{format_bytes(peak.rest_bytes)}",
                           width)  # fmt: skip
    return [*lines, *_unplanned_peak(tree, width)]


def _unplanned_peak(tree: ReportDocument, width: int) -> list[Line]:
    """Render the largest groups alive at the peak without trades, which explain an OOM error."""
    peak = tree.unplanned_peak
    if peak is None:
        return []
    head = f"without trades, ~{format_bytes(peak.nbytes)} at {peak.at}; the largest"
    return [*headed("", head, width, Tone.STRONG), *_groups(peak.groups[:_FEW_GROUPS], width)]


def _groups(groups: Sequence[Group], width: int) -> list[Line]:
    if width < NARROW:
        return [
            line
            for g in groups
            for line in indented(
                f"~{format_bytes(g.nbytes)} {g.where} {g.line} {_made_by(g)}", width
            )
        ]
    where = min(max((len(g.where) for g in groups), default=0), width // 3)
    place = min(max((len(g.line) for g in groups), default=0), width // 4)
    what = width - where - place - 26
    return [
        (
            (f"  {'~' + format_bytes(g.nbytes):>9}  {g.share * 100:>4.1f} %  ", Tone.PLAIN),
            (f"{_cut(g.where, where):<{where}}  {_cut(g.line, place):<{place}}  ", Tone.PLAIN),
            (_cut(_made_by(g), what), Tone.FAINT),
        )
        for g in groups
    ]


def _made_by(group: Group) -> str:
    names = ", ".join(group.what)
    return f"{names} x{group.count}" if group.count > 1 else names


def _cut(text: str, width: int) -> str:
    """Cut the start of a text that is too long: the end of a path is more specific."""
    text = printable(text, most=500)
    return text if len(text) <= width else "..." + text[len(text) - max(1, width - 3) :]


# --- the memory-time curve ------------------------------------------------------------------------


def _frontier(tree: ReportDocument, width: int) -> list[Line]:
    if not tree.curve:
        return [(("no curve was computed for this plan", Tone.PLAIN),)]
    parts = "micro-batches" if width >= NARROW else "parts"
    lines: list[Line] = [((f"     memory       step   FLOPs  {parts}", Tone.FAINT),)]
    for p in tree.curve:
        text = (
            f"{'*' if p.is_this_plan else ' '} {p.memory!s:>9}  {p.step!s:>9} "
            f"{_signed_percent(p.more_flops):>7}  {p.micro_batches}{_accuracy(p)}"
        )
        lines.append(((text, Tone.STRONG if p.is_this_plan else Tone.PLAIN),))
    lines += _plot(tree.curve, width)
    if any(p.is_this_plan for p in tree.curve):
        legend = "* this plan; FLOPs relative to the graph without trades"
        lines += headed("", legend, width, Tone.FAINT)
    lines += _as_of(tree, width)
    return [*lines, *_last(tree, width)]


def _accuracy(point: CurvePoint) -> str:
    """Return the accuracy loss of a point, or an empty string if it is exact."""
    return "" if point.accuracy_loss == EXACT else f"  accuracy loss {point.accuracy_loss}"


def _signed_percent(share: float) -> str:
    return f"{share * 100:+z.0f} %"


_PLOT_LINES = 10


def _plot(curve: Sequence[CurvePoint], width: int) -> list[Line]:
    """Plot step time (upwards) over memory (to the right)."""
    if len(curve) < 2:
        return []
    memory = [p.memory.value for p in curve]
    step = [p.step.value for p in curve]
    left = max(len(str(max(curve, key=lambda p: p.step.value).step)), len(str(curve[-1].step)), 9)
    columns = min(60, width - left - 4)
    if columns < 12:
        return []
    cells = [[" "] * columns for _ in range(_PLOT_LINES)]
    for point in sorted(curve, key=lambda p: p.is_this_plan):
        x = _scaled(point.memory.value, min(memory), max(memory), columns)
        y = _scaled(point.step.value, min(step), max(step), _PLOT_LINES)
        cells[_PLOT_LINES - 1 - y][x] = "*" if point.is_this_plan else "o"
    top, bottom = (f(curve, key=lambda p: p.step.value).step for f in (max, min))
    labels = [str(top), *[""] * (_PLOT_LINES - 2), str(bottom)]
    lines: list[Line] = [
        ((f"{label:>{left}} |", Tone.FAINT), ("".join(row).rstrip(), Tone.PLAIN))
        for label, row in zip(labels, cells, strict=True)
    ]
    least, most = (f(curve, key=lambda p: p.memory.value).memory for f in (min, max))
    axis = f"{least}{most!s:>{columns - len(str(least))}}"
    return [
        *lines,
        ((" " * left + " +" + "-" * columns, Tone.FAINT),),
        ((" " * (left + 2) + axis, Tone.FAINT),),
    ]


def _scaled(value: float, low: float, high: float, cells: int) -> int:
    return round((value - low) / (high - low) * (cells - 1)) if high > low else 0
