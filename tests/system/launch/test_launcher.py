"""Ranks that run, fail, are stopped and killed: the outcome, the named rank, and what is left
behind. They are launched from pytest's own process, except where the launcher itself is killed."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from steelyard.errors import BadInput, RankFailed, RanksDiffer
from steelyard.run.launch.launcher import LaunchResult, launch
from tests.system.launch.one import BREAKS_AT, CULPRIT, STEPS

pytestmark = [pytest.mark.dist, pytest.mark.slow]

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
# How long ranks wait here for one that does not come; other tests wait as long as it takes.
SHORT_SECONDS = 4
# Limit for what should take a second or two, on a shared machine.
PATIENCE_SECONDS = 60


@pytest.fixture(autouse=True)
def nothing_is_left(tmp_path: Path) -> Iterator[None]:
    """Check that every rank and its children are gone when the launcher is."""
    yield
    pids = [int(file.read_text()) for file in tmp_path.glob("pid-*")]
    assert pids, "no rank ever ran"
    until(lambda: not any(map(is_alive, pids)))


@pytest.fixture(autouse=True)
def ranks_import_what_we_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join((str(ROOT / "src"), str(ROOT))))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def run(
    folder: Path,
    scenario: str,
    *,
    num_ranks: int = 2,
    max_restarts: int = 0,
    on_restart: Callable[[RankFailed], None] | None = None,
) -> LaunchResult:
    seconds = SHORT_SECONDS if scenario in ("stop", "sleep") else PATIENCE_SECONDS
    return launch(
        [sys.executable, str(HERE / "one.py"), str(folder), scenario, str(seconds)],
        num_ranks=num_ranks,
        logs=folder / "logs",
        timeout_seconds=seconds,
        max_restarts=max_restarts,
        on_restart=on_restart,
    )


def named(folder: Path, scenario: str, *, max_restarts: int = 0) -> RankFailed:
    with pytest.raises(RankFailed) as failed:
        run(folder, scenario, max_restarts=max_restarts)
    assert str(failed.value).count("\n") == 2
    assert str(folder / "logs") in failed.value.remedy
    return failed.value


def is_alive(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def until(is_so: Callable[[], bool]) -> None:
    end = time.monotonic() + PATIENCE_SECONDS
    while not is_so():
        assert time.monotonic() < end
        time.sleep(0.05)


def are_up(folder: Path) -> bool:
    return all((folder / f"up-{rank}").exists() for rank in (0, 1))


def sums(folder: Path, num_ranks: int) -> None:
    for step in range(STEPS):
        total = float(sum(range(num_ranks)) + num_ranks * step)
        for rank in range(num_ranks):
            found = json.loads((folder / f"sum-{step}-{rank}").read_text())
            assert found == [total] * 4


def test_four_ranks_exchange_and_only_the_first_prints(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    handlers = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    ended = run(tmp_path, "fine", num_ranks=4)
    sums(tmp_path, 4)
    assert ended.restarts == ()
    assert ended.stopped_by == ""
    logs = ended.logs / "attempt-0"
    for rank in range(1, 4):
        assert (logs / f"rank-{rank}" / "stdout.log").read_text() == f"rank {rank} of 4\n"
    assert capfd.readouterr() == ("rank 0 of 4\n", "")
    assert handlers == [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]


def test_a_killed_rank_costs_one_restart_and_no_step(tmp_path: Path) -> None:
    told: list[RankFailed] = []
    ended = run(tmp_path, "kill once", max_restarts=3, on_restart=told.append)
    assert [(lost.rank, lost.cause) for lost in told] == [(CULPRIT, "killed")]
    assert list(ended.restarts) == told
    sums(tmp_path, 2)
    tries = [f"{int(step >= BREAKS_AT)}:{step}" for step in range(STEPS)]
    assert (tmp_path / "steps-0").read_text().split() == tries


def test_a_rank_killed_once_more_than_is_allowed_is_named(tmp_path: Path) -> None:
    failed = named(tmp_path, "kill", max_restarts=1)
    assert (failed.rank, failed.cause) == (CULPRIT, "killed")
    assert "SIGKILL" in failed.happened
    assert "memory" not in failed.happened
    assert sorted(file.name for file in tmp_path.glob("pid-*")) == [
        f"pid-{attempt}-{rank}" for attempt in range(2) for rank in range(2)
    ]


def test_an_exception_is_named_with_its_words_and_line(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    failed = named(tmp_path, "raise", max_restarts=3)
    assert (failed.rank, failed.cause) == (CULPRIT, "exception")
    assert "LookupError: no such sample" in failed.happened
    assert "one.py:" in failed.happened
    assert not list(tmp_path.glob("pid-1-*")), "the same code would raise again"
    assert "gloo" not in capfd.readouterr().err, "what rank 0 lost would bury the cause"


@pytest.mark.parametrize(("scenario", "cause"), [("stop", "stopped"), ("sleep", "hanging")])
def test_a_missing_rank_is_named(tmp_path: Path, scenario: str, cause: str) -> None:
    failed = named(tmp_path, scenario)
    assert (failed.rank, failed.cause) == (CULPRIT, cause)
    assert f"{SHORT_SECONDS} s" in failed.happened


def test_mismatched_sizes_in_a_collective_are_reported(tmp_path: Path) -> None:
    assert named(tmp_path, "amount").cause == "other exchange"


def test_ranks_with_other_plans_do_not_start(tmp_path: Path) -> None:
    with pytest.raises(RanksDiffer) as refused:
        run(tmp_path, "differ", max_restarts=3)
    assert (refused.value.rank, refused.value.item) == (CULPRIT, "plan")
    assert not list(tmp_path.glob("sum-*"))
    assert not list(tmp_path.glob("pid-1-*")), "they would differ again"


def test_an_unknown_command_is_refused(tmp_path: Path) -> None:
    (tmp_path / "pid-none").write_text("0")
    with pytest.raises(BadInput):
        launch(["no-such-program"], num_ranks=2, logs=tmp_path, timeout_seconds=1)


# --- the launcher is killed -----------------------------------------------------------------------


@pytest.fixture
def launched(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, str(HERE / "launcher.py"), str(tmp_path)],
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        until(
            lambda: (
                process.poll() is not None or all((tmp_path / f"up-{r}").exists() for r in (0, 1))
            )
        )
        assert process.poll() is None
        yield process
    finally:
        process.kill()
        process.communicate()


def listening(pids: list[int]) -> set[str]:
    """Return the addresses at which these processes listen, in the format of /proc/net."""
    sockets = set()
    for pid in pids:
        for descriptor in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                sockets.add(str(descriptor.readlink()))
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in sockets:
                found.add(fields[1].partition(":")[0])
    return found


def test_ranks_listen_on_loopback_alone_and_do_not_outlive_a_killed_launcher(
    tmp_path: Path, launched: subprocess.Popen[str]
) -> None:
    pids = [int(file.read_text()) for file in tmp_path.glob("pid-*")]
    assert all(map(is_alive, pids))
    # 127.0.0.1 in the byte order of the machine. Gloo does listen, so the search finds something.
    assert listening([launched.pid, *pids]) == {"0100007F"}
    launched.kill()
    until(lambda: not any(map(is_alive, pids)))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_terminated_launcher_ends_its_ranks(tmp_path: Path, number: signal.Signals) -> None:
    def ask_once_they_run() -> None:
        until(lambda: are_up(tmp_path))
        os.kill(os.getpid(), number)

    asking = threading.Thread(target=ask_once_they_run)
    asking.start()
    ended = run(tmp_path, "go on")
    asking.join()
    assert ended.stopped_by == number.name
