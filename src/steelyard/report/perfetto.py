"""Exports a predicted step as a trace for Perfetto and chrome://tracing, one row per stream.

It uses complete events of the Trace Event Format (Google, 2016), in microseconds. Not for computing
the spans: see predict/trace.py.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from steelyard.plans.trace_span import DEVICE, WAITING, Span
from steelyard.units import format_seconds

_MICRO = 1e6


@dataclass(frozen=True, slots=True, kw_only=True)
class RankRow:
    """The busy and waiting time of one rank in a step; it is idle for the rest of the step."""

    rank: int
    step_seconds: float
    busy_seconds: float
    waiting_seconds: float

    @property
    def said(self) -> str:
        step, busy, waits = map(
            format_seconds, (self.step_seconds, self.busy_seconds, self.waiting_seconds)
        )
        return f"rank {self.rank}  ~{step} a step: computes ~{busy}, waits ~{waits} for other ranks"

    @property
    def figures(self) -> dict[str, float]:
        return {
            "rank": self.rank,
            "step_seconds": self.step_seconds,
            "busy_seconds": self.busy_seconds,
            "waiting_seconds": self.waiting_seconds,
        }


def by_rank(spans: Sequence[Span]) -> list[RankRow]:
    rows = []
    for rank in dict.fromkeys(span.rank for span in spans):
        own = [span for span in spans if span.rank == rank]
        rows.append(
            RankRow(
                rank=rank,
                step_seconds=max(span.end_seconds for span in own),
                busy_seconds=sum(span.seconds for span in own if span.stream == DEVICE),
                waiting_seconds=sum(span.seconds for span in own if span.stream == WAITING),
            )
        )
    return rows


def to_trace(spans: Sequence[Span], *, title: str) -> str:
    rows: dict[tuple[int, str], int] = {}
    for span in spans:
        rows.setdefault((span.rank, span.stream), len(rows))
    ranks = dict.fromkeys(rank for rank, _ in rows)
    named = [_metadata("process_name", rank, 0, f"rank {rank}") for rank in ranks]
    named += [_metadata("thread_name", rank, row, stream) for (rank, stream), row in rows.items()]
    events = [*named, *(_event(span, rows[span.rank, span.stream]) for span in spans)]
    document = {"displayTimeUnit": "ms", "otherData": {"title": title}, "traceEvents": events}
    return json.dumps(document) + "\n"


def _metadata(kind: str, rank: int, row: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": rank, "tid": row, "args": {"name": name}}


def _event(span: Span, row: int) -> dict[str, Any]:
    return {
        "ph": "X",
        "name": span.name,
        "pid": span.rank,
        "tid": row,
        "ts": span.begin_seconds * _MICRO,
        "dur": span.seconds * _MICRO,
        "args": {"where": span.where},
    }
