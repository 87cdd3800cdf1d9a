"""The page: one file, no network, and no name in it that could start anything."""

import base64
import re
from dataclasses import replace
from hashlib import sha256
from html import unescape
from html.parser import HTMLParser

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from steelyard.plans.budget import Budget
from steelyard.plans.plan import Plan
from steelyard.plans.receipt import Receipt
from steelyard.report.document import tree_of
from steelyard.report.html import to_html
from steelyard.report.quantities import Quantity
from tests.support.sample import DECISIONS, MIB, PLAN, RECEIPT, hostile, timeline

VOID = {"meta"}  # the drawings close their tags with a slash


class Page(HTMLParser):
    """Collects tags and texts, and checks that every tag that opens is closed in order."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text: list[str] = []
        self.opened: list[str] = []
        self.feed(page)
        self.close()
        assert self.opened == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.opened.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.opened.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)


ALLOWED = {
    "html", "head", "meta", "title", "style", "body", "h1", "h2", "p", "div", "table", "thead",
    "tbody", "tr", "th", "td", "code", "details", "summary", "svg", "rect", "line", "polyline",
    "polygon", "circle", "text", "main", "h3",
}  # fmt: skip


def page_of(subject: Plan | Receipt) -> Page:
    return Page(to_html(tree_of(subject)))


@pytest.mark.parametrize("subject", [PLAN, RECEIPT], ids=["plan", "receipt"])
def test_the_page_loads_and_runs_nothing(subject: Plan | Receipt) -> None:
    page = page_of(subject)
    assert {tag for tag, _ in page.tags} <= ALLOWED
    names = {name for _, attributes in page.tags for name in attributes}
    assert not any(n.startswith("on") or n in ("src", "href", "style", "srcset") for n in names)
    text = to_html(tree_of(subject))
    assert "url(" not in text
    assert "@import" not in text
    assert re.findall("https?:", text) == []


def test_the_policy_allows_this_style_and_nothing_else() -> None:
    text = to_html(tree_of(PLAN))
    style = text.split("<style>")[1].split("</style>")[0]
    digest = base64.b64encode(sha256(style.encode()).digest()).decode()
    content = next(
        a["content"] for t, a in page_of(PLAN).tags if a.get("http-equiv") and t == "meta"
    )
    assert content is not None
    assert content.startswith(f"default-src 'none'; style-src 'sha256-{digest}'")
    assert "unsafe" not in content


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(
        [
            "</title></style><script>alert(1)</script>",
            "'\"><img src=x onerror=alert(1)>",
            "<!--",
            "]]>",
            "&lt;script&gt;",
            "\x00\x1b[2J\u202e",
            "javascript:alert(1)",
        ]
    )
    | st.text(max_size=60)
)
def test_names_are_escaped_in_the_page(name: str) -> None:
    page = page_of(hostile(name))
    assert {tag for tag, _ in page.tags} <= ALLOWED
    values = {v for _, attributes in page.tags for v in attributes.values() if v}
    assert not any("alert" in v for v in values)


def test_every_drawn_figure_is_also_text() -> None:
    text = unescape(" ".join(page_of(RECEIPT).text)).replace("\N{NO-BREAK SPACE}", " ")
    tree = tree_of(RECEIPT)
    for row in tree.rows:
        for cell in (row.before, row.unplanned, row.plan, row.measured):
            assert str(cell) in text
        if isinstance(row.plan, Quantity) and row.plan.value:
            assert row.plan.interval in text
    for point in tree.curve:
        assert str(point.memory) in text
        assert str(point.step) in text
    for group in tree.peak.groups:
        assert group.where in text
        assert group.line in text
    assert "+16.9 % largest miss" in text
    assert "The peak, ~296 MiB, stands in the backward pass" in text


def test_a_long_step_stays_a_small_page_and_keeps_its_peak() -> None:
    long = replace(
        PLAN,
        predicted=replace(PLAN.predicted, timeline=timeline(20_000, 296 * MIB)),
        unplanned=replace(PLAN.unplanned, timeline=timeline(20_000, 441 * MIB)),
    )
    text = to_html(tree_of(long))
    assert len(text.encode()) < 200_000
    marks = [a for t, a in Page(text).tags if t == "circle" and a.get("class") == "peak"]
    assert len(marks) == 1
    assert "peak ~296 MiB" in text
    short = Page(to_html(tree_of(PLAN)))
    same = next(a for t, a in short.tags if t == "circle" and a.get("class") == "peak")
    assert marks[0]["cy"] == same["cy"]


def test_without_timeline_or_curve_the_page_still_stands() -> None:
    bare = replace(
        PLAN,
        predicted=replace(PLAN.predicted, timeline=None),
        unplanned=replace(PLAN.unplanned, timeline=None),
        frontier=(),
    )
    page = page_of(bare)
    assert "svg" in {tag for tag, _ in page.tags}  # the bars beside the live values
    assert not any(a.get("role") == "img" for _, a in page.tags)


def test_amounts_are_labelled_where_the_heading_is_left_out() -> None:
    page = to_html(tree_of(RECEIPT))
    for column in ("before", "without trades", "plan", "interval of the plan", "measured", "miss"):
        assert page.count(f'data-of="{column}"') == 5
    assert 'data-of="miss"' not in to_html(tree_of(PLAN))


def test_a_budget_far_above_the_peak_does_not_flatten_the_curve() -> None:
    def drawn(memory: str) -> Page:
        return page_of(replace(PLAN, decisions=replace(DECISIONS, budget=Budget(memory=memory))))

    near, far = drawn("300 MiB"), drawn("24 GiB")
    assert [a for _, a in near.tags if a.get("class") == "budget"]
    assert not [a for _, a in far.tags if a.get("class") == "budget"]
    heights = [
        next(a["cy"] for t, a in page.tags if t == "circle" and a.get("class") == "peak")
        for page in (near, far)
    ]
    assert heights[0] == heights[1]
