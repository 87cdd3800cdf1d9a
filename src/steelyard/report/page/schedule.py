"""The schedule of the ranks as blocks that can be drawn: neighbouring spans of a module are joined.

Not for computing the spans: see predict/trace.py.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from steelyard.plans.trace_span import DEVICE, WAITING, Span
from steelyard.report.peak_groups import short_op

MOST_RANKS, MOST_BLOCKS = 8, 250
_DEEPEST = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleBlock:
    """A part of a row; ``num_spans`` spans were joined."""

    where: str
    what: str
    begin_seconds: float
    end_seconds: float
    num_spans: int = 1

    @property
    def seconds(self) -> float:
        return self.end_seconds - self.begin_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleRow:
    """The blocks of one stream of a rank."""

    rank: int
    stream: str
    blocks: tuple[ScheduleBlock, ...]

    @property
    def is_device(self) -> bool:
        return self.stream == DEVICE

    @property
    def is_waiting(self) -> bool:
        return self.stream == WAITING


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleTime:
    """The time of a stream of a rank in one module, for the table beside the chart."""

    rank: int
    stream: str
    where: str
    count: int
    seconds: float


def blocks_of(spans: Sequence[Span]) -> tuple[ScheduleRow, ...]:
    """Return a row for each stream of the first ranks, each with a limited number of blocks."""
    ranks = sorted({span.rank for span in spans})[:MOST_RANKS]
    rows: dict[tuple[int, str], list[Span]] = {}
    for span in spans:
        if span.rank in ranks:
            rows.setdefault((span.rank, span.stream), []).append(span)
    return tuple(
        ScheduleRow(rank=rank, stream=stream, blocks=_joined(rows[rank, stream]))
        for rank, stream in sorted(rows, key=lambda row: (row[0], row[1] != DEVICE, row[1]))
    )


def times_of(spans: Sequence[Span]) -> tuple[ModuleTime, ...]:
    """Return the total time of each first part of a module path, longest first in each row."""
    total: dict[tuple[int, str, str], list[float]] = {}
    for span in spans:
        where = _shortened(span.where, 2) or span.name
        total.setdefault((span.rank, span.stream, where), []).append(span.seconds)
    found = [
        ModuleTime(rank=r, stream=s, where=w, count=len(each), seconds=sum(each))
        for (r, s, w), each in total.items()
    ]
    return tuple(sorted(found, key=lambda t: (t.rank, t.stream != DEVICE, t.stream, -t.seconds)))


def _joined(spans: Sequence[Span]) -> tuple[ScheduleBlock, ...]:
    ordered = sorted(spans, key=lambda span: span.begin_seconds)
    if len(ordered) <= MOST_BLOCKS:
        return tuple(_block([span], span.where) for span in ordered)
    for depth in range(_DEEPEST, 0, -1):
        groups: list[tuple[str, list[Span]]] = []
        for span in ordered:
            where = _shortened(span.where, depth)
            if groups and groups[-1][0] == where:
                groups[-1][1].append(span)
            else:
                groups.append((where, [span]))
        if len(groups) <= MOST_BLOCKS:
            return tuple(_block(each, where) for where, each in groups)
    size = -(-len(ordered) // MOST_BLOCKS)
    return tuple(
        _block(ordered[i : i + size], "several modules") for i in range(0, len(ordered), size)
    )


def _block(spans: Sequence[Span], where: str) -> ScheduleBlock:
    names = list(dict.fromkeys(short_op(span.name) for span in spans))
    shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
    return ScheduleBlock(
        where=where,
        what=shown,
        begin_seconds=spans[0].begin_seconds,
        end_seconds=max(span.end_seconds for span in spans),
        num_spans=len(spans),
    )


def _shortened(path: str, depth: int) -> str:
    return ".".join(path.split(".")[:depth])
