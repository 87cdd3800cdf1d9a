"""Render the document tree as one self-contained HTML page: no network, no script, no font.

Every figure that is drawn is also given as text. Not for the drawings: see svg.py.
"""

import base64
from collections.abc import Iterable, Sequence
from hashlib import sha256
from html import escape

from steelyard.plans.plan import Plan
from steelyard.plans.receipt import Receipt
from steelyard.report import svg
from steelyard.report.amounts_table import AmountRow
from steelyard.report.document import ReportDocument, describe_rule, refused_label, tree_of
from steelyard.report.peak_groups import Group, PeakTree
from steelyard.report.quantities import Quantity
from steelyard.report.rank_memory import lines_of, shown_of
from steelyard.report.styled_text import unbroken
from steelyard.safe_text import printable
from steelyard.units import format_bytes, format_share

_STYLE = """
:root { color-scheme: light dark; --ink: #1c2330; --soft: #5d6675; --rule: #d9dee6;
  --page: #ffffff; --held: #2f6fb3; --bare: #9aa3b2; --peak: #b3261e; --good: #1e7a3c;
  --forward: #eef4fb; --backward: #fbf3e8; --update: #eff7ef; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e9ee; --soft: #a0a9b8; --rule: #343c4a;
  --page: #14181f; --held: #6ea8e6; --bare: #77808f; --peak: #ff8a80; --good: #7fd49a;
  --forward: #1a2330; --backward: #2b241a; --update: #1a2a1e; } }
* { box-sizing: border-box; }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--page);
  max-width: 62rem; margin: 0 auto; padding: 1.5rem 1rem 4rem; overflow-wrap: anywhere; }
h1 { font-size: 1.5rem; margin: 0; } h2 { font-size: 1.1rem; margin: 2.2rem 0 .5rem; }
p { margin: .3rem 0; } .soft { color: var(--soft); } .good { color: var(--good); }
.bad { color: var(--peak); font-weight: 600; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; min-width: 60%; overflow-wrap: break-word; }
th, td { text-align: left; padding: .25rem .9rem .25rem 0; border-bottom: 1px solid var(--rule);
  vertical-align: top; }
th { font-weight: 600; color: var(--soft); white-space: nowrap; } tbody th { color: var(--ink); }
.n { text-align: right; white-space: nowrap; font-variant-numeric: tabular-nums; }
.amounts td { white-space: normal; }
@media (max-width: 46rem) { .amounts thead { display: none; } .amounts { min-width: 100%; }
  .amounts tr { display: block; padding: .3rem 0; border-bottom: 1px solid var(--rule); }
  .amounts th, .amounts td { display: flex; justify-content: space-between; gap: 1rem; border: 0;
    padding: .1rem 0; }
  .amounts td:empty { display: none; }
  .amounts td::before { content: attr(data-of); color: var(--soft); white-space: nowrap; } }
code { font: .92em ui-monospace, monospace; }
svg { width: 100%; height: auto; display: block; margin: .6rem 0; }
.held { fill: var(--held); fill-opacity: .35; stroke: var(--held); stroke-width: 1.2; }
.bare { fill: none; stroke: var(--bare); stroke-width: 1.2; }
.budget { stroke: var(--peak); stroke-dasharray: 6 4; } .peak { stroke: var(--peak); }
circle.peak { fill: var(--peak); } line.peak { stroke-dasharray: 2 3; }
.axis { stroke: var(--soft); } .grid { stroke: var(--rule); }
.forward { fill: var(--forward); } .backward { fill: var(--backward); }
.update { fill: var(--update); } .said { fill: var(--soft); font-size: 12px; }
.strong { fill: var(--ink); font-size: 13px; font-weight: 600; }
.point { fill: var(--page); stroke: var(--held); stroke-width: 2; }
.here { fill: var(--held); stroke: var(--held); }
.bar { fill: var(--held); } td svg { width: 6rem; margin: .35rem 0; }
@media print { body { max-width: none; } details { display: block; } }
"""
_MOST_REFUSED = 200


def html_of(subject: Plan | Receipt) -> str:
    return to_html(tree_of(subject))


def to_html(tree: ReportDocument) -> str:
    digest = base64.b64encode(sha256(_STYLE.encode()).digest()).decode()
    kind = "receipt" if tree.is_receipt else "plan"
    title = _safe(f"{kind} {tree.name}: {tree.title}")
    sections = [
        _head(tree), _amounts(tree), _ranks(tree), _memory(tree), _peak(tree), _taken(tree),
        _curve(tree),
    ]  # fmt: skip
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        # Nothing may be loaded or run, whatever text a name in the plan contains.
        '<meta http-equiv="Content-Security-Policy" content="default-src \'none\'; '
        f"style-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'\">\n"
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{title}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n"
        + "\n".join(section for section in sections if section)
        + "\n</body>\n</html>\n"
    )


