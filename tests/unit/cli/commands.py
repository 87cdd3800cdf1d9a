"""Helpers that run commands and read their results. Not tests."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from steelyard.cli import main
from tests.unit.cli import fake_api

ROOT = Path(__file__).resolve().parents[3]
# Child processes import this checkout, whatever is installed.
PYTHONPATH = os.pathsep.join((str(ROOT / "src"), str(ROOT)))


def write_scripts(folder: Path) -> None:
    """Write Python scripts, which the fake api never runs."""
    for name in ("train.py", "my train.py", "other.py"):
        (folder / name).write_text("def workload(): ...\n")


def arguments_of(name: str) -> dict[str, Any]:
    return next(a for n, a in fake_api.CALLS if n == name)


def failure_of(capsys: pytest.CaptureFixture[str], *arguments: str, code: int) -> str:
    """Return the message of a command that fails; with --json it must fail in the same way."""
    assert main(arguments) == code
    said = capsys.readouterr().err
    lines = said.splitlines()
    assert 0 < len(lines) <= 12, said
    assert "Traceback" not in said
    assert any(line.startswith("next: ") for line in lines[1:]), said
    assert main((*arguments, "--json")) == code
    document = json.loads(capsys.readouterr().out)
    assert document["exit_code"] == code
    assert document["next"]
    return said


def raising(error: BaseException) -> Callable[[], None]:
    def outcome() -> None:
        raise error

    return outcome


def steelyard_process(*arguments: str, fake: str = "", **kwargs: Any) -> "subprocess.Popen[str]":
    how = ["-m", "tests.unit.cli.fake_api", fake] if fake else ["-m", "steelyard"]
    return subprocess.Popen(
        [sys.executable, *how, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        env={**os.environ, "PYTHONPATH": PYTHONPATH, **kwargs.pop("env", {})},
        **kwargs,
    )
