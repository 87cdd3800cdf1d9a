"""Writes lines to a stream: with colour on a terminal, as plain text elsewhere.

Not for the contents: see text.py.
"""

import os
import shutil
import sys
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, TextIO

from steelyard.report.styled_text import Line, Tone, plain

if TYPE_CHECKING:
    from rich.console import Console

_STYLES = {
    Tone.PLAIN: "",
    Tone.STRONG: "bold",
    Tone.FAINT: "dim",
    Tone.GOOD: "green",
    Tone.BAD: "bold red",
}
_WIDTH = 100
_WIDEST = 120


def write(lines: Iterable[Line], stream: TextIO) -> None:
    if not wants_colour(stream, os.environ):
        stream.write(encodable(plain(lines), stream))
        stream.flush()
        return
    from rich.text import Text

    out = console(stream)
    for line in lines:
        spans = [(encodable(text, stream), _STYLES[tone]) for text, tone in line]
        out.print(Text.assemble(*spans), soft_wrap=True)


def console(stream: TextIO) -> "Console":
    """Return a rich console without highlighting, markup or emoji substitution."""
    from rich.console import Console

    return Console(
        file=stream,
        width=width_of(stream),
        highlight=False,
        markup=False,
        emoji=False,
        legacy_windows=False,
    )


def is_terminal(stream: TextIO) -> bool:
    try:
        return stream.isatty()
    except ValueError:  # the stream is closed
        return False


def wants_colour(stream: TextIO, environ: Mapping[str, str]) -> bool:
    """True for a terminal with colours, unless NO_COLOR is set (no-color.org: present and not
    empty).
    """
    return (
        is_terminal(stream)
        and not environ.get("NO_COLOR")
        and environ.get("TERM", "dumb") != "dumb"
    )


def width_of(stream: TextIO) -> int:
    if not is_terminal(stream):
        return _WIDTH
    return min(_WIDEST, shutil.get_terminal_size((80, 24)).columns)


def encodable(text: str, stream: TextIO) -> str:
    """Return ``text`` with escapes instead of characters that the stream cannot encode."""
    encoding = stream.encoding or "utf-8"
    return text.encode(encoding, "backslashreplace").decode(encoding)


def quieten(stream: TextIO) -> None:
    """Redirect a stream whose reader has closed it to the null device, with its buffered output."""
    try:
        sink = os.open(os.devnull, os.O_WRONLY)
        os.dup2(sink, stream.fileno())
        os.close(sink)
    except (OSError, ValueError):  # the stream has no file descriptor, or is closed
        if stream is sys.stdout:
            sys.stdout = open(os.devnull, "w")  # noqa: SIM115, PTH123 - lives as long as the process
