"""How a command ends: its exit code, and at most twelve lines about what went wrong.

Not for the words of an error: see errors.py and report/errors.py.
"""

import contextlib
import os
import sys
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TextIO

from cyclopts import CycloptsError

from steelyard.cli.signals import handle_interrupts
from steelyard.errors import SteelyardError, afterwards
from steelyard.report.errors import Failure, failure_lines
from steelyard.report.terminal import quieten, width_of, write
from steelyard.safe_text import printable

OK, BAD_INPUT, INFEASIBLE, RUN_FAILED, MISSED = 0, 2, 3, 4, 5
# What a shell says of a process that SIGTERM ended, as it ends every verb but run.
TERMINATED = 143
INTERRUPTED = 130
VERBS = ("plan", "run", "frontier", "explain", "doctor", "demo")


class UnexpectedError(Exception):
    """Something that is no error of ours was raised while doing this."""

    def __init__(self, doing: str, exit_code: int) -> None:
        super().__init__(doing)
        self.doing = doing
        self.exit_code = exit_code


@contextlib.contextmanager
def foreseen(doing: str, exit_code: int, *, in_json: bool) -> Iterator[None]:
    """Run what may run a user's code: its errors are named as such, its prints kept out of JSON."""
    out = contextlib.redirect_stdout(sys.stderr) if in_json else contextlib.nullcontext()
    try:
        with out:
            yield
            handle_interrupts()
    except (SteelyardError, KeyboardInterrupt, BrokenPipeError):
        raise
    except (Exception, SystemExit) as error:
        raise UnexpectedError(doing, exit_code) from error


def is_watched() -> bool:
    """Whether this is a rank that our launcher started, which will say what went wrong."""
    return "STEELYARD_RANK_FOLDER" in os.environ


def ended(error: BaseException, given: Sequence[str]) -> int:
    """Say what happened, and return the exit code that says it too."""
    if isinstance(error, BrokenPipeError):
        # Whoever read the output has seen enough.
        quieten(sys.stdout)
        return OK
    failure = _failure_of(error, given)
    if is_watched():
        return failure.exit_code  # it is told by whoever started the ranks, once
    steps = afterwards(error.__cause__ or error)
    failure = replace(failure, remedy="; ".join((failure.remedy, *steps)))
    # A reader of the one who left, a terminal that was closed or a disk that is full is no reason
    # to keep it from the other.
    with _quietened(sys.stderr):
        if "--debug" in given:
            traceback.print_exception(error.__cause__ or error, file=sys.stderr)
        write(failure_lines(failure, width=width_of(sys.stderr)), sys.stderr)
    if "--json" in given:
        from steelyard.report.output import show_json

        with _quietened(sys.stdout):
            show_json(failure.to_json())
    return failure.exit_code


@contextlib.contextmanager
def _quietened(stream: TextIO) -> Iterator[None]:
    """A stream that cannot be written to is given up."""
    try:
        yield
    except OSError:
        quieten(stream)


def _failure_of(error: BaseException, given: Sequence[str]) -> Failure:
    match error:
        case SteelyardError():
            return Failure.of(error)
        case CycloptsError():
            verb = given[0] if given and given[0] in VERBS else ""
            return Failure(
                kind="Usage",
                happened=str(error),
                remedy=f"steelyard {verb} --help".replace("  ", " "),
                exit_code=BAD_INPUT,
            )
        case UnexpectedError():
            cause = error.__cause__ or error
            return Failure.unexpected(cause, doing=error.doing, exit_code=error.exit_code)
        case OSError() if error.filename is not None:
            return Failure(
                kind="BadInput",
                happened=f"{printable(str(error.filename))} cannot be used: {error.strerror}",
                expected="the name of a file that can be",
                remedy="check the name",
                exit_code=BAD_INPUT,
            )
        case OSError():
            # A stream, which Python would flush once more at its end.
            quieten(sys.stdout)
            return Failure(
                kind="OutputError",
                happened=f"the output cannot be written: {error.strerror}",
                expected="a terminal, a pipe, or a file with room for it",
                remedy="make room, or send the output elsewhere",
                exit_code=BAD_INPUT,
            )
        case _:
            return Failure.unexpected(error, doing="steelyard", exit_code=RUN_FAILED)
