"""Ctrl-C and SIGTERM: exit codes 130 and 143, and one line on stderr."""

import contextlib
import json
import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from steelyard.cli import main
from steelyard.plans.stop_request import StopRequest
from tests.support.sample import MEASURED
from tests.unit.cli import fake_api
from tests.unit.cli.commands import steelyard_process


@pytest.mark.parametrize(
    "verb",
    ["plan train.py", "run train.py --plan train.plan.toml", "frontier train.py", "doctor", "demo"],
)
def test_ctrl_c_is_one_line_and_130(verb: str, planned: Path) -> None:
    process = steelyard_process(
        *verb.split(), fake="wait", cwd=planned.parent, start_new_session=True
    )
    assert process.stderr is not None
    assert "waiting\n" in iter(process.stderr.readline, "")
    os.killpg(process.pid, signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert err.startswith("steelyard: interrupted")
    assert err.count("\n") == 1
    with pytest.raises(ProcessLookupError):
        os.killpg(process.pid, 0)


def test_ctrl_c_swallowed_by_an_import_still_stops(
    api: fake_api.Fake, capsys: pytest.CaptureFixture[str]
) -> None:
    def swallow() -> None:
        with contextlib.suppress(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)

    api.outcome = swallow
    assert main(["plan", "train.py"]) == 130
    assert capsys.readouterr().err.splitlines()[-1] == "steelyard: interrupted"
    assert not Path("train.plan.toml").exists()

    def swallow_and_fail() -> None:
        swallow()
        raise AttributeError("partially initialized module")

    api.outcome = swallow_and_fail
    assert main(["plan", "train.py", "--json"]) == 130
    captured = capsys.readouterr()
    assert captured.err.endswith("steelyard: interrupted\n")
    assert json.loads(captured.out)["kind"] == "Interrupted"
    api.outcome = None
    assert main(["plan", "train.py"]) == 0


@pytest.mark.parametrize(
    ("known", "presses", "code"), [(True, 1, 0), (True, 2, 130), (False, 1, 130)]
)
def test_ctrl_c_in_a_search_keeps_the_best_plan_if_there_is_one(
    api: fake_api.Fake, monkeypatch: pytest.MonkeyPatch, known: bool, presses: int, code: int
) -> None:
    answer = api.plan_workload

    def plan_workload(workload: object, *, stop: StopRequest, **asked: Any) -> Any:
        stop.is_possible = known
        for _ in range(presses):
            signal.raise_signal(signal.SIGINT)
        assert stop.is_granted
        return answer(workload, **asked)

    monkeypatch.setattr(api, "plan_workload", plan_workload)
    assert main(["plan", "train.py"]) == code
    assert Path("train.plan.toml").exists() == (code == 0)
    # After the search, Ctrl-C interrupts again.
    api.outcome = lambda: signal.raise_signal(signal.SIGINT)
    assert main(["plan", "train.py"]) == 130


def test_ctrl_c_in_a_run_reports_the_last_step(planned: Path) -> None:
    process = steelyard_process(
        *["run", "train.py", "--steps", "100000", "--seed", "50"], fake="answer", cwd=planned.parent
    )
    assert process.stderr is not None
    assert "note: the first step was taken\n" in iter(process.stderr.readline, "")
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert err.splitlines()[-1].startswith("steelyard: interrupted after step ")


@pytest.mark.parametrize("saved", [True, False])
def test_a_run_that_sigterm_stopped_shows_its_receipt_and_exits_with_143(
    api: fake_api.Fake, planned: Path, saved: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("c/step-000003" if saved else "c").mkdir(parents=True)
    api.measured = replace(MEASURED, steps=3)
    assert main(["run", "train.py", "--steps", "4", "--checkpoint", "c", "--quiet"]) == 143
    captured = capsys.readouterr()
    assert "<- largest miss" in captured.out
    again = "; continue with --resume c" if saved else ""
    assert captured.err == f"steelyard: interrupted after step 4 of 4{again}\n"
