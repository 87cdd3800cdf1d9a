"""`steelyard run`: the receipt, checkpoints, notes and exit codes of a run."""

import errno
import os
import re
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from steelyard.cli import main
from steelyard.errors import (
    Mismatch,
    RankFailed,
    then,
)
from steelyard.plan_files.prediction_file import read_plan, write_plan
from steelyard.plans.plan_on_file import Asked
from tests.support.sample import MEASURED, PLAN
from tests.unit.cli import fake_api
from tests.unit.cli.commands import arguments_of, failure_of


def test_run_prints_the_receipt_and_stores_it_with_the_plan(
    api: fake_api.Fake, planned: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = "run train.py --steps 200 --checkpoint c --checkpoint-every 50 --seed 0"
    assert main(arguments.split()) == 0
    captured = capsys.readouterr()
    assert "1.45 s  +16.9 %  <- largest miss" in captured.out
    assert arguments_of("load_planned")["path"] == Path("train.plan.toml")
    assert arguments_of("load_planned")["cluster"] is None
    found = arguments_of("run_workload")
    assert (found["checkpoint"], found["checkpoint_every"]) == (Path("c"), 50)
    assert (found["steps"], found["seed"], found["resume"]) == (200, 0, False)
    assert read_plan(planned).measured == MEASURED
    main(["explain", str(planned)])
    assert "1.45 s" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "is_said"), [("", True), ("--checkpoint c", False), ("--quiet", False)]
)
def test_run_without_a_checkpoint_notes_that_weights_are_not_saved(
    api: fake_api.Fake, planned: Path, flags: str, is_said: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", "train.py", "--steps", "2", *flags.split()]) == 0
    assert ("weights were not saved: --checkpoint DIR" in capsys.readouterr().out) is is_said


def test_stderr_of_a_log_has_notes_only(
    api: fake_api.Fake, planned: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main(["run", "train.py", "--steps", "200"])
    lines = capsys.readouterr().err.splitlines()
    assert lines[-1] == "note: the first step was taken"
    assert all(re.fullmatch(r" *\d+ s  \w.*", line) for line in lines[:-1]), lines
    main(["run", "train.py", "--steps", "200", "--quiet"])
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("arguments", "start", "folder"),
    [
        ("", False, None),
        ("--checkpoint c", False, "c"),
        ("--checkpoint c --resume", True, "c"),
        ("--resume c", True, "c"),
        ("--checkpoint c --resume c", True, "c"),
        ("--resume c/step-000003", "c/step-000003", "c"),
        ("--checkpoint d --resume c/step-000003", "c/step-000003", "d"),
    ],
)
def test_resume_options_select_the_checkpoint(
    api: fake_api.Fake, planned: Path, arguments: str, start: str | bool, folder: str | None
) -> None:
    main(f"run train.py --steps 2 {arguments}".split())
    assert arguments_of("run_workload")["resume"] == (
        Path(start) if isinstance(start, str) else start
    )
    assert arguments_of("run_workload")["checkpoint"] == (Path(folder) if folder else None)


def test_run_keeps_the_stored_reasons_of_the_search(
    api: fake_api.Fake, planned: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main(["run", "train.py", "--steps", "2"])
    assert "taken (2 of 4 offers)" in capsys.readouterr().out
    found = read_plan(planned).plan
    assert found is not None
    assert (found.taken, found.frontier) == (PLAN.taken, PLAN.frontier)


def test_edited_decisions_are_listed_without_reasons(
    api: fake_api.Fake, planned: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    planned.write_text(planned.read_text().replace("micro_batches = 2", "micro_batches = 4"))
    main(["plan", "train.py", "--check", str(planned)])
    out = capsys.readouterr().out
    assert "decisions (3)\n  accumulate: micro_batches 4\n" in out
    assert "recompute: aten.gelu.default #0 in blocks.*.mlp (4)" in out


def test_a_missed_interval_fails_a_strict_run_only(api: fake_api.Fake, planned: Path) -> None:
    assert main(["run", "train.py", "--steps", "2"]) == 0
    assert main(["run", "train.py", "--steps", "2", "--strict"]) == 5
    api.measured = replace(MEASURED, step_seconds=1.24)
    assert main(["run", "train.py", "--steps", "2", "--strict"]) == 0


def test_run_finds_the_script_of_a_plan_file(
    api: fake_api.Fake, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", "other.py", "-o", "x.plan.toml"]) == 0
    fake_api.CALLS.clear()
    assert main(["run", "x.plan.toml", "--steps", "3"]) == 0
    assert arguments_of("load_workload") == {"train": "other.py"}
    assert arguments_of("load_planned")["path"] == Path("x.plan.toml")
    assert read_plan(Path("x.plan.toml")).measured == MEASURED
    # Run from another folder, the command finds the script beside its plan.
    (tmp_path / "elsewhere").mkdir()
    os.chdir(tmp_path / "elsewhere")
    fake_api.CALLS.clear()
    assert main(["run", "../x.plan.toml", "--steps", "3"]) == 0
    assert arguments_of("load_workload") == {"train": "../other.py"}


def test_run_of_a_plan_without_a_script_is_refused_in_three_lines(
    api: fake_api.Fake, planned: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def said(*more: str) -> str:
        return failure_of(capsys, "run", *more, code=2)

    # The plan was saved by a program, so it names no script.
    assert "does not name its script" in said("train.plan.toml")
    assert "steelyard run train.py --plan train.plan.toml" in said("train.plan.toml")
    assert "is a plan file, and --plan names one too" in said(
        "train.plan.toml", "--plan", "train.plan.toml"
    )
    assert "does not exist" in said("none.plan.toml")
    write_plan(planned, PLAN, asked=Asked(script="gone.py"))
    assert "gone.py does not exist" in said("train.plan.toml")
    write_plan(planned, PLAN, asked=Asked(script="train.py", cluster="dgx-h100"))
    assert "is a plan for the declared cluster" in said("train.plan.toml")
    Path("folder.plan.toml").mkdir()
    assert "is not a file" in said("folder.plan.toml")
    Path("cluster.toml").write_text("[cluster]\n")
    assert "cluster.toml" in said("cluster.toml")
    planned.with_suffix(".json").write_text("{")
    assert "is not JSON" in said("train.plan.toml")
    assert fake_api.CALLS == []


@pytest.mark.parametrize("error", [RuntimeError("deep"), Mismatch("a", expected="b", remedy="c")])
def test_a_failed_run_reports_its_last_checkpoint(
    api: fake_api.Fake, planned: Path, capsys: pytest.CaptureFixture[str], error: Exception
) -> None:
    then(error, "step 3 is saved; continue with --resume c")

    def outcome() -> None:
        if fake_api.CALLS[-1][0] == "run_workload":
            raise error

    api.outcome = outcome
    code = 2 if isinstance(error, Mismatch) else 4
    said = failure_of(capsys, "run", "train.py", "--steps", "2", code=code)
    assert " ".join(said.split()).endswith("; step 3 is saved; continue with --resume c")


def test_running_out_of_memory_suggests_a_smaller_budget(
    api: fake_api.Fake, planned: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def outcome() -> None:
        if fake_api.CALLS[-1][0] == "run_workload":
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

    api.outcome = outcome
    assert "smaller --memory" in failure_of(capsys, "run", "train.py", "--steps", "2", code=4)


def test_a_full_disk_loses_the_page_and_not_the_receipt(
    api: fake_api.Fake,
    planned: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def full(path: Path, *_: Any, **__: Any) -> Any:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("steelyard.report.html.to_page", lambda *_: "<svg")
    assert main(["run", "train.py", "--steps", "2", "--html", "/dev/full"]) == 2
    assert "<- largest miss" in capsys.readouterr().out
    assert read_plan(planned).measured == MEASURED
    assert main(["explain", str(planned), "--html", "page.html"]) == 0
    monkeypatch.setattr(os, "fsync", full)
    assert main(["explain", str(planned), "--html", "page.html"]) == 2
    assert "page.html cannot be written: No space left" in capsys.readouterr().err
    assert Path("page.html").read_text() == "<svg"
    assert sorted(p.name for p in Path().iterdir() if "page" in p.name) == ["page.html"]


def test_a_plan_for_one_rank_has_nothing_to_adapt(
    api: fake_api.Fake, planned: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "nothing to adapt" in failure_of(capsys, "run", "train.py", "--adapt", code=2)
    assert fake_api.CALLS == []


@pytest.mark.parametrize("error", [RankFailed, KeyboardInterrupt, RuntimeError])
@pytest.mark.parametrize("debug", [False, True])
def test_logs_of_ranks_are_kept_only_with_debug(
    api: fake_api.Fake,
    on_two_ranks: Path,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    debug: bool,
    error: type[BaseException],
) -> None:
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    run = ["run", "train.py", "--plan", "two.plan.toml", "--steps", "2", *["--debug"] * debug]
    assert main(run) == 0
    assert not list(folder.iterdir())

    def fail() -> None:
        if fake_api.CALLS[-1][0] == "launch":
            assert fake_api.CALLS[-1][1]["logs_stay"] == debug
            assert list(folder.glob("steelyard-*/run-1"))
            if error is RankFailed:
                raise RankFailed("rank 1 was killed", expected="none", remedy="start again")
            raise error

    api.outcome = fail
    assert main(run) in (4, 130)
    assert bool(list(folder.iterdir())) == (debug and error is not KeyboardInterrupt)
