"""Determines which rank failed, and why: turns the evidence of all ranks into one error that names
a rank.

The first rank that failed by itself is to blame; a rank that only lost a peer is a witness. If all
are witnesses, the rank that did not reach the collective in which the others waited is to blame.
The diagnosis is a pure function of the evidence. Not for collecting it: see monitor.py and
status_reporter.py.
"""

import re
import signal
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf

from steelyard.errors import (
    BadInput,
    Cause,
    NonFinite,
    RankFailed,
    RanksDiffer,
    SteelyardError,
)
from steelyard.run.launch.rank_status import Issued, RankProgress, RankStatus

_GLOO_ERROR = re.compile(
    r"gloo/|gloo::|Connection (closed|reset) by peer|Application timeout caused pair closure"
)
_MEMORY_ERROR = re.compile(r"std::bad_alloc|MemoryError|can't allocate memory")

# The process group of all ranks, by torch's name for it.
_ALL = "0"


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """The evidence about one rank.

    ``status``: the exit code, or a negative signal number; None while it runs. ``stderr``: the
    end of its log; None if it has no log. ``was_asked``: the rank was asked for its position, and
    ``answer`` is its reply, if any. ``pending_check``: the item and value of an equality check
    that the rank is waiting for.
    """

    rank: int
    status: int | None = None
    ended_seconds: float = inf
    is_stopped: bool = False
    statement: RankStatus | None = None
    stderr: str | None = None
    was_asked: bool = False
    answer: RankProgress | None = None
    pending_check: tuple[str, str] | None = None

    @property
    def progress(self) -> RankProgress:
        if self.answer is not None:
            return self.answer
        return self.statement.progress if self.statement else RankProgress()

    @property
    def is_running(self) -> bool:
        return self.status is None and self.statement is None

    @property
    def is_witness(self) -> bool:
        """True if the rank failed because it lost, or did not find, another rank."""
        return self.statement is not None and self.statement.of_exchange


@dataclass(frozen=True, slots=True, kw_only=True)
class FailureCase:
    """The evidence about all ranks in one attempt. ``oom_kills``: how many processes the kernel
    killed for lack of memory in the meantime; ``logs``: the folder of the ranks' logs, or empty.
    """

    ranks: tuple[Evidence, ...]
    timeout_seconds: float
    logs: str
    oom_kills: int = 0


def certain_verdict(case: FailureCase) -> SteelyardError | None:
    """Return the verdict if further evidence cannot change it."""
    return _first(case, (_refused, _not_finite, _failed_by_itself, _stopped))


def verdict(case: FailureCase) -> SteelyardError:
    """Return the error that names the rank to blame."""
    # Running ranks are blamed last: others may be slow to report.
    rules = (
        _ended_early, _absent, _alone_in_check, _other_exchange, _aborted, _behind,
        _not_waiting, _missed_in_shared_memory, _first_complaint,
    )  # fmt: skip
    found = certain_verdict(case) or _refusal(case) or _first(case, rules)
    assert found is not None, case
    return found


_Rule = Callable[[FailureCase], SteelyardError | None]


def _first(case: FailureCase, rules: Sequence[_Rule]) -> SteelyardError | None:
    return next((found for rule in rules if (found := rule(case)) is not None), None)


# --- a rank failed by itself ----------------------------------------------------------------------


def _refused(case: FailureCase) -> SteelyardError | None:
    for statement in _by_time(case):
        if statement.differs is not None:
            rank, item = statement.differs
            return RanksDiffer(
                statement.text,
                expected=statement.expected,
                remedy=statement.remedy,
                rank=rank,
                item=item,
            )
    # A running rank may be about to report the same error.
    return None if any(one.is_running for one in case.ranks) else _refusal(case)


def _refusal(case: FailureCase) -> SteelyardError | None:
    """Return the input error of a rank. It names that rank if another rank did not find the error
    itself.
    """
    statements = {one.rank: one.statement for one in case.ranks if one.statement is not None}
    refused = [(s.at_seconds, rank) for rank, s in statements.items() if s.of_input]
    if not refused:
        return None
    first = min(refused)[1]
    is_fine = any(one.is_running or one.is_witness for one in case.ranks)
    where = f"on rank {first}: " if is_fine else ""
    found = statements[first]
    return BadInput(f"{where}{found.text}", expected=found.expected, remedy=found.remedy)


def _not_finite(case: FailureCase) -> SteelyardError | None:
    """Return the error for a loss that is not finite. All ranks report it and name its origin; the
    first to report it is not to blame.
    """
    statements = [one for one in _by_time(case) if not one.of_exchange]
    if not statements or not statements[0].not_finite:
        return None
    found = statements[0]
    return NonFinite(found.text, expected=found.expected, remedy=found.remedy)


