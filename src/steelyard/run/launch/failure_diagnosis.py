"""Who broke, and of what: from what is known of each rank to one error that names one of them.

The first rank that failed by itself is to blame; whoever only lost a peer is a witness. Only if all
are witnesses is it asked who did not come to where the others waited. Plain data in, an error out.
Not for finding anything out: see monitor.py and status_reporter.py.
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

_OF_GLOO = re.compile(
    r"gloo/|gloo::|Connection (closed|reset) by peer|Application timeout caused pair closure"
)
_OF_MEMORY = re.compile(r"std::bad_alloc|MemoryError|can't allocate memory")

# The process group of all ranks, by the name that torch gives it.
_ALL = "0"


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """What is known of one rank.

    ``status``: its exit code, or a signal as a negative number; none while it lives. ``stderr``:
    the end of its log, none of the rank that has no log. ``was_asked`` where it is, and if it has,
    its ``answer``. ``unlike``: what it has that it asks all others for, and how that is there,
    while it asks.
    """

    rank: int
    status: int | None = None
    ended_seconds: float = inf
    is_stopped: bool = False
    statement: RankStatus | None = None
    stderr: str | None = None
    was_asked: bool = False
    answer: RankProgress | None = None
    unlike: tuple[str, str] | None = None

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
        """It failed because it lost, or did not find, another."""
        return self.statement is not None and self.statement.of_exchange


@dataclass(frozen=True, slots=True, kw_only=True)
class FailureCase:
    """All ranks of one try; ``oom_kills``: processes the kernel killed for memory meanwhile;
    ``logs``: where what the ranks wrote stays, or empty."""

    ranks: tuple[Evidence, ...]
    timeout_seconds: float
    logs: str
    oom_kills: int = 0


def at_once(case: FailureCase) -> SteelyardError | None:
    """The verdict that no further question could change, if there is one."""
    return _first(case, (_refused, _not_finite, _failed_by_itself, _stopped))


def verdict(case: FailureCase) -> SteelyardError:
    # Whoever runs on is blamed last: others may be slow to say what they know.
    rules = (
        _ended_early, _absent, _alone_with_another, _other_exchange, _aborted, _behind,
        _not_waiting, _elsewhere, _left,
    )  # fmt: skip
    found = at_once(case) or _refusal(case) or _first(case, rules)
    assert found is not None, case
    return found


_Rule = Callable[[FailureCase], SteelyardError | None]


def _first(case: FailureCase, rules: Sequence[_Rule]) -> SteelyardError | None:
    return next((found for rule in rules if (found := rule(case)) is not None), None)


# --- a rank failed by itself ----------------------------------------------------------------------


def _refused(case: FailureCase) -> SteelyardError | None:
    for said in _by_time(case):
        if said.differs is not None:
            rank, item = said.differs
            return RanksDiffer(
                said.text, expected=said.expected, remedy=said.remedy, rank=rank, item=item
            )
    # Who has not spoken may be about to say the same.
    return None if any(one.is_running for one in case.ranks) else _refusal(case)


def _refusal(case: FailureCase) -> SteelyardError | None:
    """It is of one rank where another found nothing wrong, but that it lost the one."""
    said = {one.rank: one.statement for one in case.ranks if one.statement is not None}
    refused = [(s.at_seconds, rank) for rank, s in said.items() if s.of_input]
    if not refused:
        return None
    first = min(refused)[1]
    is_fine = any(one.is_running or one.is_witness for one in case.ranks)
    where = f"on rank {first}: " if is_fine else ""
    found = said[first]
    return BadInput(f"{where}{found.text}", expected=found.expected, remedy=found.remedy)


def _not_finite(case: FailureCase) -> SteelyardError | None:
    """All ranks find a loss that is not finite, and each names the one whose values were so first:
    who says it first is not to blame for that."""
    said = [one for one in _by_time(case) if not one.of_exchange]
    if not said or not said[0].not_finite:
        return None
    found = said[0]
    return NonFinite(found.text, expected=found.expected, remedy=found.remedy)


def _failed_by_itself(case: FailureCase) -> SteelyardError | None:
    failures: list[tuple[float, RankFailed]] = []
    for one in case.ranks:
        said = one.statement
        if said is not None and said.of_input:
            continue
        if said is not None and not said.of_exchange and one.status != 0:
            failures.append((said.at_seconds, _raised(case, one, said)))
        elif said is None and one.status and _is_own_end(case, one):
            failures.append((one.ended_seconds, _ended(case, one)))
    return min(failures, key=lambda failure: failure[0])[1] if failures else None


def _is_own_end(case: FailureCase, one: Evidence) -> bool:
    """Whether an end without a word was this rank's own, and not because it lost another."""
    if one.status == -signal.SIGABRT or (one.status or 0) > 0:
        if one.stderr is None:
            # No log: if others bear witness, so would this one have, had it lost them. But gloo
            # aborts without a word where ranks exchange different amounts.
            others = any(other.is_witness for other in case.ranks if other is not one)
            return others and one.status != -signal.SIGABRT
        return not _OF_GLOO.search(one.stderr)
    return True


