"""A rank's report on itself: its progress and the exception that ended it, as data and JSON.

Files are read field by field and may be incomplete, because a rank may be killed at any moment and
a person may edit files. Not for obtaining the report: see status_reporter.py.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from steelyard.safe_text import printable


@dataclass(frozen=True, slots=True, kw_only=True)
class Issued:
    """A collective that a rank issued in a process group, with its sequence number and a
    description."""

    group: str
    number: int
    words: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RankProgress:
    """The progress of a rank. ``issued``: the last collective of each group; ``lately``: the last
    ones of all groups, in order. ``is_waiting``: True if any exchange is pending. ``line``: the
    position in the user's code.
    """

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

    ``of_input``: the request cannot be honoured on any rank, even at a second attempt.
    ``of_exchange``: the exception came from communication, so another rank may be to blame.
    ``differs``: the rank whose item differs, and the item. ``absent``: a rank that never joined.
    ``missed``: a rank that sent nothing through shared memory. ``not_finite``: the loss was not
    finite, which all ranks find at the same time.
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
