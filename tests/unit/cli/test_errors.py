"""Errors of any verb: exit codes, the line of the user's script, tracebacks."""

from pathlib import Path
from typing import Any

import pytest

from steelyard.cli import main
from steelyard.errors import (
    CaptureRefused,
    Infeasible,
    NonFinite,
)
from tests.unit.cli import fake_api
from tests.unit.cli.commands import failure_of, raising


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (CaptureRefused("a branch on data", expected="none", remedy="use torch.where"), 2),
        (Infeasible("nothing fits 3 MiB", expected="171 MiB", remedy="--memory 171MiB"), 3),
        (NonFinite("the loss is nan at step 3", expected="a number", remedy="lower lr"), 4),
    ],
)
def test_steelyard_errors_have_their_exit_code(
    api: fake_api.Fake, capsys: pytest.CaptureFixture[str], error: Exception, code: int
) -> None:
    api.outcome = raising(error)
    assert error.args[0] in failure_of(capsys, "plan", "train.py", code=code)


USERS = """
def workload():
    prepare()

def prepare():
    {0}
"""


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("1 / 0", "ZeroDivisionError: division by zero"),
        ("raise SystemExit(7)", "SystemExit: 7"),
        ("raise RuntimeError('x' * 5000 + '\\n' * 50)", "RuntimeError: xxx"),
        ("raise ValueError('\\x1b[2J\\x07')", "ValueError: \\x1b[2J\\x07"),
        ("raise KeyError", "KeyError"),
    ],
)
def test_an_error_in_the_users_script_names_their_line(
    api: fake_api.Fake, capsys: pytest.CaptureFixture[str], body: str, said: str, tmp_path: Path
) -> None:
    script = tmp_path / "train.py"
    script.write_text(USERS.format(body))
    scope: dict[str, Any] = {}
    exec(compile(script.read_text(), str(script), "exec"), scope)  # api.load_workload does the same
    api.outcome = scope["workload"]
    lines = failure_of(capsys, "plan", "train.py", code=2)
    assert "planning failed at train.py:6 in prepare" in lines
    assert said in lines
    assert "--debug" in lines


def test_debug_shows_the_traceback(api: fake_api.Fake, capsys: pytest.CaptureFixture[str]) -> None:
    api.outcome = raising(RuntimeError("deep inside"))
    assert main(["plan", "train.py", "--debug"]) == 2
    err = capsys.readouterr().err
    assert "Traceback" in err
    assert err.splitlines()[-1].startswith("next: ")
