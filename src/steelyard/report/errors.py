"""Renders a failure as a few lines, the last of which says what to do next, or as a JSON object.

Not for the exception classes: see steelyard/errors.py.
"""

import sysconfig
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from steelyard.errors import SteelyardError
from steelyard.report.styled_text import Line, Tone, words
from steelyard.safe_text import printable

_MOST_LINES = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """A failure: what happened, what was expected, what to do next, and the exit code."""

    kind: str
    happened: str
    expected: str = ""
    remedy: str
    exit_code: int

    @classmethod
    def of(cls, error: SteelyardError) -> Self:
        return cls(
            kind=type(error).__name__,
            happened=error.happened,
            expected=error.expected,
            remedy=error.remedy,
            exit_code=error.exit_code,
        )

    @classmethod
    def unexpected(cls, error: BaseException, *, doing: str, exit_code: int) -> Self:
        """Describe an exception that is not Steelyard's; most often it comes from user code."""
        name = type(error).__name__
        message = printable(str(error).strip().split("\n")[0], most=300)
        where = users_line(error)
        remedy = f"correct {where}, or see the traceback with --debug"
        if isinstance(error, MemoryError) or "allocate memory" in message or "OutOfMemory" in name:
            remedy = "plan with a smaller --memory; see the traceback with --debug"
        elif not where:
            remedy = (
                "see the traceback with --debug, and report the error if it is not in your code"
            )
        return cls(
            kind=name,
            happened=f"{doing} failed{f' at {where}' if where else ''}\n"
            f"  {name}{f': {message}' if message else ''}",
            remedy=remedy,
            exit_code=exit_code,
        )

    def to_json(self) -> dict[str, object]:
        return {
            "schema": "steelyard.error/1",
            "kind": self.kind,
            "happened": self.happened,
            "expected": self.expected,
            "next": self.remedy,
            "exit_code": self.exit_code,
        }


def failure_lines(failure: Failure, *, width: int) -> tuple[Line, ...]:
    """Render at most twelve lines; the cause may be truncated, but not the remedy."""
    happened = words(f"steelyard: {failure.happened}", width=width, tone=Tone.BAD)
    expected = words(f"expected: {failure.expected}", width=width)[:3] if failure.expected else ()
    remedy = words(f"next: {failure.remedy}", width=width, tone=Tone.STRONG)[: _MOST_LINES - 5]
    most_happened = _MOST_LINES - len(remedy) - len(expected)
    if len(happened) > most_happened:
        happened = (*happened[: most_happened - 1], (("  ...", Tone.BAD),))
    return (*happened, *expected, *remedy)


def users_line(error: BaseException) -> str:
    """Return the innermost line of user code in a traceback, as ``train.py:12 in workload``.

    Lines of installed packages and of Steelyard are skipped.
    """
    if isinstance(error, SyntaxError) and error.filename:
        return f"{Path(error.filename).name}:{error.lineno}"
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if not _is_installed(frame.filename):
            inside = "" if frame.name == "<module>" else f" in {frame.name}"
            return f"{Path(frame.filename).name}:{frame.lineno}{inside}"
    return ""


_INSTALLED = tuple(
    str(Path(sysconfig.get_path(name)).resolve()) for name in ("stdlib", "purelib", "platlib")
)
_OURS = str(Path(__file__).resolve().parents[1])


def _is_installed(filename: str) -> bool:
    if filename.startswith("<"):
        return True
    path = str(Path(filename).resolve())
    return path.startswith((*_INSTALLED, _OURS))
