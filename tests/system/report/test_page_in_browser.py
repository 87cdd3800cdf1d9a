"""The interactive page in Chromium: each chart is drawn, offline, and names stay text."""

from __future__ import annotations

import re
import shutil
import subprocess
from html import unescape
from pathlib import Path

import pytest

from steelyard.plans.plan import Plan
from steelyard.plans.receipt import Receipt
from steelyard.report.document import tree_of
from steelyard.report.html import to_page
from tests.support.sample import DETAIL, PLAN, RECEIPT, hostile

BROWSER = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), ""
)
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not BROWSER, reason="needs Chromium: apt-get install chromium"),
]
CHARTS = ("peak-chart", "memory-chart", "curve-chart", "schedule-chart")


def opened(subject: Plan | Receipt, folder: Path) -> str:
    """Return the page as the browser has it after its scripts ran."""
    page = folder / "page.html"
    page.write_text(to_page(tree_of(subject), DETAIL), encoding="utf-8")
    options = ["--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={folder / 'data'}"]
    done = subprocess.run(
        [BROWSER, *options, "--virtual-time-budget=2000", "--dump-dom", page.as_uri()],
        capture_output=True, text=True, check=True, timeout=120,
    )  # fmt: skip
    # Without the scripts themselves, whose text contains everything that they may write.
    return re.sub(r"<script.*?</script>", "", done.stdout, flags=re.DOTALL)


def test_all_charts_are_drawn_and_the_cursor_begins_at_the_peak(tmp_path: Path) -> None:
    dom = opened(RECEIPT, tmp_path)
    for name in ("amounts-chart", *CHARTS):
        (chart,) = re.findall(rf'<div class="chart[^"]* live" id="{name}".*?</svg>', dom, re.DOTALL)
        assert chart.count("<path") > 3, name
        assert "var(--" in chart, name
    assert ">the plan: ~296&nbsp;MiB at ~3.00&nbsp;ms, backward<" in dom
    rows = dom.partition('<tbody id="alive-rows">')[2].partition("</tbody>")[0]
    assert "(parameter)" in rows
    assert "saved for the backward pass: last read by mm in blocks.*.mlp" in rows
    for controls in ("memory-cursor", "peak-choice", "price-search", "schedule-zoom"):
        assert not re.search(rf'id="{controls}"[^>]* hidden', dom), controls
    assert [*re.findall(r'aria-pressed="true">([^<]+)<', dom)] == ["the plan", "the plan"]


def test_hostile_names_are_drawn_as_text_and_run_nothing(tmp_path: Path) -> None:
    name = (
        "</script><script>document.title = 'run'</script><img src=x onerror=document.title='run'>"
    )
    dom = opened(hostile(name), tmp_path)
    assert "<img" not in dom
    assert "<title>run" not in dom
    treemap = dom.partition('id="peak-chart"')[2].partition("</svg>")[0]
    assert "</script><script>document.title" in unescape(treemap)


def test_a_plan_that_was_not_run_has_the_other_charts(tmp_path: Path) -> None:
    dom = opened(PLAN, tmp_path)
    assert 'id="amounts-chart"' not in dom
    for name in CHARTS:
        assert re.search(rf'<div class="chart[^"]* live" id="{name}"', dom)
