"""Writes the figures of docs/benchmarks.md from the JSON lines in benchmarks/results/.

    python -m tests.system.docs.benchmarks

A file there has a line about the run (date, command, hardware, commit), then the line that the
benchmark ended in (name, value, interval, target, ok, and where it has several, its figures). Not
for running any.
"""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[3]
PAGE = ROOT / "docs" / "benchmarks.md"
RESULTS = ROOT / "benchmarks" / "results"
_BEGIN, _END = "<!-- figures -->", "<!-- end of figures -->"


def section(results: Path) -> str:
    runs = [table(file) for file in sorted(results.glob("*.json"))]
    if not runs:
        return "No run is recorded yet.\n"
    return "\n".join(runs)


def table(file: Path) -> str:
    about, last = (json.loads(line) for line in file.read_text().splitlines() if line.strip())
    figures = last.get("figures", [last])
    said = ", ".join(str(about[key]) for key in ("date", "hardware", "commit") if key in about)
    lines = [
        f"### {file.stem}\n",
        f"`{about['command']}`: {said}\n",
        "| figure | measured | interval | target | |",
        "|---|---|---|---|---|",
    ]
    for figure in figures:
        interval = figure.get("interval")
        shown = f"{_number(interval[0])} to {_number(interval[1])}" if interval else ""
        is_asked = figure["target"] is not None
        target = _number(figure["target"]) if is_asked else ""
        verdict = ("met" if figure["ok"] else "**missed**") if is_asked else "told"
        value = _number(figure["value"])
        lines.append(f"| {figure['name']} | {value} | {shown} | {target} | {verdict} |")
    return "\n".join(lines) + "\n"


def _number(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def first_lines() -> dict[str, str]:
    """What each benchmark says of itself, in the first sentence of its docstring."""
    found = {}
    for file in sorted((ROOT / "benchmarks").glob("[!_]*.py")):
        said = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or ""
        found[file.stem] = " ".join(said.split("\n\n")[0].split())
    return found


def page(now: str, figures: str) -> str:
    head, rest = now.split(_BEGIN)
    return f"{head}{_BEGIN}\n\n{figures}\n{_END}{rest.split(_END)[1]}"


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8"), section(RESULTS)), encoding="utf-8")
