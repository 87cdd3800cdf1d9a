"""docs/extend/a-new-trade.md, followed step by step on a copy of the package."""

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from steelyard.ir.rule import Stage
from steelyard.trades import BY_NAME
from tests.replay.cases import RECORDS
from tests.system.docs import pages

PAGE = pages.ROOT / "docs" / "extend" / "a-new-trade.md"


def _block(begin: str) -> str:
    """The text of the page's one block that begins like this."""
    found = [b.text for b in pages.blocks(PAGE.read_text("utf-8")) if b.text.startswith(begin)]
    assert len(found) == 1, begin
    return found[0]


def _copied_package(folder: Path) -> Path:
    source = folder / "src"
    shutil.copytree(
        pages.ROOT / "src", source, ignore=shutil.ignore_patterns("__pycache__", "*.so")
    )
    return source


def _copy_with_the_trade(folder: Path) -> Path:
    """A copy of the package with the page's file, and its line in the list of trades."""
    source = _copied_package(folder)
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
    shown = _block("taken (1 of 9 offers)").splitlines()[1]
    assert shown in run.stdout.splitlines(), run.stdout
    assert re.search(r"fits: 22\.\d MiB of 25\.0 MiB", run.stdout)
    plan = tomllib.loads((tmp_path / "train.plan.toml").read_text())
    assert plan["postpone"] == tomllib.loads(_block("[[postpone]]"))["postpone"]


def test_the_trade_of_the_page_passes_the_tests_of_conformance(tmp_path: Path) -> None:
    """Models on which it is offered, and on which it is not."""
    (command,) = re.findall(r"^ +pytest (.*) -k postpone$", PAGE.read_text("utf-8"), re.MULTILINE)
    models = "declares or improves_what_it_buys or mlp or edge_buffer_written or early_table"
    options = ["-n", "0", "-q", "-p", "no:cacheprovider", "-k", f"postpone and ({models})"]
    run = subprocess.run(
        [sys.executable, "-m", "pytest", command, *options], cwd=pages.ROOT,
        capture_output=True, text=True, timeout=300, check=False,
        env={**os.environ, "PYTHONPATH": str(_copy_with_the_trade(tmp_path))},
    )  # fmt: skip
    assert run.returncode == 0, run.stdout
    (passed,) = re.findall(r"(\d+) passed", run.stdout)
    # Two tests of all models, and three of each; those of prices are skipped without an offer.
    assert int(passed) >= 2 + 2 * 3


_PLANS_A_RECORDED_CASE = """
import sys
from pathlib import Path
from tests.replay.cases import cases

(case,) = (case for case in cases() if case.name == sys.argv[1])
for recorded in case.make(Path(sys.argv[2])):
    for name, text in recorded.files().items():
        Path(sys.argv[2], name).write_text(text)
"""


@pytest.mark.parametrize(
    ("name", "stage", "case"),
    [
        ("sparse_gradients", Stage.LAYOUT, "gpt-2-ranks"),
        ("chunk", Stage.VARIANT, "gpt-2-ranks"),
        ("quantize_activations", Stage.VALUE, "gpt-2-ranks"),
        ("shared_memory_transfer", Stage.ORDER, "gpt-2-ranks"),
    ],
)
def test_a_trade_of_each_stage_goes_with_its_file_and_its_line(
    name: str, stage: Stage, case: str, tmp_path: Path
) -> None:
    """Nothing else in the package needs the trade, so nothing else had to change to add it."""
    kind = type(BY_NAME[name])
    assert BY_NAME[name].rule.stage is stage
    source = _copied_package(tmp_path)
    trades = source / "steelyard" / "trades"
    (trades / f"{name}.py").unlink()
    listed = (trades / "__init__.py").read_text()
    for line in (f"from steelyard.trades.{name} import {kind.__name__}\n", f"{kind.__name__}(),"):
        assert listed.count(line) == 1
        listed = listed.replace(line, "")
    (trades / "__init__.py").write_text(listed)
    run = subprocess.run(
        [sys.executable, "-c", _PLANS_A_RECORDED_CASE, case, str(tmp_path)], cwd=pages.ROOT,
        capture_output=True, text=True, timeout=600, check=False,
        env={**os.environ, "PYTHONPATH": str(source)},
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    plans = sorted(tmp_path.glob("*.plan.toml"))
    assert plans
    for plan in plans:
        # The recorded plans do not use the trade, so they are the same with and without it.
        assert plan.read_text("utf-8") == (RECORDS / plan.name).read_text("utf-8")
        assert f'"{name}"' not in plan.with_name(f"{plan.stem}.json").read_text("utf-8")
