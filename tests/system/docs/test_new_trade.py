"""docs/extend/a-new-trade.md, followed step by step on a copy of the package."""

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

from tests.system.docs import pages

PAGE = pages.ROOT / "docs" / "extend" / "a-new-trade.md"


def _block(begin: str) -> str:
    """The text of the page's one block that begins like this."""
    found = [b.text for b in pages.blocks(PAGE.read_text("utf-8")) if b.text.startswith(begin)]
    assert len(found) == 1, begin
    return found[0]


def _copy_with_the_trade(folder: Path) -> Path:
    """A copy of the package with the page's file, and its line in the list of trades."""
    source = folder / "src"
    shutil.copytree(
        pages.ROOT / "src", source, ignore=shutil.ignore_patterns("__pycache__", "*.so")
    )
    trades = source / "steelyard" / "trades"
    code = _block("# src/steelyard/trades/postpone.py").partition("\n")[2]
    assert len(code.splitlines()) < 50
    (trades / "postpone.py").write_text(code)
    (line,) = re.findall(r".*Postpone\(\).*", _block("    Accumulate()"))
    listed = (trades / "__init__.py").read_text()
    first = next(each for each in listed.splitlines() if "Accumulate()," in each)
    listed = "from steelyard.trades.postpone import Postpone\n" + listed.replace(first, line)
    (trades / "__init__.py").write_text(listed)
    return source


def test_the_trade_of_the_page_is_planned_and_run_after_two_files_changed(tmp_path: Path) -> None:
    source = _copy_with_the_trade(tmp_path)
    (tmp_path / "train.py").write_text(_block("# train.py"))
    run = subprocess.run(
        [sys.executable, "train.py"], cwd=tmp_path, capture_output=True, text=True, timeout=300,
        check=False, env={**os.environ, "PYTHONPATH": str(source)},
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    shown = _block("taken (1 of 19 offers)").splitlines()[1]
    assert shown in run.stdout.splitlines(), run.stdout
    assert re.search(r"fits: 22\.\d MiB of 25\.0 MiB", run.stdout)
    plan = tomllib.loads((tmp_path / "train.plan.toml").read_text())
    assert plan["postpone"] == tomllib.loads(_block("[[postpone]]"))["postpone"]