def _safe(text: object) -> str:
    return escape(unbroken(printable(str(text), most=2000)))


def _head(tree: ReportDocument) -> str:
    tone = "good" if tree.fits else "bad"
    lines = [
        f"<h1>{'Receipt' if tree.is_receipt else 'Plan'} <code>{_safe(tree.name)}</code></h1>",
        f"<p>{_safe(tree.title)}</p>",
        f'<p class="soft">budget: {_safe(tree.budget)}; runner: {_safe(tree.runner)}</p>',
        f'<p class="{tone}">{_safe(tree.verdict)}</p>',
    ]
    answers = (tree.largest, tree.fewest)
    lines += [f"<p>{_safe(answer)}</p>" for answer in answers if answer]
    if tree.ran:
        lines.append(f"<p>{_safe(', '.join(tree.ran))}</p>")
    return "\n".join(lines)


def _amounts(tree: ReportDocument) -> str:
    heads = ["", *(f">{column}" for column in _columns(tree))]
    rows = (_row(r, tree) for r in tree.rows)
    lines = ["<h2>The four amounts</h2>", _table(heads, rows, kind="amounts")]
    lines.append('<p class="soft">~ marks a prediction; a bare figure was measured. '
                 f"{_safe(tree.baselines)}.</p>")  # fmt: skip
    if tree.stands_in:
        lines.append(f"<p>measured*: {_safe(tree.stands_in)}.</p>")
    lines += [f"<p>note: {_safe(note)}</p>" for note in tree.notes]
    if tree.least.value:
        lines.append(f"<p>{_safe(tree.least)} {_safe(tree.least_is)}.</p>")
    if tree.as_of:
        lines.append(f"<p>reasons: {_safe(tree.as_of)}.</p>")
    if tree.next_cent:
        lines.append(f"<p>Next cent: {_safe(tree.next_cent)}.</p>")
    return "\n".join(lines)


def _columns(tree: ReportDocument) -> list[str]:
    columns = ["before", "without trades", "plan", "interval of the plan"]
    return columns + ([tree.measured_is, "miss"] if tree.is_receipt else [])


def _row(row: AmountRow, tree: ReportDocument) -> str:
    """Render a row; each cell names its column, for narrow screens that hide the header."""
    interval = row.plan.interval if isinstance(row.plan, Quantity) and row.plan.value else ""
    miss = "" if row.miss is None else format_share(row.miss)
    mark = " largest miss" if row.is_largest else ""
    cells = [row.before, row.unplanned, row.plan, interval, row.measured, f"{miss}{mark}"]
    bad = " bad" if row.is_outside else ""
    cells_html = "".join(
        f'<td class="n{bad if column == "miss" else ""}" data-of="{column}">{_safe(cell)}</td>'
        for column, cell in zip(_columns(tree), cells)
    )
    return f'<tr><th scope="row">{_safe(row.label)}</th>{cells_html}</tr>'


def _ranks(tree: ReportDocument) -> str:
    if not tree.ranks:
        return ""
    shown = shown_of(tree.ranks)
    rows = (
        f'<tr><th scope="row">rank {one.rank}</th>'
        f'<td class="n">~{format_bytes(one.predicted_bytes)}</td>'
        f'<td class="n">{"-" if one.measured_bytes is None else format_bytes(one.measured_bytes)}'
        f'</td><td class="n">{"" if one.miss is None else format_share(one.miss)}</td></tr>'
        for one in shown
    )
    table = _table(["", ">plan", ">measured", ">miss"], rows)
    rest = lines_of(tree.ranks)[len(shown) :]
    return f"<h2>Memory of each rank</h2>\n{table}{''.join(f'<p>{_safe(l)}</p>' for l in rest)}"


def _memory(tree: ReportDocument) -> str:
    drawing = svg.timeline(tree)
    if not drawing:
        return ""
    peak = tree.peak
    bare = " The axis ends where the last operator begins."
    bare += " The thin line is the graph without trades." if tree.unplanned_timeline else ""
    if any(rule.trade == "accumulate" for rule in tree.rules):
        bare += " Of the micro-batches the first two are drawn; the others look like the second."
    return (
        f"<h2>Memory over one step</h2>\n{drawing}\n"
        f"<p>The peak, ~{format_bytes(peak.nbytes)}, stands in the {_safe(peak.phase)} pass at "
        f"<code>{_safe(peak.at)}</code> {_place(peak.where, peak.line)}.{bare}</p>"
    )


