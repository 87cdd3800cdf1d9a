"""Work in a background process: its answer, its failure, and that nothing of it stays."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import torch

from steelyard.api.background import BackgroundProcess


def ended(beside: BackgroundProcess) -> BackgroundProcess:
    until = time.monotonic() + 60
    while not beside.is_done():
        assert time.monotonic() < until
        time.sleep(0.01)
    return beside


def test_a_background_process_answers_and_changes_nothing_here() -> None:
    weights, state = torch.ones(1000), torch.random.get_rng_state()
    pid, own = os.getpid(), os.nice(0)

    def work() -> str:
        weights.add_(torch.rand(1000))
        torch.manual_seed(7)
        return f"{os.getpid() != pid} {os.nice(0) > own} {'x' * 300_000}"

    found = ended(BackgroundProcess(work))
    assert found.failure == ""
    assert found.answer is not None
    assert found.answer.startswith("True True xxx")
    assert len(found.answer) > 300_000
    assert bool((weights == 1).all())
    assert torch.equal(torch.random.get_rng_state(), state)


def test_errors_in_the_background_process_are_reported() -> None:
    found = ended(BackgroundProcess(lambda: str(1 // 0)))
    assert found.answer is None
    assert found.failure.startswith("ZeroDivisionError")


def test_a_killed_background_process_is_a_failure() -> None:
    beside = BackgroundProcess(lambda: str(time.sleep(60)))
    assert not beside.is_done()
    os.kill(beside.pid, signal.SIGKILL)
    assert "without an answer" in ended(beside).failure


def test_ending_a_background_process_kills_it() -> None:
    beside = BackgroundProcess(lambda: str(time.sleep(60)))
    pid = beside.pid
    beside.end()
    assert beside.is_done()
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return
    raise AssertionError("it still runs")


def test_the_background_process_ends_when_its_parent_is_gone() -> None:
    """A run that is killed leaves no process behind."""
    answers, own = os.pipe()
    parent = os.fork()
    if parent == 0:
        beside = BackgroundProcess(lambda: str(time.sleep(60)))
        os.write(own, str(beside.pid).encode())
        os.kill(os.getpid(), signal.SIGKILL)
    os.close(own)
    pid = int(os.read(answers, 20))
    os.close(answers)
    os.waitpid(parent, 0)
    until = time.monotonic() + 20
    while time.monotonic() < until:
        state = _state(pid)
        if state in ("", "Z"):  # the process is gone, or a zombie that nothing reaps here
            return
        time.sleep(0.05)
    raise AssertionError("it still runs")


def _state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return ""
