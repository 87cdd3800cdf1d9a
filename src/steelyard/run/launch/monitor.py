"""The launcher's monitor: detects that a rank has failed, finds out which one, and ends all ranks.

Ten times per second, it reads the state of the processes and the files that they have written,
which is cheap. Ranks that wait for a stopped or hanging rank report this themselves when their
collective times out; then the running ranks are asked for their position. Not for the
interpretation of the evidence: see failure_diagnosis.py. This works on Linux only: it needs /proc,
and waits that leave dead processes for the agent to reap.
"""

import contextlib
import os
import re
import signal
import time
from collections.abc import Mapping
from math import inf
from pathlib import Path
from typing import Any

from steelyard.errors import SteelyardError
from steelyard.run.launch.failure_diagnosis import Evidence, FailureCase, certain_verdict, verdict
from steelyard.run.launch.rank_status import RankProgress, RankStatus
from steelyard.run.launch.run_files import RankFiles, read_whole
from steelyard.safe_text import printable

# A dying rank closes its connections before its process is seen to end. Complaints of other ranks
# are therefore judged only after this time.
_GRACE_SECONDS = 0.7
# The time that a rank has to answer. Together with the grace period it is less than the 5 s that a
# verdict may take.
_ANSWER_SECONDS = 3.0
# The time for a failed rank to print its traceback, and for the kernel to end killed processes.
_TRACEBACK_SECONDS, _DEATH_SECONDS = 2.0, 10.0
_POLL_SECONDS = 0.05
_STDERR_BYTES = 4096


class Watch:
    """Monitors the ranks of one attempt, whose processes are children of this one."""

    def __init__(
        self, files: list[RankFiles], *, timeout_seconds: float, logs_stay: bool = True
    ) -> None:
        self._files = files
        self._logs_stay = logs_stay
        self._timeout_seconds = timeout_seconds
        self._stopped_since: dict[int, float] = {}
        self._ended_at: dict[int, float] = {}
        self._asked: set[int] = set()
        self._oom_kills_before = oom_kills()

    def poll(self, pids: Mapping[int, int]) -> SteelyardError | bool:
        """Return False while the ranks run, and True when all have succeeded. After a failure, end
        all ranks and return the error.
        """
        case = self._case(pids)
        if not self._is_trouble(case):
            done = all(one.status == 0 for one in case.ranks)
            if done:
                self._kill(pids)
            return done
        case = self._complete(case, pids)
        found = verdict(case)
        own = {one.rank for one in case.ranks if one.statement and not one.is_witness}
        self._kill({rank: pid for rank, pid in pids.items() if rank not in own})
        self._wait(pids, own, _TRACEBACK_SECONDS)
        self._kill(pids)
        self._wait(pids, set(pids), _DEATH_SECONDS)
        return found

    def _is_trouble(self, case: FailureCase) -> bool:
        now = time.monotonic()
        return any(
            (one.status is not None and one.status != 0)
            or (one.statement is not None and one.status != 0)
            or now - self._stopped_since.get(one.rank, now) > self._timeout_seconds
            for one in case.ranks
        )

    def _complete(self, case: FailureCase, pids: Mapping[int, int]) -> FailureCase:
        """Collect evidence until the verdict is certain, or no more is expected."""
        start = time.monotonic()
        while certain_verdict(case) is None:
            waited_seconds = time.monotonic() - start
            if waited_seconds > _GRACE_SECONDS:
                self._ask(case)
                silent = [one for one in case.ranks if one.is_running and one.answer is None]
                if not silent or waited_seconds > _GRACE_SECONDS + _ANSWER_SECONDS:
                    break
            time.sleep(_POLL_SECONDS)
            case = self._case(pids)
        return case

    def _ask(self, case: FailureCase) -> None:
        for one in case.ranks:
            if one.is_running and one.rank not in self._asked:
                # A rank that has not joined yet has no pipe, or nothing that reads from it.
                with contextlib.suppress(OSError):
                    pipe = os.open(self._files[one.rank].ask, os.O_WRONLY | os.O_NONBLOCK)
                    with open(pipe, "wb", buffering=0) as asking:  # noqa: PTH123 - no path, a pipe
                        asking.write(b"?")
                    self._asked.add(one.rank)

    # --- evidence ---------------------------------------------------------------------------------

    def _case(self, pids: Mapping[int, int]) -> FailureCase:
        ranks = tuple(self._evidence(rank, pids[rank]) for rank in range(len(self._files)))
        was_killed = any(one.status == -signal.SIGKILL for one in ranks)
        return FailureCase(
            ranks=ranks,
            timeout_seconds=self._timeout_seconds,
            logs=str(self._files[0].path.parent) if self._logs_stay else "",
            oom_kills=oom_kills() - self._oom_kills_before if was_killed else 0,
        )

    def _evidence(self, rank: int, pid: int) -> Evidence:
        files = self._files[rank]
        status = _status(pid)
        # Read after the status, so that everything that a rank wrote before its end is seen.
        written = read_whole(files.error)
        report = written.get("steelyard") if written else None
        answer = read_whole(files.answer) if rank in self._asked else None
        pending_check = read_whole(files.pending_check)
        is_stopped = status is None and _is_stopped(pid)
        now = time.monotonic()
        if status is not None:
            self._ended_at.setdefault(rank, now)
        if is_stopped:
            self._stopped_since.setdefault(rank, now)
        else:
            self._stopped_since.pop(rank, None)
        return Evidence(
            rank=rank,
            status=status,
            ended_seconds=self._ended_at.get(rank, inf),
            is_stopped=is_stopped,
            statement=RankStatus.of_json(report) if isinstance(report, dict) else None,
            stderr=_end_of(files.stderr) if status else None,
            was_asked=rank in self._asked,
            answer=RankProgress.of_json(answer) if answer is not None else None,
            pending_check=None
            if pending_check is None
            else (_text(pending_check, "item"), _text(pending_check, "words")),
        )

    # --- ending -----------------------------------------------------------------------------------

    def _kill(self, pids: Mapping[int, int]) -> None:
        """Kill the ranks and their children. Each rank leads a process group, and is not reaped
        before this.
        """
        for pid in pids.values():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)

    def _wait(self, pids: Mapping[int, int], ranks: set[int], seconds: float) -> None:
        end = time.monotonic() + seconds
        while time.monotonic() < end and any(_status(pids[rank]) is None for rank in ranks):
            time.sleep(_POLL_SECONDS)