def _failed_by_itself(case: FailureCase) -> SteelyardError | None:
    failures: list[tuple[float, RankFailed]] = []
    for one in case.ranks:
        statement = one.statement
        if statement is not None and statement.of_input:
            continue
        if statement is not None and not statement.of_exchange and one.status != 0:
            failures.append((statement.at_seconds, _from_exception(case, one, statement)))
        elif statement is None and one.status and _ended_by_itself(case, one):
            failures.append((one.ended_seconds, _from_exit(case, one)))
    return min(failures, key=lambda failure: failure[0])[1] if failures else None


def _ended_by_itself(case: FailureCase, one: Evidence) -> bool:
    """True if a rank without a report ended by itself, and not because it lost another rank."""
    if one.status == -signal.SIGABRT or (one.status or 0) > 0:
        if one.stderr is None:
            # Without a log, the reports of others decide: if they lost a peer, this rank would have
            # reported it too. But gloo aborts silently if ranks exchange different amounts.
            others = any(other.is_witness for other in case.ranks if other is not one)
            return others and one.status != -signal.SIGABRT
        return not _GLOO_ERROR.search(one.stderr)
    return True


def _from_exception(case: FailureCase, one: Evidence, statement: RankStatus) -> RankFailed:
    where = f" at {statement.line}" if statement.line else ""
    cause: Cause = "out of memory" if statement.of_memory else "exception"
    text = f": {statement.text}" if statement.text else ""
    if statement.of_memory:
        text = f" (out of memory){text}"
    return _failed(
        case,
        one,
        cause,
        f"failed{where}: {statement.kind}{text}",
        expected=statement.expected or "every rank to complete its steps",
        remedy=statement.remedy or "fix the reported error",
    )


def _from_exit(case: FailureCase, one: Evidence) -> RankFailed:
    assert one.status is not None
    last = f": {_last_line(one.stderr)}" if one.stderr and one.stderr.strip() else ""
    if one.stderr and _MEMORY_ERROR.search(one.stderr):
        return _failed(case, one, "out of memory", f"ran out of memory{last}", remedy=_LESS)
    if one.status > 0:
        return _failed(case, one, "exit code", f"ended with exit code {one.status}{last}")
    name = _signal(one.status)
    if one.status == -signal.SIGKILL and case.oom_kills:
        text = f"was killed ({name}), probably out of memory: the kernel killed "
        text += f"{case.oom_kills} processes of this control group for lack of memory"
        return _failed(case, one, "killed", text, remedy=_LESS)
    return _failed(case, one, "killed", f"was killed ({name}){last}", remedy=_RESUME)


def _stopped(case: FailureCase) -> SteelyardError | None:
    for one in case.ranks:
        if one.is_stopped:
            text = f"is stopped (SIGSTOP); the others waited {case.timeout_seconds:g} s for it"
            return _failed(case, one, "stopped", text, remedy=_RESUME)
    return None


# --- every failed rank lost or missed another
# ------------------------------------------------------


def _ended_early(case: FailureCase) -> SteelyardError | None:
    for one in case.ranks:
        if one.status == 0:
            text = "exited successfully while the others waited for it"
            return _failed(case, one, "ended early", text, remedy=_SAME_EXCHANGES)
    return None


def _absent(case: FailureCase) -> SteelyardError | None:
    for statement in _by_time(case):
        if statement.absent is not None and 0 <= statement.absent < len(case.ranks):
            one = case.ranks[statement.absent]
            if not one.is_witness:
                text = "did not connect to the others within the start timeout"
                return _failed(case, one, "absent", text, remedy="give ranks more time to start")
    return None


def _alone_in_check(case: FailureCase) -> SteelyardError | None:
    """Return the error for a rank whose batch has a new shape: it waits in an equality check while
    the others are in the step.
    """
    asking = [one for one in case.ranks if one.pending_check is not None]
    if not asking or len(asking) == len(case.ranks):
        return None
    one = asking[0]
    assert one.pending_check is not None
    item, words = one.pending_check
    return RanksDiffer(
        f"rank {one.rank} has a different {item} than the other ranks: {words}",
        expected=f"the same {item} on all ranks",
        remedy="give every rank batches of the same shapes in the same order, for example with "
        "drop_last=True",
        rank=one.rank,
        item=item,
    )


def _other_exchange(case: FailureCase) -> SteelyardError | None:
    """Return the error from the first recorded collectives in which ranks differ. A rank that does
    not wait has issued more since.
    """
    by_collective: dict[tuple[str, int], dict[int, str]] = {}
    for one in case.ranks:
        for issued in (*one.progress.lately, *one.progress.issued):
            by_collective.setdefault((issued.group, issued.number), {})[one.rank] = issued.words
    for _, words in sorted(by_collective.items()):
        most = Counter(words.values()).most_common(1)[0][0]
        other = next(rank for rank, each in words.items() if each == most)
        for rank, each in words.items():
            if each != most:
                text = f"exchanges {each}, where rank {other} exchanges {most}"
                one = case.ranks[rank]
                return _failed(case, one, "other exchange", text, remedy=_SAME_EXCHANGES)
    return None


