"""The interactive page: one offline file, its data are its text, and names stay names."""

import base64
import json
import re
import subprocess
import sys
from dataclasses import replace
from hashlib import sha256
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from steelyard.plans.lifetimes import MOST_LIFETIMES, StepDetail
from steelyard.plans.plan import Plan
from steelyard.plans.receipt import Receipt
from steelyard.report import page as page_folder
from steelyard.report.document import tree_of
from steelyard.report.html import to_html, to_page
from steelyard.report.page.chart_data import chart_data, to_script
from steelyard.report.page.schedule import MOST_BLOCKS, MOST_RANKS, blocks_of, times_of
from steelyard.units import format_bytes
from tests.support.sample import DETAIL, MIB, PLAN, RECEIPT, history, hostile, schedule, timeline

FOLDER = Path(page_folder.__file__).parent
LIBRARY = (FOLDER / "echarts.min.js").read_text("utf-8")


class Parsed(HTMLParser):
    """The tags of a page, its text, and the text of its scripts."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.scripts: list[str] = []
        self.in_script = False
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self.in_script = tag == "script"

    def handle_data(self, data: str) -> None:
        (self.scripts if self.in_script else self.texts).append(data)

    def handle_endtag(self, tag: str) -> None:
        self.in_script = False

    @property
    def text(self) -> str:
        return " ".join(self.texts).replace("\N{NO-BREAK SPACE}", " ")

    @property
    def data(self) -> Any:
        return json.loads(self.scripts[0])


def parsed(subject: Plan | Receipt, detail: StepDetail | None = DETAIL) -> Parsed:
    return Parsed(to_page(tree_of(subject), detail))


@pytest.mark.parametrize("subject", [PLAN, RECEIPT], ids=["plan", "receipt"])
def test_the_page_requests_nothing_and_runs_only_our_scripts(subject: Plan | Receipt) -> None:
    page = parsed(subject)
    text = to_page(tree_of(subject), DETAIL)
    (policy,) = (a["content"] or "" for t, a in page.tags if a.get("http-equiv"))
    assert policy.startswith("default-src 'none'; ")
    assert "unsafe" not in policy
    assert len(page.scripts) == 3
    for script in page.scripts[1:]:
        digest = base64.b64encode(sha256(script.encode()).digest()).decode()
        assert f"'sha256-{digest}'" in policy
    assert policy.count("sha256-") == 3
    names = {name for _, attributes in page.tags for name in attributes}
    assert not {n for n in names if n.startswith("on")} | names & {"src", "srcset", "style"}
    links = {a["href"] or "" for _, a in page.tags if "href" in a}
    assert links
    assert all(link.startswith("#") for link in links)
    # The namespaces of SVG and XML are names, not addresses that anything is loaded from.
    assert all("www.w3.org" in url for url in re.findall(r"https?://[^\"'`\s)]+", text))


def test_the_page_is_small() -> None:
    spans = schedule(ranks=64, count=2000)
    large = StepDetail(
        planned=history(3000, 300 * MIB), unplanned=history(3000, 400 * MIB), spans=spans
    )
    plan = replace(
        PLAN,
        predicted=replace(PLAN.predicted, timeline=timeline(3000, 296 * MIB)),
        refused=PLAN.refused * 1000,
    )
    assert len(to_page(tree_of(PLAN), DETAIL).encode()) < 900_000
    assert len(to_page(tree_of(plan), large).encode()) < 1_500_000


def test_notebooks_get_the_page_without_the_library() -> None:
    text = to_html(tree_of(RECEIPT))
    assert "<script" not in text
    assert len(text.encode()) < 100_000


def test_the_library_is_the_one_that_the_readme_names() -> None:
    readme = (FOLDER / "README.md").read_text("utf-8")
    assert sha256(LIBRARY.encode()).hexdigest() in readme
    (version,) = re.findall(r"Apache ECharts ([0-9.]+) \(Apache-2.0\)", LIBRARY[:200])
    assert f"npm install echarts@{version} " in readme
    licences = (FOLDER / "echarts.LICENSE.txt").read_text("utf-8")
    for name in (f"Apache ECharts {version}", "ZRender", "d3", "tslib"):
        assert f"==== {name}" in licences
    assert "</script" not in LIBRARY
    assert "<!--" not in LIBRARY


def test_each_figure_of_a_chart_is_in_the_text() -> None:
    page = parsed(RECEIPT)
    data, text = page.data, page.text
    for row in data["amounts"]:
        assert row["label"] in text
        measured, predicted = re.findall(r"measured (.+?), predicted (.+?), ", row["said"])[0]
        for figure in (measured, predicted):
            assert figure.replace("\N{NO-BREAK SPACE}", " ") in text
    for peak in data["peaks"]:
        for tile in (tile for part in peak["tiles"] for tile in part["children"]):
            assert format_bytes(tile["value"]) in text
            assert tile["name"] in text or tile["name"].endswith("smaller")
    for point in data["curve"]:
        assert format_bytes(point["nbytes"]) in text
    for row in data["schedule"]:
        rank, stream = re.fullmatch(r"rank (\d+), (.+)", row["row"]).groups()  # type: ignore[union-attr]
        assert f"rank {rank} " in text
        assert stream in text
    peak = max(data["memory"][0]["nbytes"])
    assert format_bytes(peak) in text


def test_the_data_are_those_of_the_document() -> None:
    tree = tree_of(RECEIPT)
    data = json.loads(to_script(chart_data(tree, DETAIL)))
    values = sum(t["value"] for part in data["peaks"][0]["tiles"] for t in part["children"])
    assert values == sum(group.nbytes for group in tree.peak.groups) + tree.peak.rest_bytes
    plan, bare = data["memory"]
    assert plan["nbytes"] == list(DETAIL.planned.timeline.nbytes)  # type: ignore[union-attr]
    for one in (plan, bare):
        for instant, nbytes in enumerate(one["nbytes"]):
            alive = [a[2] for a in one["alive"] if a[0] <= instant <= a[1]]
            assert sum(alive) == nbytes
    assert [p["here"] for p in data["curve"]].count(True) == 1
    assert data["budget"] == 300 * MIB
    memory = next(row for row in data["amounts"] if row["label"].startswith("memory"))
    assert memory["measured"] == pytest.approx(297 / 296)
    assert memory["low"] < 1 < memory["high"]


def test_a_plan_that_was_not_run_has_no_chart_of_misses() -> None:
    page = parsed(PLAN)
    assert page.data["amounts"] == []
    assert "amounts-chart" not in {a.get("id") for _, a in page.tags}


def test_a_page_from_a_plan_file_says_what_it_lacks_and_how_to_get_it() -> None:
    page = parsed(PLAN, None)
    assert page.data["memory"][0]["alive"] is None
    assert page.data["memory"][0]["nbytes"]
    assert page.data["schedule"] == []
    assert "The tensors alive at each instant are computed from the script" in page.text
    assert "The schedule is computed from the script" in page.text
    assert "--check train.plan.toml --html page.html" in page.text
    assert "computed from the script" not in parsed(PLAN).text


@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from(
        [
            "</script><script>alert(1)</script>",
            "'\"><img src=x onerror=alert(1)>",
            "<!--<script>",
            "\u2028\u2029\x00\x1b[2J\u202e",
            "{a|b} {{ x }} {% raw %}",
            "m" * 5000,
        ]
    )
    | st.text(max_size=40)
)
def test_hostile_names_stay_text(name: str) -> None:
    spans = tuple(replace(span, name=name, where=name) for span in DETAIL.spans)
    planned = replace(
        history(20, 296 * MIB),
        lifetimes=tuple(
            replace(
                one, last_use=name, last_path=name,
                tensor=replace(one.tensor, what=name, path=name, line=name),
            )
            for one in history(20, 296 * MIB).lifetimes
        ),
    )  # fmt: skip
    page = parsed(hostile(name), StepDetail(planned=planned, spans=spans))
    plain = parsed(PLAN)
    assert {tag for tag, _ in page.tags} <= {tag for tag, _ in plain.tags}
    assert [tag for tag, _ in page.tags].count("script") == 3
    assert not set("<>&") & set(page.scripts[0])
    assert page.scripts[1:] == plain.scripts[1:]
    assert max(map(len, page.data["names"])) <= 300


def test_blocks_are_few_and_keep_begin_and_end() -> None:
    spans = schedule(ranks=20, count=3000)
    rows = blocks_of(spans)
    assert {row.rank for row in rows} == set(range(MOST_RANKS))
    for row in rows:
        own = [s for s in spans if (s.rank, s.stream) == (row.rank, row.stream)]
        assert len(row.blocks) <= MOST_BLOCKS
        assert row.blocks[0].begin_seconds == own[0].begin_seconds
        assert row.blocks[-1].end_seconds == own[-1].end_seconds
        assert sum(block.num_spans for block in row.blocks) == len(own)
    total = sum(time.seconds for time in times_of(spans))
    assert total == pytest.approx(sum(span.seconds for span in spans))


def test_neighbours_of_one_module_are_joined_before_the_row_is_cut() -> None:
    spans = tuple(
        replace(span, where=f"blocks.{i // 100}.mlp") for i, span in enumerate(schedule(1, 1000))
    )
    device, waiting = blocks_of(spans)
    # The wait in the middle belongs to another row.
    assert [block.where for block in device.blocks] == [f"blocks.{i}.mlp" for i in range(10)]
    assert [block.what for block in waiting.blocks] == ["waiting for all_reduce"]


def test_many_tensors_are_cut_and_the_page_says_so() -> None:
    planned = history(2 * MOST_LIFETIMES + 500, 296 * MIB)
    data = chart_data(tree_of(PLAN), StepDetail(planned=planned))
    assert len(data["memory"][0]["alive"]) <= MOST_LIFETIMES
    assert data["memory"][0]["left_out"] > 0


def test_starting_does_not_load_the_page() -> None:
    code = (
        "import sys, steelyard, steelyard.cli.commands\n"
        "print([m for m in sys.modules if m.startswith(('steelyard.report.html', 'jinja2',"
        " 'steelyard.report.page'))])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
