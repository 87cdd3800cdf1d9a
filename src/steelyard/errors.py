"""All errors for users, each in three parts: what happened, what was expected, what to do next.

    SteelyardError                 exit code
    |-- BadInput                   2   the request itself cannot be read or honoured
    |   |-- BudgetError                a budget that is no amount
    |   |-- CaptureRefused             a model or loss that cannot be captured truthfully
    |   |-- PlanFileError              a plan file that cannot be read
    |   |-- ClusterFileError           a cluster file that cannot be read
    |   |-- Mismatch                   a plan, model or batch that is not the one planned for
    |   `-- RanksDiffer                ranks that do not hold the same plan, model, batch or torch
    |-- Infeasible                 3   no plan fits the budget
    `-- RunFailed                  4   training stopped
        |-- CheckpointError            a checkpoint that cannot be written or read
        |   `-- CheckpointRefused      2   a checkpoint that no run can have saved
        |-- NonFinite                  a loss that is NaN or infinite
        `-- RankFailed                 a rank that failed, and its cause

Not for bugs of Steelyard: those are assertions.
"""

from typing import ClassVar, Literal


class SteelyardError(ValueError):
    """An error for users in three lines: what happened, what was expected, what to do next."""

    exit_code: ClassVar[int] = 2

    def __init__(self, happened: str, *, expected: str, remedy: str) -> None:
        self.happened = happened
        self.expected = expected
        self.remedy = remedy
        super().__init__(happened, expected, remedy)

    def __str__(self) -> str:
        return f"{self.happened}\n  expected: {self.expected}\n  next: {self.remedy}"


def then(error: BaseException, step: str) -> None:
    """Add a next step to an error, which may be one of another library."""
    error.add_note(f"{_THEN}{step}")


def afterwards(error: BaseException) -> list[str]:
    """Return the next steps that ``then`` added."""
    notes: list[str] = getattr(error, "__notes__", [])
    return [note.removeprefix(_THEN) for note in notes if note.startswith(_THEN)]


_THEN = "then: "


class BadInput(SteelyardError):
    """The request cannot be read or honoured as it stands."""


class BudgetError(BadInput):
    """An amount that cannot be a budget."""


class CaptureRefused(BadInput):
    """A training step that cannot be captured faithfully."""


class PlanFileError(BadInput):
    """A plan file that cannot be read."""


class ClusterFileError(BadInput):
    """A cluster file that cannot be read, or that declares no possible cluster."""


class Mismatch(BadInput):
    """A plan, a model or a batch that is not the one that was planned for."""


class RanksDiffer(BadInput):
    """Ranks with different inputs; ``rank`` is the one that differs, ``item`` the input."""

    def __init__(
        self, happened: str, *, expected: str, remedy: str, rank: int = -1, item: str = ""
    ) -> None:
        super().__init__(happened, expected=expected, remedy=remedy)
        self.rank = rank
        self.item = item


class Infeasible(SteelyardError):
    """No plan fits the budget; the message names the smallest feasible amount and its cause.

    ``least_bytes`` is that amount as a number, if memory is the limit.
    """

    exit_code = 3

    def __init__(
        self, happened: str, *, expected: str, remedy: str, least_bytes: int | None = None
    ) -> None:
        super().__init__(happened, expected=expected, remedy=remedy)
        self.least_bytes = least_bytes


class RunFailed(SteelyardError):
    """Training stopped before its end."""

    exit_code = 4


class CheckpointError(RunFailed):
    """A checkpoint that cannot be written, read or trusted."""


class CheckpointRefused(CheckpointError, BadInput):
    """A checkpoint that no run can have saved; it is refused before any part of it is used."""

    exit_code = 2


class NonFinite(RunFailed):
    """A loss that is NaN or infinite.

    ``rank`` is the first one with such values of its own; -1 if that is not one rank, or unknown.
    """

    def __init__(self, happened: str, *, expected: str, remedy: str, rank: int = -1) -> None:
        super().__init__(happened, expected=expected, remedy=remedy)
        self.rank = rank


# The causes of a rank's failure. An "absent" rank never joined; a "hanging" one runs but does not
# reach the collective in which the others wait; "other exchange" means another kind or size of
# collective; "exchange" is a collective that failed while all ranks were healthy.
Cause = Literal[
    "exception",
    "out of memory",
    "killed",
    "exit code",
    "ended early",
    "stopped",
    "hanging",
    "absent",
    "other exchange",
    "exchange",
]


class RankFailed(RunFailed):
    """One rank ended the run of all; ``rank`` is that one, or -1 if unknown."""

    def __init__(
        self,
        happened: str,
        *,
        expected: str,
        remedy: str,
        rank: int = -1,
        cause: Cause = "exchange",
    ) -> None:
        super().__init__(happened, expected=expected, remedy=remedy)
        self.rank = rank
        self.cause = cause
