"""Outside the ranks: sees that one is in trouble, finds out which, and ends them all.

Every look is cheap: the state of a process and whether it left a file. Ranks that wait for one that
is stopped or hangs say so themselves, when their exchange times out; then those that live are
asked. Nothing here runs while all is well but these looks, ten a second. Not for what the findings
mean: see failure_diagnosis.py. Linux only: /proc, and waits that leave the dead for the agent to
reap.
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
from steelyard.run.launch.failure_diagnosis import Evidence, FailureCase, at_once, verdict
from steelyard.run.launch.rank_status import RankProgress, RankStatus
from steelyard.run.launch.run_files import RankFiles, read_whole
from steelyard.safe_text import printable

# A rank that dies hangs up before its process is seen dead; so long others' complaints wait.
_GRACE_SECONDS = 0.7
# How long a rank has to say where it is; with the grace less than the 5 s that a verdict may take.
_ANSWER_SECONDS = 3.0
# For a rank that failed by itself to print its traceback, and for the kernel to end the killed.
_LAST_WORDS_SECONDS, _DEATH_SECONDS = 2.0, 10.0
_LOOK_SECONDS = 0.05
_STDERR_BYTES = 4096


class Watch:
    """Over the ranks of one try, whose processes are children of this one."""

    def __init__(
        self, places: list[RankFiles], *, timeout_seconds: float, logs_stay: bool = True
    ) -> None:
        self._places = places
        self._logs_stay = logs_stay
        self._timeout_seconds = timeout_seconds
        self._stopped_since: dict[int, float] = {}
        self._ended_at: dict[int, float] = {}
        self._asked: set[int] = set()
        self._oom_kills_before = oom_kills()

    def look(self, pids: Mapping[int, int]) -> SteelyardError | bool:
        """False while they run, True when all ended well; else why they, all of them, ended now."""
        case = self._case(pids)
        if not self._is_trouble(case):
            done = all(one.status == 0 for one in case.ranks)
            if done:
                self._kill(pids)
            return done
        case = self._settled(case, pids)
        found = verdict(case)
        own = {one.rank for one in case.ranks if one.statement and not one.is_witness}
        self._kill({rank: pid for rank, pid in pids.items() if rank not in own})
        self._wait(pids, own, _LAST_WORDS_SECONDS)
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

    def _settled(self, case: FailureCase, pids: Mapping[int, int]) -> FailureCase:
        """The case once nothing more is to be learnt."""
        start = time.monotonic()
        while at_once(case) is None:
            waited_seconds = time.monotonic() - start
            if waited_seconds > _GRACE_SECONDS:
                self._ask(case)
                silent = [one for one in case.ranks if one.is_running and one.answer is None]
                if not silent or waited_seconds > _GRACE_SECONDS + _ANSWER_SECONDS:
                    break
            time.sleep(_LOOK_SECONDS)
            case = self._case(pids)
        return case

    def _ask(self, case: FailureCase) -> None:
        for one in case.ranks:
            if one.is_running and one.rank not in self._asked:
                # Of a rank that has not joined yet nobody reads the pipe, or there is none.
                with contextlib.suppress(OSError):
                    pipe = os.open(self._places[one.rank].ask, os.O_WRONLY | os.O_NONBLOCK)
                    with open(pipe, "wb", buffering=0) as asking:  # noqa: PTH123 - no path, a pipe
                        asking.write(b"?")
                    self._asked.add(one.rank)

    # --- looking ----------------------------------------------------------------------------------

    def _case(self, pids: Mapping[int, int]) -> FailureCase:
        ranks = tuple(self._evidence(rank, pids[rank]) for rank in range(len(self._places)))
        was_killed = any(one.status == -signal.SIGKILL for one in ranks)
        return FailureCase(
            ranks=ranks,
            timeout_seconds=self._timeout_seconds,
            logs=str(self._places[0].path.parent) if self._logs_stay else "",
            oom_kills=oom_kills() - self._oom_kills_before if was_killed else 0,
        )

    def _evidence(self, rank: int, pid: int) -> Evidence:
        place = self._places[rank]
        status = _status(pid)
        # After the status: what a rank wrote before it ended is seen with its end.
        written = read_whole(place.error)
        said = written.get("steelyard") if written else None
        answer = read_whole(place.answer) if rank in self._asked else None
        unlike = read_whole(place.unlike)
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
            statement=RankStatus.of_json(said) if isinstance(said, dict) else None,
            stderr=_end_of(place.stderr) if status else None,
            was_asked=rank in self._asked,
            answer=RankProgress.of_json(answer) if answer is not None else None,
            unlike=None if unlike is None else (_text(unlike, "item"), _text(unlike, "words")),
        )

    # --- ending -----------------------------------------------------------------------------------

    def _kill(self, pids: Mapping[int, int]) -> None:
        """With whatever they started: each rank leads a process group, and is reaped after this."""
        for pid in pids.values():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)

    def _wait(self, pids: Mapping[int, int], ranks: set[int], seconds: float) -> None:
        end = time.monotonic() + seconds
        while time.monotonic() < end and any(_status(pids[rank]) is None for rank in ranks):
            time.sleep(_LOOK_SECONDS)


def _text(found: Mapping[str, Any], name: str) -> str:
    return printable(str(found.get(name, "")), most=400)


def _status(pid: int) -> int | None:
    found = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    if found is None:
        return None
    return found.si_status if found.si_code == os.CLD_EXITED else -found.si_status


def _is_stopped(pid: int) -> bool:
    """State T of proc(5): by a signal; t is a debugger's."""
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
    """Processes of this one's memory group that the kernel has killed for want of memory; or 0."""
    return max(map(_oom_kills_in, _memory_groups()), default=0)


def _memory_groups() -> list[Path]:
    """Files that count, of cgroups version 2 and 1; in a container the group is often the root."""
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