def _aborted(case: FailureCase) -> SteelyardError | None:
    """Return the error for a process that gloo aborted: it was sent another amount than it expects,
    though the other rank may be wrong.
    """
    for one in case.ranks:
        if one.status == -signal.SIGABRT:
            words = [
                f"rank {other.rank} was in {issued.words}"
                for other in case.ranks
                for issued in other.progress.issued
                if issued.group == _ALL
            ]
            text = (
                "was aborted by gloo (SIGABRT), which happens if ranks exchange different amounts"
            )
            text += f"; {', '.join(words)}" if words else ""
            return _failed(case, one, "other exchange", text, remedy=_SAME_EXCHANGES)
    return None


def _behind(case: FailureCase) -> SteelyardError | None:
    """Return the error for a rank that is behind: an issued collective completes by itself, so this
    rank did not issue it.
    """
    latest: dict[str, Issued] = {}
    for one in case.ranks:
        for issued in one.progress.issued:
            known = latest.setdefault(issued.group, issued)
            latest[issued.group] = max(known, issued, key=lambda each: each.number)
    for one in case.ranks:
        if one.is_running and one.answer is None:
            return _hanging(case, one, latest.get(_ALL))
    for one in case.ranks:
        for issued in one.progress.issued if one.is_running else ():
            if issued.number < latest[issued.group].number:
                return _hanging(case, one, latest[issued.group])
        if one.is_running and not one.progress.issued and latest:
            return _hanging(case, one, latest.get(_ALL))
    return None


def _not_waiting(case: FailureCase) -> SteelyardError | None:
    for one in case.ranks:
        if one.is_running and one.answer is not None and not one.answer.is_waiting:
            return _hanging(case, one, None)
    return None


def _hanging(case: FailureCase, one: Evidence, missed: Issued | None) -> RankFailed:
    if not one.was_asked:
        where = "it has not connected to the others"
    elif one.answer is None:
        where = "it is in native code that holds the interpreter"
    else:
        where = f"it is at {one.answer.line}" if one.answer.line else "it is still running"
    what = f"the {missed.words} " if missed else "the exchange "
    text = f"did not reach {what}in which others waited {case.timeout_seconds:g} s: {where}"
    remedy = "fix the cause, or allow ranks to wait longer"
    return _failed(case, one, "hanging", text, remedy=remedy)


def _missed_in_shared_memory(case: FailureCase) -> SteelyardError | None:
    """Return the error for messages through shared memory, which torch does not record: one rank
    waited there for another, which was in one of torch's collectives.
    """
    for other in case.ranks:
        missed = other.statement.missed if other.statement else None
        if missed is None or not 0 <= missed < len(case.ranks):
            continue
        one = case.ranks[missed]
        if one.is_witness and one.statement is not None and one.statement.missed is None:
            words = [issued.words for issued in one.progress.issued if issued.group == _ALL]
            text = f"exchanges {', '.join(words) or 'something else'}, where rank {other.rank} "
            text += "waited for its message through shared memory"
            return _failed(case, one, "other exchange", text, remedy=_SAME_EXCHANGES)
    return None


def _first_complaint(case: FailureCase) -> SteelyardError | None:
    """Return the first complaint, if nothing identifies a culprit."""
    complaints = [one for one in case.ranks if one.is_witness]
    if complaints:
        one = min(complaints, key=lambda one: one.statement.at_seconds if one.statement else inf)
        assert one.statement is not None
        return _failed(case, one, "exchange", f"lost a collective: {one.statement.text}")
    one = min(case.ranks, key=lambda one: one.ended_seconds if one.status else inf)
    return _from_exit(case, one) if one.status else None


# --- messages
# --------------------------------------------------------------------------------------

_LESS = "give it more memory, or plan with a smaller budget"
_RESUME = "start again from the last checkpoint, with --resume"
_SAME_EXCHANGES = "make every rank take the same steps on batches of the same shapes"


def _failed(
    case: FailureCase,
    one: Evidence,
    cause: Cause,
    text: str,
    *,
    expected: str = "every rank to complete its steps",
    remedy: str = "read its output",
) -> RankFailed:
    where = f"is in {case.logs}" if case.logs else "is kept with --debug"
    return RankFailed(
        f"rank {one.rank} {text}",
        expected=expected,
        remedy=f"{remedy}; the output of the ranks {where}",
        rank=one.rank,
        cause=cause,
    )


def _by_time(case: FailureCase) -> list[RankStatus]:
    statements = [one.statement for one in case.ranks if one.statement is not None]
    return sorted(statements, key=lambda statement: statement.at_seconds)


def _signal(status: int) -> str:
    try:
        return signal.Signals(-status).name
    except ValueError:
        return f"signal {-status}"


def _last_line(text: str) -> str:
    return text.strip().splitlines()[-1].strip()
