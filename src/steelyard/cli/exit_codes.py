"""The exit codes of commands, and the printing of errors in at most twelve lines.

Not for the wording of errors: see errors.py and report/errors.py.
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
# The code that a shell reports for a process that SIGTERM has ended. SIGTERM ends every command but
# run.
TERMINATED = 143
INTERRUPTED = 130
VERBS = ("fit", "plan", "run", "frontier", "explain", "export", "doctor", "demo")


class UnexpectedError(Exception):
    """Wraps an exception that is not a SteelyardError, with the activity that raised it."""

    def __init__(self, doing: str, exit_code: int) -> None:
        super().__init__(doing)
        self.doing = doing
        self.exit_code = exit_code


@contextlib.contextmanager
def user_code(doing: str, exit_code: int, *, in_json: bool) -> Iterator[None]:
    """Run user code: mark its exceptions as the user's, and keep its prints out of JSON output."""
    out = contextlib.redirect_stdout(sys.stderr) if in_json else contextlib.nullcontext()
    try:
        with out:
            yield
            handle_interrupts()
    except (SteelyardError, KeyboardInterrupt, BrokenPipeError):
        raise
    except (Exception, SystemExit) as error:
        raise UnexpectedError(doing, exit_code) from error


def is_launched_rank() -> bool:
    """True if this process is a rank that our launcher started, and whose errors the launcher
    reports.
    """
    return "STEELYARD_RANK_FOLDER" in os.environ


def report_failure(error: BaseException, given: Sequence[str]) -> int:
    """Print what went wrong, and return the exit code for it."""
    if isinstance(error, BrokenPipeError):
        # The reader of the output has closed it.
        quieten(sys.stdout)
        return OK
    failure = _failure_of(error, given)
    if is_launched_rank():
        return failure.exit_code  # the launcher of the ranks reports it once
    steps = afterwards(error.__cause__ or error)
    failure = replace(failure, remedy="; ".join((failure.remedy, *steps)))
    # One stream may be unusable, because its reader left, its terminal was closed or its disk is
    # full. The error must still go to the other one.
    with _silenced_on_error(sys.stderr):
        if "--debug" in given:
            traceback.print_exception(error.__cause__ or error, file=sys.stderr)
        write(failure_lines(failure, width=width_of(sys.stderr)), sys.stderr)
    if "--json" in given:
        from steelyard.report.output import show_json

        with _silenced_on_error(sys.stdout):
            show_json(failure.to_json())
    return failure.exit_code


@contextlib.contextmanager
def _silenced_on_error(stream: TextIO) -> Iterator[None]:
    """Silence the stream permanently if it cannot be written to."""
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
                expected="the name of a usable file",
                remedy="check the name",
                exit_code=BAD_INPUT,
            )
        case OSError():
            # Python would flush the stream once more at exit.
            quieten(sys.stdout)
            return Failure(
                kind="OutputError",
                happened=f"the output cannot be written: {error.strerror}",
                expected="a terminal, a pipe, or a file with room for it",
                remedy="free space, or redirect the output",
                exit_code=BAD_INPUT,
            )
        case _:
            return Failure.unexpected(error, doing="steelyard", exit_code=RUN_FAILED)
