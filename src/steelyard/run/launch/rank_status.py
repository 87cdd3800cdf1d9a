"""What a rank says of itself: how far it had come, and what ended it. Plain data, and its JSON.

Not for how it finds that out: see status_reporter.py. What a file says is read field by field and
never believed to be whole: a rank may be killed at any moment, and a person may edit files.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from steelyard.safe_text import printable


@dataclass(frozen=True, slots=True, kw_only=True)
class Issued:
    """A collective that a rank issued in one process group: which in a row, and what."""

    group: str
    number: int
    words: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RankProgress:
    """``issued``: the last of each group; ``lately``: the last of all, in order. ``is_waiting``:
    for an exchange, of whatever kind. ``line``: where the user's code was."""

    issued: tuple[Issued, ...] = ()
    lately: tuple[Issued, ...] = ()
    is_waiting: bool = False
    line: str = ""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def of_json(cls, found: Mapping[str, Any]) -> "RankProgress":
        return cls(
            issued=_issued(found.get("issued")),
            lately=_issued(found.get("lately")),
            is_waiting=found.get("is_waiting") is True,
            line=_text(found, "line"),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RankStatus:
    """An exception that ended a rank, as that rank saw it.

    ``of_input``: what was asked for cannot be honoured, on no rank and at no second try.
    ``of_exchange``: it came from talking to the others, who may be to blame. ``differs`` is the
    rank that does not hold what the others hold, and in what; ``absent`` one that never came,
    ``missed`` one that sent nothing through memory that ranks share. ``not_finite``: the loss was
    not, which all ranks find at once.
    """

    kind: str
    text: str
    line: str = ""
    at_seconds: float = 0.0
    of_input: bool = False
    of_exchange: bool = False
    of_memory: bool = False
    expected: str = ""
    remedy: str = ""
    differs: tuple[int, str] | None = None
    absent: int | None = None
    missed: int | None = None
    not_finite: bool = False
    progress: RankProgress = field(default_factory=RankProgress)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def of_json(cls, found: Mapping[str, Any]) -> "RankStatus":
        differs, progress = found.get("differs"), found.get("progress")
        seconds = found.get("at_seconds")
        return cls(
            kind=_text(found, "kind"),
            text=_text(found, "text"),
            line=_text(found, "line"),
            at_seconds=float(seconds) if isinstance(seconds, int | float) else 0.0,
            of_input=found.get("of_input") is True,
            of_exchange=found.get("of_exchange") is True,
            of_memory=found.get("of_memory") is True,
            expected=_text(found, "expected"),
            remedy=_text(found, "remedy"),
            differs=_differs(differs),
            absent=_rank(found, "absent"),
            missed=_rank(found, "missed"),
            not_finite=found.get("not_finite") is True,
            progress=RankProgress.of_json(progress if isinstance(progress, dict) else {}),
        )


def _issued(found: Any) -> tuple[Issued, ...]:
    return tuple(
        Issued(group=_text(entry, "group"), number=entry["number"], words=_text(entry, "words"))
        for entry in (found if isinstance(found, list) else ())
        if isinstance(entry, dict) and isinstance(entry.get("number"), int)
    )


def _rank(found: Mapping[str, Any], name: str) -> int | None:
    rank = found.get(name)
    return rank if isinstance(rank, int) else None


def _differs(found: Any) -> tuple[int, str] | None:
    if isinstance(found, list) and len(found) == 2 and isinstance(found[0], int):
        return found[0], str(found[1])
    return None


def _text(found: Mapping[str, Any], name: str) -> str:
    return printable(str(found.get(name, "")), most=400)
