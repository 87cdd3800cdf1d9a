"""The page of figures says what the recorded results say."""

import json
from pathlib import Path

from tests.system.docs import benchmarks

ABOUT = {"command": "scripts/bench x", "date": "2026-01-01", "hardware": "2 cores", "commit": "abc"}


def test_the_page_shows_every_recorded_figure() -> None:
    now = benchmarks.PAGE.read_text(encoding="utf-8")
    fresh = benchmarks.page(now, benchmarks.section(benchmarks.RESULTS))
    assert now == fresh, "write it anew: python -m tests.system.docs.benchmarks"


def test_a_missed_target_is_marked_on_the_page(tmp_path: Path) -> None:
    good = {"name": "a", "value": 0.5, "interval": [0.4, 0.61], "target": 1.0, "ok": True}
    bad = {"name": "b", "value": 3, "interval": None, "target": 0, "ok": False}
    lines = [ABOUT, {**good, "ok": False, "figures": [good, bad]}]
    (tmp_path / "x.json").write_text("\n".join(map(json.dumps, lines)))
    shown = benchmarks.section(tmp_path)
    assert "2026-01-01, 2 cores, abc" in shown
    assert "| a | 0.5 | 0.4 to 0.61 | 1 | met |" in shown
    assert "| b | 3 |  | 0 | **missed** |" in shown


def test_every_benchmark_documents_its_purpose() -> None:
    named = benchmarks.PAGE.read_text(encoding="utf-8")
    for name, said in benchmarks.first_lines().items():
        assert said, f"benchmarks/{name}.py has no docstring"
        assert f"`{name}`" in named, f"docs/benchmarks.md does not name {name}"