def _raised(case: FailureCase, one: Evidence, said: RankStatus) -> RankFailed:
    where = f" at {said.line}" if said.line else ""
    cause: Cause = "out of memory" if said.of_memory else "exception"
    text = f": {said.text}" if said.text else ""
    if said.of_memory:
        text = f" (out of memory){text}"
    return _failed(
        case,
        one,
        cause,
        f"failed{where}: {said.kind}{text}",
        expected=said.expected or "every rank to end its steps",
        remedy=said.remedy or "mend what it says",
    )


def _ended(case: FailureCase, one: Evidence) -> RankFailed:
    assert one.status is not None
    last = f": {_last_line(one.stderr)}" if one.stderr and one.stderr.strip() else ""
    if one.stderr and _OF_MEMORY.search(one.stderr):
        return _failed(case, one, "out of memory", f"ran out of memory{last}", remedy=_LESS)
    if one.status > 0:
        return _failed(case, one, "exit code", f"ended with exit code {one.status}{last}")
    name = _signal(one.status)
    if one.status == -signal.SIGKILL and case.oom_kills:
        text = f"was killed ({name}), perhaps for want of memory: the kernel killed "
        text += f"{case.oom_kills} of this group for that meanwhile"
        return _failed(case, one, "killed", text, remedy=_LESS)
    return _failed(case, one, "killed", f"was killed ({name}){last}", remedy=_RESUME)


def _stopped(case: FailureCase) -> SteelyardError | None:
    for one in case.ranks:
        if one.is_stopped:
            text = f"is stopped (SIGSTOP), and the others waited {case.timeout_seconds:g} s for it"
            return _failed(case, one, "stopped", text, remedy=_RESUME)
    return None


# --- all that failed had lost or missed another ---------------------------------------------------


def _ended_early(case: FailureCase) -> SteelyardError | None:
    for one in case.ranks:
        if one.status == 0:
            text = "ended, as if all were done, while the others waited for it"
            return _failed(case, one, "ended early", text, remedy=_SAME_EXCHANGES)
    return None


def _absent(case: FailureCase) -> SteelyardError | None:
    for said in _by_time(case):
        if said.absent is not None and 0 <= said.absent < len(case.ranks):
            one = case.ranks[said.absent]
            if not one.is_witness:
                text = "did not join the others in the time that ranks have to start"
                return _failed(case, one, "absent", text, remedy="give it more time to start")
    return None


def _alone_with_another(case: FailureCase) -> SteelyardError | None:
    """Who has another batch than before asks all, and those that have none are in the step."""
    asking = [one for one in case.ranks if one.unlike is not None]
    if not asking or len(asking) == len(case.ranks):
        return None
    one = asking[0]
    assert one.unlike is not None
    item, words = one.unlike
    return RanksDiffer(
        f"rank {one.rank} has another {item}, and the other ranks have not: {words}",
        expected=f"the same {item} on all ranks",
        remedy="give every rank batches of the same shapes in the same order, such as with "
        "drop_last=True",
        rank=one.rank,
        item=item,
    )


def _other_exchange(case: FailureCase) -> SteelyardError | None:
    """The first of those that ranks remember: whoever does not wait has issued more since."""
    made: dict[tuple[str, int], dict[int, str]] = {}
    for one in case.ranks:
        for issued in (*one.progress.lately, *one.progress.issued):
            made.setdefault((issued.group, issued.number), {})[one.rank] = issued.words
    for _, words in sorted(made.items()):
        most = Counter(words.values()).most_common(1)[0][0]
        other = next(rank for rank, each in words.items() if each == most)
        for rank, each in words.items():
            if each != most:
                text = f"exchanges {each}, where rank {other} exchanges {most}"
                one = case.ranks[rank]
                return _failed(case, one, "other exchange", text, remedy=_SAME_EXCHANGES)
    return None