def _place(where: str, line: str) -> str:
    text = ", ".join(p for p in (where, line) if p)
    return f"(<code>{_safe(text)}</code>)" if text else ""


def _taken(tree: ReportDocument) -> str:
    if tree.rules and not tree.taken:
        rules = "".join(f"<p><code>{_safe(describe_rule(r))}</code></p>" for r in tree.rules)
        return f"<h2>Decisions: {len(tree.rules)}</h2>\n{rules}"
    head = f"<h2>Taken: {tree.taken_is}</h2>"
    if tree.taken:
        rows = (
            f"<tr><td>{_safe(t.trade)}</td><td>{_safe(t.label)}</td>"
            f"<td>{_safe(t.paying)}</td><td>{_safe(t.buying)}</td></tr>"
            for t in tree.taken
        )
        head += _table(["trade", "where", "", ""], rows)
    if not tree.refused:
        return head
    rows = (
        f"<tr><td>{_safe(r.trade)}</td><td>{_safe(refused_label(r))}</td><td>{_safe(r.reason)}</td></tr>"
        for r in tree.refused[:_MOST_REFUSED]
    )
    more = len(tree.refused) - _MOST_REFUSED
    return (
        f"{head}\n<details><summary>Refused: {tree.refused_is}; each with the reason that binds"
        f"</summary>{_table(['trade', 'where', 'reason'], rows)}"
        f"{f'<p>and {more} more</p>' if more > 0 else ''}</details>"
    )


def _curve(tree: ReportDocument) -> str:
    if not tree.curve:
        return ""
    rows = (
        f"<tr><td>{'this plan' if p.is_this_plan else ''}</td>"
        f'<td class="n">{_safe(p.memory)}</td><td class="n">{_safe(p.step)}</td>'
        f'<td class="n">{format_share(p.more_flops)}</td><td class="n">{p.micro_batches}</td>'
        f"<td>{_safe(p.accuracy_loss)}</td></tr>"
        for p in tree.curve
    )
    heads = ["", ">memory", ">step", ">FLOPs beside no trades", ">micro-batches", "accuracy loss"]
    return f"<h2>The memory-time curve</h2>\n{svg.curve(tree.curve)}\n{_table(heads, rows)}"


def _peak(tree: ReportDocument) -> str:
    peak, bare = tree.peak, tree.unplanned_peak
    workspace = ""
    if peak.workspace_bytes:
        workspace = f", ~{format_bytes(peak.workspace_bytes)} are workspace of the kernel"
    without = ""
    if bare is not None:
        without = (
            f"\n<h2>Without trades</h2>\n<p>~{format_bytes(bare.nbytes)} would be alive at "
            f"<code>{_safe(bare.at)}</code> {_place(bare.where, bare.line)}.</p>\n{_alive(bare)}"
        )
    return (
        f"<h2>What is alive at the peak</h2>\n<p>~{format_bytes(peak.resident_bytes)} of it stay "
        f"for the whole step{workspace}.</p>\n{_alive(peak)}{without}"
    )


def _alive(peak: PeakTree) -> str:
    heads = [">bytes", ">share", "", "module", "line", "made by"]
    rows = [_group(group) for group in peak.groups]
    if peak.num_rest:
        rows.append(
            f'<tr><td class="n">~{format_bytes(peak.rest_bytes)}</td><td></td><td></td>'
            f"<td>the rest, {peak.num_rest} lines</td><td></td><td></td></tr>"
        )
    return _table(heads, rows)


def _group(group: Group) -> str:
    made_by = ", ".join(group.what) + (f" x{group.count}" if group.count > 1 else "")
    bar = (
        '<svg viewBox="0 0 100 8" aria-hidden="true"><rect class="bar" '
        f'width="{group.share * 100:.1f}" height="8"/></svg>'
    )
    return (
        f'<tr><td class="n">~{format_bytes(group.nbytes)}</td>'
        f'<td class="n">{group.share * 100:.1f} %</td><td>{bar}</td>'
        f"<td><code>{_safe(group.where)}</code></td><td><code>{_safe(group.line)}</code></td>"
        f"<td>{_safe(made_by)}</td></tr>"
    )


def _table(heads: Sequence[str], rows: Iterable[str], *, kind: str = "") -> str:
    """Render a table; a head that begins with ``>`` marks a right-aligned column of numbers."""
    head = "".join(
        f'<th scope="col" class="n">{h[1:]}</th>' if h[:1] == ">" else f'<th scope="col">{h}</th>'
        for h in heads
    )
    return (
        f'<div class="wide"><table class="{kind}"><thead><tr>{head}</tr></thead>'
        f"<tbody>{''.join(rows)}</tbody></table></div>"
    )
