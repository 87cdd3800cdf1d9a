"""A predicted step drawn out: what each rank does when, and what is on its way.

The same clock as the predicted seconds, so that the picture ends where the figure does. Not for
pictures: see report/perfetto.py.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from steelyard.ir.collective import Collective
from steelyard.ir.graph import Node
from steelyard.ir.program import Program
from steelyard.ir.trace_span import DEVICE, WAITING, Span
from steelyard.predict.cost_table import CostTable
from steelyard.predict.pipeline.step import pipelined
from steelyard.predict.timeline import Playing, play
from steelyard.predict.unequal_ranks import RankClass, in_step, kinds, met

# Ranks that do the same are drawn so often, and no more.
_MOST_RANKS = 64


def spans(program: Program, costs: CostTable) -> tuple[Span, ...]:
    costs = costs.on(program.layout.num_ranks)
    if program.pipeline is not None:
        return pipelined(program, program.pipeline, costs).spans()
    ranks = range(min(program.layout.num_ranks, _MOST_RANKS))
    alike = kinds(program, costs)
    if len(alike) > 1:
        return tuple(_of_unlike_ranks(alike, program, costs, ranks))
    one = list(_of_one_rank(program, alike[0].costs))
    return tuple(replace(span, rank=rank) for rank in ranks for span in one)


def _of_unlike_ranks(
    alike: Sequence[RankClass], program: Program, costs: CostTable, ranks: Iterable[int]
) -> Iterator[Span]:
    """As their step is reckoned: each rank's update of the step before, and the micro-batches."""
    drawn: dict[tuple[int, object], list[Span]] = {}
    clocks = []
    for kind in alike:
        update = kind.program.update
        own = drawn[kind.program.share, kind.costs.device] = []
        recording = _Recording(update or kind.program, kind.costs)
        clocks.append(
            play(update, kind.costs, playing=recording).seconds if update is not None else 0.0
        )
        own += recording.spans
    for number in range(program.repeats):
        watched: list[_Recording] = []

        def watching(kind: RankClass, watched: list["_Recording"] = watched) -> Playing:
            watched.append(_Recording(kind.program, kind.costs))
            return watched[-1]

        played = in_step(alike, begins=clocks, number=number, watching=watching)
        for own, recording in zip(drawn.values(), watched, strict=True):
            own += recording.spans
        clocks = met(alike, played, number=number)
    for rank in ranks:
        of = drawn[program.layout.share_of(rank), costs.of_rank(rank).device]
        yield from (replace(span, rank=rank) for span in of)


def _of_one_rank(program: Program, costs: CostTable) -> Iterator[Span]:
    """Every micro-batch, each behind the one before, and the update."""
    clock = 0.0
    for part in (*program.passes, *((program.update,) if program.update else ())):
        recording = _Recording(part, costs)
        played = play(part, costs, playing=recording)
        yield from (replace(s, begin_seconds=s.begin_seconds + clock) for s in recording.spans)
        clock += played.seconds


class _Recording(Playing):
    """Notes down what the clock goes through."""

    def __init__(self, program: Program, costs: CostTable) -> None:
        super().__init__(costs, costs.whole_step_in(program.parts).value)
        self.spans: list[Span] = []

    def wait(self, issued: Collective, arrival: float) -> None:
        begin = self.clock
        super().wait(issued, arrival)
        self._note(WAITING, f"for {issued.kind.value}", issued.axis, begin, self.clock)

    def take(self, node: Node, seconds: float) -> None:
        begin = self.clock
        super().take(node, seconds)
        self._note(DEVICE, node.op, node.path, begin, self.clock)

    def issue(self, collective: Collective, *, not_before: float = 0.0) -> float:
        begin = max(self.begins(collective), not_before)
        arrival = super().issue(collective, not_before=not_before)
        self._note(f"link {collective.link}", collective.kind.value, "", begin, arrival)
        return arrival

    def _note(self, stream: str, name: str, where: str, begin: float, end: float) -> None:
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
