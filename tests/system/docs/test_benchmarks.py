"""The pages of figures agree with the recorded results."""

import json
import re
from pathlib import Path

import pytest

from tests.system.docs import benchmarks

ABOUT = {"command": "scripts/bench x", "date": "2026-01-01", "hardware": "2 cores", "commit": "abc"}


@pytest.mark.parametrize("page", benchmarks.pages(), ids=lambda page: page.stem)
def test_a_page_says_what_the_results_say(page: Path) -> None:
    now = page.read_text(encoding="utf-8")
    assert now == benchmarks.written(now), "write it anew: python -m tests.system.docs.benchmarks"


def test_every_result_is_shown_in_full_on_one_page() -> None:
    details = "".join(page.read_text(encoding="utf-8") for page in benchmarks.pages())
    shown = re.findall(r"<!-- figures (\w+) -->", details)
    assert sorted(shown) == sorted(file.stem for file in benchmarks.RESULTS.glob("*.json"))


def test_every_question_is_answered_on_the_page() -> None:
    now = benchmarks.PAGE.read_text(encoding="utf-8")
    assert re.findall(r"<!-- answers (\w+) -->", now) == ["all", *benchmarks.ANSWERS]
    assert re.findall(r"## (.*\?)", now) == [
        question for question, _ in benchmarks.HEADLINES.values()
    ]


@pytest.mark.parametrize(
    "answer",
    [answer for answers in benchmarks.ANSWERS.values() for answer in answers],
    ids=lambda answer: answer.says,
)
def test_an_answer_stands_on_figures_and_its_bound_is_the_recorded_one(
    answer: benchmarks.Answer,
) -> None:
    found = benchmarks.figures_of(answer)
    assert found
    for figure in found:
        # A figure whose interval includes its target counts as met.
        low, high = figure.get("interval") or (figure["value"], figure["value"])
        target = figure["target"]
        if target is not None:
            is_met = low <= target if answer.bound == "at most" else high >= target
            assert is_met or not figure["ok"], figure["name"]


def test_a_missed_target_is_marked_on_the_page(tmp_path: Path) -> None:
    good = {"name": "a", "value": 0.5, "interval": [0.4, 0.61], "target": 1.0, "ok": True}
    bad = {"name": "b", "value": 3, "interval": None, "target": 0, "ok": False}
    free = {"name": "c", "value": 7, "interval": None, "target": None, "ok": True}
    lines = [ABOUT, {**good, "ok": False, "figures": [good, bad, free]}]
    (tmp_path / "x.json").write_text("\n".join(map(json.dumps, lines)))
    shown = benchmarks.written("<!-- figures x -->old<!-- end -->", tmp_path)
    assert "`scripts/bench x`: 2026-01-01, 2 cores, abc" in shown
    assert "| a | 0.5 | 0.4 to 0.61 | 1 | met |" in shown
    assert "| b | 3 |  | 0 | **missed** |" in shown
    assert "| c | 7 |  |  | no target |" in shown
    assert "old" not in shown


def test_every_benchmark_documents_its_purpose() -> None:
    named = "".join(page.read_text(encoding="utf-8") for page in benchmarks.pages())
    for name, said in benchmarks.first_lines().items():
        assert said, f"benchmarks/{name}.py has no docstring"
        assert f"## {name}\n" in named, f"no page of docs/benchmarks/ has a section {name}"
