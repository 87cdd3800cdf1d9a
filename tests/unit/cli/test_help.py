"""`steelyard --help`, and the commands that must not import torch."""

import subprocess
import sys
from pathlib import Path

import pytest

from steelyard.cli import main


def test_help_lists_the_commands_and_exit_codes(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    out = capsys.readouterr().out
    verbs = ("plan", "run", "frontier", "simulate", "scale", "explain", "export", "doctor", "demo")
    for verb in (*verbs, "fit", "why", "--install-completion"):
        assert f" {verb} " in out
    for code in ("0 ok", "2 bad input", "3 no plan", "4 the run", "5 a measurement", "130"):
        assert code in out


@pytest.mark.parametrize(
    "arguments", [
        "--help", "plan --help", "why --help", "explain train.plan.toml", "explain none.toml",
        "bogus", "export train.plan.toml --as trainer",
    ],
)  # fmt: skip
def test_commands_that_only_read_a_plan_never_import_torch(planned: Path, arguments: str) -> None:
    probe = (
        "import sys; from steelyard.cli import main; code = main(sys.argv[1:]); "
        "print(sorted({'torch', 'numpy', 'ortools'} & set(sys.modules)), file=sys.stderr)"
    )
    found = subprocess.run(
        [sys.executable, "-c", probe, *arguments.split()],
        cwd=planned.parent,
        capture_output=True,
        text=True,
        check=True,
    )
    assert found.stderr.splitlines()[-1] == "[]"
