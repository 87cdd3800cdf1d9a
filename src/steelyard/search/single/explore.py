"""Find the plans between the unplanned step and the least memory it can run in.

One exploration answers every budget, so that a larger budget is never answered by a slower plan.
Not for choosing among what was found: see search.py.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from steelyard.ir.graph import BlockRun, Graph
from steelyard.ir.program import Program
from steelyard.ir.rule import CallSite, Rule, spot_of, spots, starred, to_rules
from steelyard.predict.cost_table import CostTable
from steelyard.search.pareto_front import ParetoFront, Point
from steelyard.search.single.baseline_plans import simple_plans
from steelyard.search.single.evaluated_sets import Trials
from steelyard.search.single.fast_estimator import FastEstimator
from steelyard.search.single.local_search import LocalSearch
from steelyard.search.single.min_cut import MinCut
from steelyard.search.single.multi_recompute import recompute_repeatedly
from steelyard.search.single.price_sweep import (
    Gaps,
    coded_sweep,
    far_sweep,
    packed_sweep,
    priced_sweep,
    uniform_sweep,
)
from steelyard.search.single.transfer_timing import TransferMode

_LIMITS = 24
_ROUNDS, _FAR_ROUNDS = 20, 8
# Trials of each descent: by whole runs of blocks, by single values, and by these of parts.
_WHOLE_EFFORTS, _EFFORTS, _EFFORTS_ON_PARTS = (250,), (500, 1000), (250,)
# Trials times lines of the program: small programs are searched harder, none for long.
_KICKING_WORK = 20_000_000
_KICKS_PER_LIMIT = 4
_WORTH_KICKING = 0.995
# Plans that treat the blocks of a run alike make short files; this much time is given for that.
_WORTH_A_SHORT_PLAN = 1.001


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Explored:
    """``chain``: a plan for each amount of memory, by rising peak and strictly falling seconds."""

    tally: FastEstimator
    chain: tuple[Point, ...]
    groups: tuple[frozenset[int], ...]
    trials: int

    def within(self, peak_bytes: int | None) -> Point | None:
        fitting = [p for p in self.chain if peak_bytes is None or p.peak_bytes <= peak_bytes]
        return fitting[-1] if fitting else None

    @property
    def least(self) -> Point:
        return self.chain[0]

    @property
    def plain(self) -> Point:
        return self.chain[-1]

    def values(self, point: Point) -> dict[str, int]:
        """What to recompute, and how often."""
        tally, choice = self.tally, self.choice(point)
        times = tally.times_of(choice)
        return {tally.value_on[s]: times.get(s, 1) for s in choice if tally.is_again(s)}

    def moved(self, point: Point) -> dict[str, tuple[int, int]]:
        """What to move to offload memory, with the lag and the lead of each."""
        return self.tally.lags_and_leads(self.choice(point))

    def in_slices(self, point: Point) -> dict[str, int]:
        """What of that comes back in slices, and in how many."""
        return self.tally.in_slices(self.choice(point))

    def unsliced(self, point: Point) -> Point:
        """The same, but what comes back in slices comes back whole."""
        again = self.tally.unsliced(self.choice(point))
        counted = self.tally.count(again)
        return Point(peak_bytes=counted.peak_bytes, seconds=counted.seconds, again=again)

    def coded(self, point: Point) -> frozenset[str]:
        """What to keep in 8 bits."""
        tally = self.tally
        away = tally.count(self.choice(point)).away
        return frozenset(tally.value_away(c) for c in away if tally.is_coded(c))

    def choice(self, point: Point) -> frozenset[int]:
        """What was chosen; where it changes nothing, in all blocks of a run alike."""
        again = point.again
        for group in self.groups:
            if group & again and not group <= again:
                more = self.tally.count(again | group)
                if more.peak_bytes <= point.peak_bytes and more.seconds <= point.seconds:
                    again |= group
        return again


def explore(
    program: Program,
    costs: CostTable,
    values: Iterable[str],
    movable: Iterable[str] = (),
    codable: Iterable[str] = (),
    slices: Mapping[str, int] = MappingProxyType({}),
    *,
    known: "Explored | None" = None,
    thorough: bool = True,
    repeats: bool = True,
    briefly: bool = False,
) -> Explored:
    """``values`` may be recomputed, ``repeats`` than once or not, ``movable`` ones sent to far
    memory, those with ``slices`` to come back so, ``codable`` ones kept in 8 bits; plans for
    ``known``, this step cut otherwise, are a start. ``briefly``: only plans that are known
    beforehand, for a budget that asks for none of them."""
    tally = FastEstimator(program, costs, values, movable, codable, slices)
    trials = Trials(tally)
    groups = _groups(tally)
    choices = [*tally.unit_of, *tally.elsewhere()]
    if choices:
        if known is not None:
            _start_from(trials, known)
        _sweep(trials)
    if choices and not briefly:
        if len(groups) < len(choices):
            _improve(trials, LocalSearch(trials, groups, are_whole=True), efforts=_WHOLE_EFFORTS)
        moves = LocalSearch(trials, (frozenset({s}) for s in choices), are_whole=False)
        _improve(trials, moves, efforts=_EFFORTS if thorough else _EFFORTS_ON_PARTS)
        if thorough:
            _kick(trials, moves)
        if repeats and tally.unit_of:
            recompute_repeatedly(trials)
    chain = chained(trials.archive, trials.whole)
    return Explored(tally=tally, chain=chain, groups=tuple(groups), trials=trials.made)


def sketch(program: Program, costs: CostTable, values: Iterable[str]) -> Explored:
    """Only the plans that are known beforehand: for whoever asks what could be had about so."""
    tally = FastEstimator(program, costs, values)
    trials = Trials(tally)
    if tally.unit_of:
        _sweep(trials)
    chain = chained(trials.archive, trials.whole)
    return Explored(tally=tally, chain=chain, groups=(), trials=trials.made)


def reapplied(program: Program, costs: CostTable, *, known: Explored) -> Explored:
    """The same plans of the same pass, with another update behind it."""
    ours = known.tally
    again, far, coded = (
        v.values() for v in (ours.value_on, ours.far_value_on, ours.coded_value_on)
    )
    trials = Trials(FastEstimator(program, costs, again, far, coded, ours.slices))
    for point in known.chain:
        trials.point(point.again)
    return Explored(
        tally=trials.tally,
        chain=tuple(trials.archive),
        groups=known.groups,
        trials=trials.made,
    )


def few(chain: Sequence[Point], count: int) -> list[Point]:
    """Some of these plans: the one of least memory, the fastest, others between."""
    last = len(chain) - 1
    numbers = dict.fromkeys(last * i // (count - 1) for i in range(count))
    return [chain[number] for number in numbers]


def carried(values: Iterable[str], graph: Graph, to: FastEstimator) -> frozenset[str]:
    """The same values in another trace of the step, as far as they can be recomputed there."""
    possible = set(to.value_on.values())
    return frozenset(name for name in _there(values, graph, to).values() if name in possible)


def carried_choice(
    tally: FastEstimator, choice: frozenset[int], to: FastEstimator
) -> frozenset[int]:
    """The same choice in another trace of the step, as far as it can be made there."""
    graph, times = tally.program.graph, tally.times_of(choice)
    found: set[int] = set()
    again = {tally.value_on[c]: times.get(c, 1) for c in choice if tally.is_again(c)}
    able = {value: storage for storage, value in to.value_on.items()}
    for value, there in _there(again, graph, to).items():
        if there in able:
            same = able[there]
            found.update((same, *(to.often(same, more) for more in range(2, 1 + again[value]))))
    far = {value: storage for storage, value in to.far_value_on.items()}
    coded = {value: storage for storage, value in to.coded_value_on.items()}
    away = {tally.value_away(c): c for c in choice if tally.is_far(c) or tally.is_coded(c)}
    for value, there in _there(away, graph, to).items():
        if tally.is_coded(away[value]):
            found.update([to.coded(coded[there])] if there in coded else [])
        elif there in far:
            way = tally.way(away[value])
            found.add(to.far(far[there], way if far[there] in to.sliced else way.whole))
    return frozenset(found)


def again_rules(graph: Graph, times: Mapping[str, int]) -> tuple[Rule, ...]:
    """The rules that make each of these values again so many times at most."""
    return tuple(
        rule
        for number in sorted(set(times.values()))
        for rule in to_rules(
            graph, (v for v, own in times.items() if own == number), trade="recompute", times=number
        )
    )


def _there(values: Iterable[str], graph: Graph, to: FastEstimator) -> dict[str, str]:
    """Names here and in the other trace."""
    there = spots(to.program.graph)
    found = {v: spot_of(graph, graph.by_name[v]) for v in values}
    return {v: there[spot] for v, spot in found.items() if spot is not None and spot in there}


def _start_from(trials: Trials, known: Explored) -> None:
    for point in known.chain:
        trials.point(carried_choice(known.tally, point.again, trials.tally))


def _sweep(trials: Trials) -> None:
    cut = MinCut(trials.tally)
    gaps = Gaps(trials.tally, cut.kept)
    uniform_sweep(trials, cut, gaps)
    packed_sweep(trials, cut, gaps)
    for plan in simple_plans(trials.tally):
        trials.point(plan)
    peak = trials.plain.peak_bytes
    limits = [round(peak * (1 - i / (_LIMITS + 3))) for i in range(1, _LIMITS + 1)]
    priced_sweep(trials, cut, gaps, limits=limits, rounds=_ROUNDS)
    if trials.tally.coded_value_on:
        coded_sweep(trials, cut, gaps, limits=limits[::2], rounds=_ROUNDS)
        _all_coded(trials)
    if trials.tally.far_value_on:
        far_sweep(trials, cut, gaps, limits=limits[::3], rounds=_FAR_ROUNDS)
        _all_far(trials)


def _all_far(trials: Trials) -> None:
    """Whatever the link costs: the first value to move pays for the pieces too, and alone it may
    buy nothing, so that no single move leads here from a plan that moves none."""
    tally = trials.tally
    for point in (trials.plain, *trials.archive.hull()):
        for way in TransferMode:
            if not way.is_sliced or tally.sliced:
                trials.point(
                    point.again
                    | {
                        tally.far(s, way if s in tally.sliced else way.whole)
                        for s in tally.far_value_on
                    }
                )


def _all_coded(trials: Trials) -> None:
    """All that could be kept in 8 bits, beside what is made again in each plan so far."""
    everything = {trials.tally.coded(s) for s in trials.tally.coded_value_on}
    for point in (trials.plain, *trials.archive.hull()):
        trials.point(point.again | everything)


def _improve(trials: Trials, moves: LocalSearch, *, efforts: tuple[int, ...]) -> None:
    known = trials.whole if moves.are_whole else trials.archive
    moves.seed(trials.archive.hull())
    for effort in efforts:
        moves.relink(known.hull())
        moves.descend(trials=effort)
        moves.relink(known.hull())
        for limit in _limits(known):
            moves.settle(limit)
    for limit in _limits(known):
        moves.exchange(limit, trials=40)
    moves.relink(known.hull())


def _kick(trials: Trials, moves: LocalSearch) -> None:
    """Until it hardly helps any more, or enough was done for a program of this size."""
    enough = _KICKING_WORK // (200 + trials.tally.num_lines)
    limits = _limits(trials.archive)
    stale = number = 0
    before = _overhead(trials, limits)
    while stale < 2 and trials.made < enough:
        for limit in limits:
            moves.kick(limit, times=_KICKS_PER_LIMIT, seed=number)
        moves.relink(trials.archive.hull())
        after = _overhead(trials, limits)
        stale = stale + 1 if after >= before * _WORTH_KICKING else 0
        before = after
        number += 1


def _overhead(trials: Trials, limits: Iterable[int]) -> float:
    """Seconds paid for memory, over all limits."""
    points = (trials.archive.within(limit) for limit in limits)
    return sum(p.seconds - trials.plain.seconds for p in points if p is not None)


def _limits(known: ParetoFront) -> list[int]:
    low, high = known.least.peak_bytes, known.fastest.peak_bytes
    return [round(low + (high - low) * i / _LIMITS) for i in range(_LIMITS + 1)]


def _groups(tally: FastEstimator) -> list[frozenset[int]]:
    """The same value in all blocks of a run, as one atom."""
    graph = tally.program.graph
    runs = sorted(graph.runs, key=lambda r: -len(r.prefix))
    members: dict[tuple[CallSite, int], set[int]] = {}
    again = ((storage, value, 0) for storage, value in tally.value_on.items())
    away = ((c, tally.value_away(c), c // len(tally.nbytes)) for c in tally.elsewhere())
    for choice, value, how in (*again, *away):
        spot = spot_of(graph, graph.by_name[value])
        assert spot is not None
        members.setdefault((_pattern(spot, runs), how), set()).add(choice)
    return [frozenset(m) for m in members.values()]


def _pattern(spot: CallSite, runs: list[BlockRun]) -> CallSite:
    for run in runs:
        module = starred(spot.module, run)
        if module is not None:
            # Two runs of one list must not be taken for one.
            return CallSite(f"{run.first}:{module}", spot.op, spot.nth)
    return spot


def chained(archive: ParetoFront, whole: ParetoFront) -> tuple[Point, ...]:
    """The archive, with a whole plan in a point's place where it is about as good."""
    chain: list[Point] = []
    for point in archive:
        short = whole.within(point.peak_bytes)
        if short is not None and short.seconds <= point.seconds * _WORTH_A_SHORT_PLAN:
            point = short
        if not chain or point.seconds < chain[-1].seconds:
            chain.append(point)
    return tuple(chain)
