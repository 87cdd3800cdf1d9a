"""Renders the document tree as one self-contained HTML page, without network or fonts.

``to_html`` renders it without scripts, for notebooks; ``to_page`` with interactive charts. Every
figure that is drawn is also given as text. Not for the drawings: see svg.py and page/.
"""

import base64
from dataclasses import dataclass
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined, Template
from markupsafe import Markup

from steelyard.ir.rule import of_kind
from steelyard.ir.rule_kinds import MicroBatches
from steelyard.plans.lifetimes import StepDetail
from steelyard.report import svg
from steelyard.report.amounts_table import AmountRow
from steelyard.report.document import ReportDocument, describe_rule, refused_label
from steelyard.report.page import chart_table
from steelyard.report.page.chart_data import chart_data, to_script
from steelyard.report.page.schedule import ModuleTime
from steelyard.report.perfetto import RankRow
from steelyard.report.quantities import Quantity
from steelyard.report.rank_memory import lines_of, shown_of
from steelyard.report.styled_text import unbroken
from steelyard.safe_text import printable
from steelyard.units import format_bytes, format_seconds, format_share

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
h3 { font-size: 1rem; margin: 1.2rem 0 .3rem; }
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
_MOST_REFUSED, _MOST_REFUSED_IN_PAGE = 200, 2000


def to_html(tree: ReportDocument) -> str:
    """Render the page without scripts; the template is page.html.jinja next to this file."""
    return _rendered(tree, None)


def to_page(tree: ReportDocument, detail: StepDetail | None = None) -> str:
    """Render the page with interactive charts.

    A plan file has no ``detail``: without it, two charts are left out, and a sentence says how to
    get them.
    """
    return _rendered(tree, _charts_of(tree, detail or StepDetail()))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Script:
    text: Markup
    digest: str


@dataclass(frozen=True, slots=True, kw_only=True)
class _Charts:
    """The scripts and data of the charts, and the tables that repeat the data."""

    scripts: tuple[_Script, ...]
    data: Markup
    has_amounts: bool
    has_lifetimes: bool
    no_lifetimes: str
    no_schedule: str
    instants: tuple[chart_table.Instant, ...]
    lifetimes: list[tuple[str, tuple[chart_table.LifetimeRow, ...]]]
    ranks: list[RankRow]
    more_ranks: int
    times: tuple[ModuleTime, ...]


def _charts_of(tree: ReportDocument, detail: StepDetail) -> _Charts:
    data = chart_data(tree, detail)
    ranks, more_ranks = chart_table.ranks_of(detail.spans)
    histories = [("the plan", detail.planned), ("without trades", detail.unplanned)]
    return _Charts(
        scripts=_scripts(),
        data=Markup(to_script(data)),
        has_amounts=bool(data["amounts"]),
        has_lifetimes=detail.planned is not None,
        no_lifetimes=_NO_LIFETIMES if not detail.spans else _NO_LIFETIMES_OF_RANKS,
        no_schedule="" if detail.spans else _NO_SCHEDULE,
        instants=chart_table.instants_of(tree.timeline, detail.planned),
        lifetimes=[
            (title, chart_table.lifetimes_of(history))
            for title, history in histories
            if history is not None
        ],
        ranks=ranks,
        more_ranks=more_ranks,
        times=chart_table.module_times_of(detail.spans),
    )


_AGAIN = "steelyard plan train.py --check train.plan.toml --html page.html draws it"
_NO_LIFETIMES = f"The tensors alive at each instant are computed from the script: {_AGAIN}."
_NO_LIFETIMES_OF_RANKS = "The tensors alive at each instant are not known for this plan."
_NO_SCHEDULE = f"The schedule is computed from the script: {_AGAIN}."


def _rendered(tree: ReportDocument, charts: _Charts | None) -> str:
    shown = shown_of(tree.ranks)
    drawing = svg.timeline(tree)
    style = _STYLE if charts is None else _STYLE + _asset("charts.css")
    most = _MOST_REFUSED if charts is None else _MOST_REFUSED_IN_PAGE
    values: dict[str, Any] = {
        "tree": tree,
        "charts": charts,
        "kind": "receipt" if tree.is_receipt else "plan",
        "style": Markup(style),
        "digest": _digest(style),
        "columns": _columns(tree),
        "rows": [_row(row, tree) for row in tree.rows],
        "shown_ranks": shown,
        "other_ranks": lines_of(tree.ranks)[len(shown) :] if tree.ranks else [],
        "timeline": Markup(drawing),
        "in_micro_batches": bool(of_kind(tree.rules, MicroBatches)),
        "rules": [describe_rule(rule) for rule in tree.rules] if not tree.taken else [],
        "refusals": [(one, refused_label(one)) for one in tree.refused[:most]],
        "more_refused": len(tree.refused) - most,
        "curve": Markup(svg.curve(tree.curve)) if tree.curve else "",
    }
    return _page().render(values)


@cache
def _scripts() -> tuple[_Script, ...]:
    """Return the library and our script; the library comes first."""
    texts = [_asset("echarts.min.js"), _asset("charts.js")]
    return tuple(_Script(text=Markup(text), digest=_digest(text)) for text in texts)


def _asset(name: str) -> str:
    return (Path(__file__).parent / "page" / name).read_text("utf-8")


def _digest(text: str) -> str:
    return base64.b64encode(sha256(text.encode()).digest()).decode()


@cache
def _page() -> Template:
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        finalize=_one_line,
        undefined=StrictUndefined,
        keep_trailing_newline=True,
    )
    environment.filters |= {
        "bytes": format_bytes,
        "seconds": format_seconds,
        "share": format_share,
        "numeric": lambda column: f">{column}",
    }
    return environment.get_template("page.html.jinja")


def _one_line(value: object) -> object:
    """Make each printed value a single printable line; drawings and the style are our own."""
    return value if isinstance(value, Markup) else unbroken(printable(str(value), most=2000))


def _columns(tree: ReportDocument) -> list[str]:
    columns = ["before", "without trades", "plan", "interval of the plan"]
    return columns + ([tree.measured_is, "miss"] if tree.is_receipt else [])


def _row(row: AmountRow, tree: ReportDocument) -> tuple[str, bool, list[tuple[str, object]]]:
    """Return the label, True if the miss is outside, and each cell with the name of its column.
    Narrow screens hide the header, and show these names instead.
    """
    interval = row.plan.interval if isinstance(row.plan, Quantity) and row.plan.value else ""
    miss = "" if row.miss is None else format_share(row.miss)
    mark = " largest miss" if row.is_largest else ""
    cells = [row.before, row.unplanned, row.plan, interval, row.measured, f"{miss}{mark}"]
    return row.label, row.is_outside, [*zip(_columns(tree), cells)]