def _aborted(case: FailureCase) -> SteelyardError | None:
    """Gloo ends the process that is sent another amount than it asked for, be it right or wrong."""
    for one in case.ranks:
        if one.status == -signal.SIGABRT:
            words = [
                f"rank {other.rank} was in {issued.words}"
                for other in case.ranks
                for issued in other.progress.issued
                if issued.group == _ALL
            ]
            text = "was ended by gloo (SIGABRT), as it does where ranks bring different amounts"
            text += f"; {', '.join(words)}" if words else ""
            return _failed(case, one, "other exchange", text, remedy=_SAME_EXCHANGES)
    return None


def _behind(case: FailureCase) -> SteelyardError | None:
    """An exchange that is issued completes by itself: whoever is behind did not issue it."""
    furthest: dict[str, Issued] = {}
    for one in case.ranks:
        for issued in one.progress.issued:
            known = furthest.setdefault(issued.group, issued)
            furthest[issued.group] = max(known, issued, key=lambda each: each.number)
    for one in case.ranks:
        if one.is_running and one.answer is None:
            return _hanging(case, one, furthest.get(_ALL))
    for one in case.ranks:
        for issued in one.progress.issued if one.is_running else ():
            if issued.number < furthest[issued.group].number:
                return _hanging(case, one, furthest[issued.group])
        if one.is_running and not one.progress.issued and furthest:
            return _hanging(case, one, furthest.get(_ALL))
    return None


def _not_waiting(case: FailureCase) -> SteelyardError | None:
    for one in case.ranks:
        if one.is_running and one.answer is not None and not one.answer.is_waiting:
            return _hanging(case, one, None)
    return None


def _hanging(case: FailureCase, one: Evidence, missed: Issued | None) -> RankFailed:
    if not one.was_asked:
        where = "it has not joined the others"
    elif one.answer is None:
        where = "it is in native code that lets no other thread run"
    else:
        where = f"it is at {one.answer.line}" if one.answer.line else "it runs on"
    what = f"the {missed.words} " if missed else "the exchange "
    text = f"did not come to {what}in which others waited {case.timeout_seconds:g} s: {where}"
    remedy = "mend what keeps it there, or allow ranks to wait longer"
    return _failed(case, one, "hanging", text, remedy=remedy)


def _elsewhere(case: FailureCase) -> SteelyardError | None:
    """What goes through memory that ranks share is in no list of torch's: one rank waited there
    for another, and that one for an exchange of torch's."""
    for other in case.ranks:
        missed = other.statement.missed if other.statement else None
        if missed is None or not 0 <= missed < len(case.ranks):
            continue
        one = case.ranks[missed]
        if one.is_witness and one.statement is not None and one.statement.missed is None:
            words = [issued.words for issued in one.progress.issued if issued.group == _ALL]
            text = f"exchanges {', '.join(words) or 'something else'}, where rank {other.rank} "
            text += "waited for what it sends through slots"
            return _failed(case, one, "other exchange", text, remedy=_SAME_EXCHANGES)
    return None


def _left(case: FailureCase) -> SteelyardError | None:
    """Nobody is to blame by what is known: the first complaint, as it is."""
    complaints = [one for one in case.ranks if one.is_witness]
    if complaints:
        one = min(complaints, key=lambda one: one.statement.at_seconds if one.statement else inf)
        assert one.statement is not None
        return _failed(case, one, "exchange", f"lost an exchange: {one.statement.text}")
    one = min(case.ranks, key=lambda one: one.ended_seconds if one.status else inf)
    return _ended(case, one) if one.status else None


# --- words ----------------------------------------------------------------------------------------

_LESS = "give it more memory, or plan with a smaller budget"
_RESUME = "start again from the last checkpoint, with --resume"
_SAME_EXCHANGES = "let every rank take the same steps on batches of the same form"


def _failed(
    case: FailureCase,
    one: Evidence,
    cause: Cause,
    text: str,
    *,
    expected: str = "every rank to end its steps",
    remedy: str = "look at what it wrote",
) -> RankFailed:
    where = f"is in {case.logs}" if case.logs else "is kept with --debug"
    return RankFailed(
        f"rank {one.rank} {text}",
        expected=expected,
        remedy=f"{remedy}; what the ranks wrote {where}",
        rank=one.rank,
        cause=cause,
    )


def _by_time(case: FailureCase) -> list[RankStatus]:
    said = [one.statement for one in case.ranks if one.statement is not None]
    return sorted(said, key=lambda statement: statement.at_seconds)


def _signal(status: int) -> str:
    try:
        return signal.Signals(-status).name
    except ValueError:
        return f"signal {-status}"


def _last_line(text: str) -> str:
    return text.strip().splitlines()[-1].strip()
