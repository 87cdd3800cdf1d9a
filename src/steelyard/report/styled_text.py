"""Lines of styled text: spans of text with a style, wrapping and columns.

``shown`` escapes control characters, so that no name in a plan can control the terminal. Not for
colours (see terminal.py) or for the contents (see document.py).
"""

import re
import textwrap
from collections.abc import Iterable, Sequence
from enum import StrEnum

from steelyard.safe_text import printable


class Tone(StrEnum):
    PLAIN = "plain"
    STRONG = "strong"
    FAINT = "faint"
    GOOD = "good"
    BAD = "bad"


class Zoom(StrEnum):
    """The level of detail: the receipt, its offers, the peak's live tensors, or the curve."""

    RECEIPT = "receipt"
    OFFERS = "offers"
    PEAK = "peak"
    FRONTIER = "frontier"


Span = tuple[str, Tone]
Line = tuple[Span, ...]

NARROW = 72


def plain(lines: Iterable[Line]) -> str:
    return "".join("".join(text for text, _ in line).rstrip() + "\n" for line in lines)


def words(text: str, *, width: int, tone: Tone = Tone.PLAIN) -> tuple[Line, ...]:
    """Wrap free text into lines, for output that is not part of a document tree."""
    return shown([line for part in text.split("\n") for line in headed("", part, width, tone)])


def shown(lines: Sequence[Line]) -> tuple[Line, ...]:
    """Make all text printable; every line goes through here before it is written to a terminal."""
    return tuple(
        tuple((printable(text, most=10_000), tone) for text, tone in line) for line in lines
    )


def headed(
    head: str, text: str, width: int, tone: Tone = Tone.PLAIN, *, head_tone: Tone = Tone.PLAIN
) -> list[Line]:
    """Render ``head`` in a left column and ``text`` wrapped to its right, or below it if narrow."""
    if width < NARROW and len(head) > 4:
        head = head.rstrip()
        lines = folded(f"{head} {text}", width, indent="  ")
        first: Line = ((head, head_tone), (lines[0][len(head) :], tone))
        return [first, *(((l, tone),) for l in lines[1:])]
    lines = folded(text, width - len(head))
    blank = " " * len(head)
    return [
        ((head if i == 0 else blank, head_tone if i == 0 else Tone.PLAIN), (l, tone))
        for i, l in enumerate(lines)
    ]


def indented(text: str, width: int) -> list[Line]:
    start = " " * (len(text) - len(text.lstrip()) + 2)
    lines = folded(text.strip(), width - len(start), indent="  ")
    return [((start + l, Tone.PLAIN),) for l in lines]


_AMOUNT = re.compile(r"(?<=\d) (?=(?:[KMGT]iB|B|[mun]?s|h|%)\b|%)")
_UNBROKEN = "\N{NO-BREAK SPACE}"


def unbroken(text: str) -> str:
    """Return ``text`` with a no-break space between each number and its unit."""
    return _AMOUNT.sub(_UNBROKEN, text)


def folded(text: str, width: int, *, indent: str = "") -> list[str]:
    """Wrap text to lines of at most ``width``, without separating a number from its unit."""
    safe = unbroken(printable(text, most=2000))
    lines = textwrap.wrap(safe, max(16, width), subsequent_indent=indent)
    return [l.replace(_UNBROKEN, " ") for l in lines] or [""]
