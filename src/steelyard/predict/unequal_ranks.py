"""Ranks that do unequal work, or work at unequal speed: how they play their programs together.

Each has a clock of its own, and an exchange begins when the last rank has come to it. Ranks go from
step to step without waiting but there: so a step is reckoned from the end of one's last exchange to
that of the next, the optimizer's update first. Not for ranks that are alike: see timeline.py.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from steelyard.ir.metrics import Estimate
from steelyard.ir.program import Program
from steelyard.predict.cost_table import CostTable
from steelyard.predict.timeline import (
    Durations,
    Pick,
    Played,
    Playing,
    durations,
    high,
    low,
    play,
    playing_through,
    value,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankClass:
    """Ranks that are alike: the first of them, what it does, and what that costs there."""

    rank: int
    program: Program
    costs: CostTable

    @property
    def alone(self) -> Durations:
        """As if all ranks were of this kind."""
        program, update = self.program, self.program.update
        takes = durations(program, self.costs)
        if program.repeats > 1:
            before = takes if program.earlier is program else durations(program.earlier, self.costs)
            takes = before.scaled(program.repeats - 1) + takes
        return takes if update is None else takes + durations(update, self.costs)

    def update_seconds(self, pick: Pick) -> float:
        update = self.program.update
        return 0.0 if update is None else play(update, self.costs, device=pick).seconds


def kinds(program: Program, costs: CostTable) -> tuple[RankClass, ...]:
    """One for each share of the batch and each class of device, among the ranks it lies on."""
    if program.layout.num_ranks == 1 or not (program.sibling_programs or costs.devices):
        return (RankClass(rank=program.rank, program=program, costs=costs),)
    programs = {known.share: known for known in (program, *program.sibling_programs)}
    found: dict[tuple[int, object], RankClass] = {}
    for rank in range(program.layout.num_ranks):
        share, own = program.layout.share_of(rank), costs.of_rank(rank)
        if share in programs:  # of a program that is a rank's alone, what others do is not known
            kind = RankClass(rank=rank, program=programs[share], costs=own)
            found.setdefault((share, own.device), kind)
    return tuple(found.values())


def rank_seconds(program: Program, costs: CostTable) -> tuple[float, ...]:
    """What each rank works in a step, without what it waits."""
    costs = costs.on(program.layout.num_ranks)
    alike = kinds(program, costs)
    known = {(k.program.share, k.costs.device): k.alone.computation.value for k in alike}
    layout = program.layout
    return tuple(
        known[layout.share_of(rank), costs.of_rank(rank).device] for rank in range(layout.num_ranks)
    )


def together(alike: Sequence[RankClass]) -> Durations:
    """What is said of working and waiting is of the rank that works longest; the step is of all."""
    ones = [kind.alone for kind in alike]
    busiest = max(range(len(alike)), key=lambda n: ones[n].computation.value)
    expected = _step(alike, busiest, device=value, link=value)
    quick = _step(alike, busiest, device=low, link=low)
    slow = _step(alike, busiest, device=high, link=high)
    return Durations(
        computation=ones[busiest].computation,
        communication=ones[busiest].communication,
        exposed=Estimate(
            value=expected.exposed,
            low=min(expected.exposed, _step(alike, busiest, device=high, link=low).exposed),
            high=max(expected.exposed, _step(alike, busiest, device=low, link=high).exposed),
        ),
        step=Estimate(value=expected.seconds, low=quick.seconds, high=slow.seconds),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _RankProgress:
    seconds: float
    exposed: float


def _step(alike: Sequence[RankClass], busiest: int, *, device: Pick, link: Pick) -> _RankProgress:
    """The micro-batches behind each rank's update; those between the first and the last are
    alike."""
    clocks = [kind.update_seconds(device) for kind in alike]
    last, exposed = alike[0].program.repeats - 1, 0.0
    passes = [(0, 1)] if last == 0 else [(0, 1), (1, last - 1), (last, 1)]
    for number, times in passes:
        if times:
            played = in_step(alike, begins=clocks, number=number, device=device, link=link)
            ends = met(alike, played, number=number)
            clocks = [begin + times * (end - begin) for begin, end in zip(clocks, ends)]
            exposed += times * played[busiest].exposed_seconds
    return _RankProgress(seconds=max(clocks), exposed=exposed)


def met(alike: Sequence[RankClass], played: Sequence[Played], *, number: int) -> list[float]:
    """The clocks behind a pass: of ranks that exchange in it, the last one's."""
    ends = [one.seconds for one in played]
    program = alike[0].program.passes[number]
    issued = (program.graph.by_name[name].collective for name in program.graph.collectives)
    return [max(ends)] * len(ends) if any(c and not c.is_far for c in issued) else ends


def in_step(
    alike: Sequence[RankClass],
    *,
    begins: Sequence[float],
    number: int = 0,
    device: Pick = value,
    link: Pick = value,
    watching: Callable[[RankClass], Playing] | None = None,
) -> list[Played]:
    """Micro-batch ``number`` of each kind, from where its clock stands; ``watching`` makes who
    keeps the clocks, where somebody wants to watch."""
    players = []
    for kind, begin in zip(alike, begins, strict=True):
        whole = device(kind.costs.whole_step_in(kind.program.parts))
        playing = watching(kind) if watching else Playing(kind.costs, whole, device, link)
        playing.clock = begin
        players.append(playing_through(kind.program.passes[number], playing))
    played: list[Played] = []
    come: list[float | None] = [None] * len(players)
    while not played:
        # All exchange the same in the same order, so all come to the next one, or to the end.
        asked = max((clock for clock in come if clock is not None), default=None)
        for place, player in enumerate(players):
            try:
                come[place] = player.send(asked)
            except StopIteration as end:
                played.append(end.value)
    assert len(played) == len(players), "ranks exchange different things"
    return played
