"""Step durations for ranks that do unequal work or compute at unequal speed.

Each class of ranks has its own clock, and an exchange begins when the last rank has reached it.
Ranks wait for each other only at exchanges. A step is therefore measured from the end of the last
exchange in one step to the end of the last exchange in the next; so it begins with the optimizer's
update. Not for equal ranks: see timeline.py.
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
    """A class of equal ranks: the first of them, its program, and the costs on its device."""

    rank: int
    program: Program
    costs: CostTable

    @property
    def uniform_durations(self) -> Durations:
        """The durations of a step if all ranks were of this class."""
        program, update = self.program, self.program.update
        takes = durations(program, self.costs)
        if program.repeats > 1:
            before = takes if program.earlier is program else durations(program.earlier, self.costs)
            takes = before.scaled(program.repeats - 1) + takes
        return takes if update is None else takes + durations(update, self.costs)

    def update_seconds(self, pick: Pick) -> float:
        update = self.program.update
        return 0.0 if update is None else play(update, self.costs, device=pick).seconds


def rank_classes(program: Program, costs: CostTable) -> tuple[RankClass, ...]:
    """Return one class for each pair of a batch share and a device class in the layout."""
    if program.layout.num_ranks == 1 or not (program.sibling_programs or costs.devices):
        return (RankClass(rank=program.rank, program=program, costs=costs),)
    programs = {known.share: known for known in (program, *program.sibling_programs)}
    found: dict[tuple[int, object], RankClass] = {}
    for rank in range(program.layout.num_ranks):
        share, own = program.layout.share_of(rank), costs.of_rank(rank)
        if share in programs:  # a program for a single rank does not describe the other ranks
            one = RankClass(rank=rank, program=programs[share], costs=own)
            found.setdefault((share, own.device), one)
    return tuple(found.values())


def rank_seconds(program: Program, costs: CostTable) -> tuple[float, ...]:
    """Return the computation seconds of each rank in a step, without waiting."""
    costs = costs.on(program.layout.num_ranks)
    classes = rank_classes(program, costs)
    known = {
        (k.program.share, k.costs.device): k.uniform_durations.computation.value for k in classes
    }
    layout = program.layout
    return tuple(
        known[layout.share_of(rank), costs.of_rank(rank).device] for rank in range(layout.num_ranks)
    )


def combined_durations(classes: Sequence[RankClass]) -> Durations:
    """Return the durations of a step on ranks of several classes.

    Computation, communication and exposed time are those of the rank that computes longest; the
    step time is the same for all ranks.
    """
    per_class = [rank_class.uniform_durations for rank_class in classes]
    busiest = max(range(len(classes)), key=lambda n: per_class[n].computation.value)
    expected = _step(classes, busiest, device=value, link=value)
    quick = _step(classes, busiest, device=low, link=low)
    slow = _step(classes, busiest, device=high, link=high)
    return Durations(
        computation=per_class[busiest].computation,
        communication=per_class[busiest].communication,
        exposed=Estimate(
            value=expected.exposed,
            low=min(expected.exposed, _step(classes, busiest, device=high, link=low).exposed),
            high=max(expected.exposed, _step(classes, busiest, device=low, link=high).exposed),
        ),
        step=Estimate(value=expected.seconds, low=quick.seconds, high=slow.seconds),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _StepTime:
    seconds: float
    exposed: float


def _step(classes: Sequence[RankClass], busiest: int, *, device: Pick, link: Pick) -> _StepTime:
    """Simulate the update of each rank class and then the micro-batches.

    Micro-batches between the first and the last are equal, so one of them is simulated and
    multiplied.
    """
    clocks = [rank_class.update_seconds(device) for rank_class in classes]
    last, exposed = classes[0].program.repeats - 1, 0.0
    passes = [(0, 1)] if last == 0 else [(0, 1), (1, last - 1), (last, 1)]
    for number, times in passes:
        if times:
            played = play_synchronized(
                classes, begins=clocks, number=number, device=device, link=link
            )
            ends = synchronized_clocks(classes, played, number=number)
            clocks = [begin + times * (end - begin) for begin, end in zip(clocks, ends)]
            exposed += times * played[busiest].exposed_seconds
    return _StepTime(seconds=max(clocks), exposed=exposed)


def synchronized_clocks(
    classes: Sequence[RankClass], played: Sequence[Played], *, number: int
) -> list[float]:
    """Return each class's clock after a pass.

    If ranks exchange data in the pass, all of them end when the last one does.
    """
    ends = [one.seconds for one in played]
    program = classes[0].program.passes[number]
    issued = (program.graph.by_name[name].collective for name in program.graph.collectives)
    return [max(ends)] * len(ends) if any(c and not c.is_transfer for c in issued) else ends


def play_synchronized(
    classes: Sequence[RankClass],
    *,
    begins: Sequence[float],
    number: int = 0,
    device: Pick = value,
    link: Pick = value,
    make_clock: Callable[[RankClass], Playing] | None = None,
) -> list[Played]:
    """Simulate micro-batch ``number`` of each class, starting from its clock in ``begins``.

    ``make_clock``, if given, creates the ``Playing`` clock of each class, so that the caller can
    record it.
    """
    players = []
    for rank_class, begin in zip(classes, begins, strict=True):
        whole = device(rank_class.costs.whole_step_in(rank_class.program.parts))
        playing = (
            make_clock(rank_class) if make_clock else Playing(rank_class.costs, whole, device, link)
        )
        playing.clock = begin
        players.append(playing_through(rank_class.program.passes[number], playing))
    played: list[Played] = []
    reached: list[float | None] = [None] * len(players)
    while not played:
        # All ranks issue the same exchanges in order, so each of them reaches the next exchange or
        # the end.
        last = max((clock for clock in reached if clock is not None), default=None)
        for index, player in enumerate(players):
            try:
                reached[index] = player.send(last)
            except StopIteration as end:
                played.append(end.value)
    assert len(played) == len(players), "ranks issue different collectives"
    return played
