"""A trace of a predicted step: spans of each rank's work, its waits and its transfers.

It uses the same clock as the predicted seconds, so the trace ends at the predicted step time. Not
for drawing it: see report/perfetto.py.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from steelyard.ir.collective import Collective
from steelyard.ir.graph import Node
from steelyard.ir.program import Program
from steelyard.plans.trace_span import DEVICE, WAITING, Span
from steelyard.predict.cost_table import CostTable
from steelyard.predict.pipeline.step import pipelined
from steelyard.predict.timeline import Playing, play
from steelyard.predict.unequal_ranks import (
    RankClass,
    play_synchronized,
    rank_classes,
    synchronized_clocks,
)

# Of ranks that do the same work, at most this many are drawn.
_MOST_RANKS = 64


def spans(program: Program, costs: CostTable) -> tuple[Span, ...]:
    costs = costs.on(program.layout.num_ranks)
    if program.pipeline is not None:
        return pipelined(program, program.pipeline, costs).spans()
    ranks = range(min(program.layout.num_ranks, _MOST_RANKS))
    classes = rank_classes(program, costs)
    if len(classes) > 1:
        return tuple(_spans_of_unequal_ranks(classes, program, costs, ranks))
    one = list(_spans_of_one_rank(program, classes[0].costs))
    return tuple(replace(span, rank=rank) for rank in ranks for span in one)


def _spans_of_unequal_ranks(
    classes: Sequence[RankClass], program: Program, costs: CostTable, ranks: Iterable[int]
) -> Iterator[Span]:
    """Yield the spans of ranks whose clocks differ.

    Like the predicted step, they begin with each rank's update from the previous step, followed by
    the micro-batches.
    """
    drawn: dict[tuple[int, object], list[Span]] = {}
    clocks = []
    for each in classes:
        update = each.program.update
        own = drawn[each.program.share, each.costs.device] = []
        recording = _Recording(update or each.program, each.costs)
        clocks.append(
            play(update, each.costs, playing=recording).seconds if update is not None else 0.0
        )
        own += recording.spans
    for number in range(program.repeats):
        recordings: list[_Recording] = []

        def record(rank_class: RankClass, recordings: list["_Recording"] = recordings) -> Playing:
            recordings.append(_Recording(rank_class.program, rank_class.costs))
            return recordings[-1]

        played = play_synchronized(classes, begins=clocks, number=number, make_clock=record)
        for own, recording in zip(drawn.values(), recordings, strict=True):
            own += recording.spans
        clocks = synchronized_clocks(classes, played, number=number)
    for rank in ranks:
        own = drawn[program.layout.share_of(rank), costs.of_rank(rank).device]
        yield from (replace(span, rank=rank) for span in own)


def _spans_of_one_rank(program: Program, costs: CostTable) -> Iterator[Span]:
    """Yield the spans of all micro-batches, one after another, and of the update."""
    clock = 0.0
    for part in (*program.passes, *((program.update,) if program.update else ())):
        recording = _Recording(part, costs)
        played = play(part, costs, playing=recording)
        yield from (replace(s, begin_seconds=s.begin_seconds + clock) for s in recording.spans)
        clock += played.seconds


class _Recording(Playing):
    """A clock that records a span for each operator, wait and transfer."""

    def __init__(self, program: Program, costs: CostTable) -> None:
        super().__init__(costs, costs.whole_step_in(program.parts).value)
        self.spans: list[Span] = []

    def wait(self, issued: Collective, arrival: float) -> None:
        begin = self.clock
        super().wait(issued, arrival)
        self._record(WAITING, f"waiting for {issued.kind.value}", issued.axis, begin, self.clock)

    def take(self, node: Node, seconds: float) -> None:
        begin = self.clock
        super().take(node, seconds)
        self._record(DEVICE, node.op, node.path, begin, self.clock)

    def issue(self, collective: Collective, *, not_before: float = 0.0) -> float:
        begin = max(self.begins(collective), not_before)
        arrival = super().issue(collective, not_before=not_before)
        self._record(f"link {collective.link}", collective.kind.value, "", begin, arrival)
        return arrival

    def _record(self, stream: str, name: str, where: str, begin: float, end: float) -> None:
        if end > begin:
            self.spans.append(
                Span(
                    rank=0,
                    stream=stream,
                    name=name,
                    where=where,
                    begin_seconds=begin,
                    seconds=end - begin,
                )
            )
