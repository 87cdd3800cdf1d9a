"""The demonstration succeeds where it should, and reports where it fails."""

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from steelyard.api.demo import Scene, demo
from steelyard.api.demo import scenario as story
from steelyard.api.demo import worker as child
from steelyard.api.demo.gpt import Size, workload
from steelyard.errors import BadInput, RunFailed
from steelyard.planner import calibration
from steelyard.plans.plan import Plan
from steelyard.predict.step import PEAK_SHARE
from tests.support.sample import MEASURED, PLAN
from tests.support.short_search import looking_less_far

ROOT = Path(__file__).resolve().parents[3]
_MIB = 1 << 20
# Eager must need more than the limit. The limit includes the memory of Steelyard's process, which
# plain PyTorch does not have. The step therefore has large values and little arithmetic.
SMALL = Scene(
    size=Size(width=128, blocks=4, heads=4, words=512, length=128, samples=64),
    budget_bytes=220 * _MIB,
    steps=2,
)


class Planning(story._Stage):
    """Plans in this process with a shorter search; only training must be in a separate process."""

    def run(self, role: child.Role, **asked: Any) -> story._ProcessOutput:
        if role != "plan":
            return super().run(role, **asked)
        task = child.Task(
            role=role, plan=str(self._file), size=SMALL.size, budget_bytes=SMALL.budget_bytes,
            steps=SMALL.steps,
        )  # fmt: skip
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            # Enough for one calibration: otherwise each process would calibrate again.
            with (
                mock.patch.dict(os.environ, self._environment),
                mock.patch.object(calibration, "_CALIBRATION_SECONDS", 4.0),
                looking_less_far(),
            ):
                child._ROLES[role](task, workload(task.size))
        finally:
            torch.set_num_threads(threads)
        return story._ProcessOutput(lines=(), complaint="")


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="needs RLIMIT_DATA")
def test_plain_pytorch_dies_and_the_plan_gives_its_losses_under_the_same_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(story, "_Stage", Planning)
    lines: list[str] = []
    ok, receipt = demo(lines.append, scene=SMALL)
    said = "\n".join(lines)
    assert ok, said
    assert "failed in step 1 of 2:" in said
    assert said.count("equal to the bit") == SMALL.steps
    assert receipt.measured.memory_bytes is not None
    assert receipt.measured.memory_bytes <= SMALL.budget_bytes
    assert receipt.plan.before.peak.nbytes > 2 * SMALL.budget_bytes
    assert receipt.memory_miss is not None
    assert abs(receipt.memory_miss) <= PEAK_SHARE
    assert max(map(len, lines)) <= 80


# --- values from processes that are not started ---------------------------------------------------


class Stage:
    """Gives the answers of the processes."""

    def __init__(self, **told: Any) -> None:
        self._told = told

    def plan(self) -> Plan:
        return PLAN

    def run(self, role: str, **asked: Any) -> story._ProcessOutput:
        name = "free" if asked.get("meter") else role
        return story._ProcessOutput(lines=self._told[name][0], complaint=self._told[name][1])


def told(*, plain: tuple[list[float], str], ours: list[float], memory_bytes: int) -> Stage:
    measured: Mapping[str, Any] = {
        "steps": len(ours), "memory_bytes": memory_bytes, "rss_bytes": 1, "notes": [], "ranks": [],
        "communication_seconds": 0.0, "computation_seconds": 1.0, "step_seconds": 1.0,
        "first_loss": ours[0], "last_loss": ours[-1],
    }  # fmt: skip
    return Stage(
        plan=((), ""),
        probe=(({"held_bytes": 300 * _MIB},), ""),
        plain=(tuple({"loss": x} for x in plain[0]), plain[1]),
        steelyard=((*({"loss": x} for x in ours), {"measured": measured}), ""),
        free=(({"peak_bytes": 500 * _MIB}, {"loss": 3.0}, {"loss": 2.0}), ""),
    )


DIED = ([3.0], "can't allocate memory")
SCENE = Scene(budget_bytes=100 * _MIB, steps=2)


def outcome(stage: Stage) -> tuple[bool, str]:
    lines: list[str] = []
    ok, receipt = story._run_parts(stage, SCENE, lines.append)  # type: ignore[arg-type]
    assert receipt.plan is PLAN
    return ok, "\n".join(lines)


def test_outcome_is_a_success_if_plain_pytorch_dies_and_the_plan_gives_its_losses() -> None:
    ok, said = outcome(told(plain=DIED, ours=[3.0, 2.0], memory_bytes=100 * _MIB))
    assert ok
    assert "failed in step 2 of 2" in said
    assert "432 MiB  the limit" in said
    assert "pages of library files" in said


def test_plain_pytorch_that_survives_is_no_argument() -> None:
    stage = told(plain=([3.0, 2.0], ""), ours=[3.0, 2.0], memory_bytes=100 * _MIB)
    ok, said = outcome(stage)
    assert not ok
    assert "shows nothing" in said


def test_a_loss_off_by_one_bit_is_no_argument() -> None:
    stage = told(plain=DIED, ours=[3.0, 2.0000000000000004], memory_bytes=100 * _MIB)
    ok, said = outcome(stage)
    assert not ok
    assert "differs by 4.4e-16" in said


def test_a_peak_beyond_the_budget_is_no_argument() -> None:
    ok, _ = outcome(told(plain=DIED, ours=[3.0, 2.0], memory_bytes=100 * _MIB + 1))
    assert not ok


def test_a_process_that_dies_of_something_else_is_an_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def fail(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess(command, 1, stdout="", stderr="KeyError: 'oops'\n")

    monkeypatch.setattr(subprocess, "run", fail)
    stage = story._Stage(SCENE, tmp_path)
    with pytest.raises(RunFailed, match="KeyError: 'oops'"):
        stage.run("plain", limit_bytes=1, may_fail=True)


def test_a_system_without_the_limit_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(BadInput, match="darwin"):
        demo(print)


def test_the_example_is_what_the_demonstration_trains() -> None:
    shown = (ROOT / "examples/gpt.py").read_text(encoding="utf-8")
    assert shown == (ROOT / "src/steelyard/api/demo/gpt.py").read_text(encoding="utf-8")


def test_the_sample_receipt_is_of_the_same_shape() -> None:
    # A child sends JSON, which must be parsed into the original values.
    from dataclasses import asdict

    assert story._measured({**asdict(MEASURED), "notes": list(MEASURED.notes)}) == MEASURED