def _text(found: Mapping[str, Any], name: str) -> str:
    return printable(str(found.get(name, "")), most=400)


def _status(pid: int) -> int | None:
    found = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    if found is None:
        return None
    return found.si_status if found.si_code == os.CLD_EXITED else -found.si_status


def _is_stopped(pid: int) -> bool:
    """True in state T of proc(5): stopped by a signal. (State t means stopped by a debugger.)"""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
    except OSError:
        return False
    return text.rpartition(")")[2].split()[0] == "T"


def _end_of(log: Path) -> str | None:
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - _STDERR_BYTES))
            lines = file.read().decode(errors="replace").splitlines()
    except OSError:
        return None
    return "\n".join(printable(line) for line in lines)


def oom_kills() -> int:
    """Return the number of processes in this memory cgroup that the kernel's OOM killer has
    ended; 0 if unknown."""
    return max(map(_oom_kills_in, _memory_groups()), default=0)


def _memory_groups() -> list[Path]:
    """Return the counter files of cgroups version 2 and 1; in a container the cgroup is often the
    root."""
    found: list[Path] = []
    root = Path("/sys/fs/cgroup")
    try:
        lines = Path("/proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        return found
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            found += [root / part / "memory.events" for part in (path.lstrip("/"), "")]
        elif "memory" in controllers.split(","):
            group = root / "memory"
            found += [group / part / "memory.oom_control" for part in (path.lstrip("/"), "")]
    return found


def _oom_kills_in(file: Path) -> int:
    try:
        counted = re.search(r"^oom_kill (\d+)$", file.read_text(encoding="ascii"), re.MULTILINE)
    except OSError:
        return 0
    return int(counted[1]) if counted else 0
