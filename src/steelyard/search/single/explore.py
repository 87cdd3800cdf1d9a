"""Finds the plans between the unplanned step and the plan with the least memory.

One exploration answers every budget, so that a larger budget never gets a slower plan. Not for
choosing among the plans found: see search.py.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from steelyard.ir.graph import BlockRun, Graph
from steelyard.ir.program import Program
from steelyard.ir.rule import CallSite, spot_of, spots, starred
from steelyard.predict.cost_table import CostTable
from steelyard.search.pareto_front import ParetoFront, Point
from steelyard.search.single.baseline_plans import simple_plans
from steelyard.search.single.estimator.fast_estimator import FastEstimator
from steelyard.search.single.estimator.transfer_timing import TransferMode
from steelyard.search.single.evaluated_sets import Trials
from steelyard.search.single.local_search import LocalSearch
from steelyard.search.single.min_cut import MinCut
from steelyard.search.single.multi_recompute import recompute_repeatedly
from steelyard.search.single.price_sweep import (
    Gaps,
    offload_sweep,
    packed_sweep,
    priced_sweep,
    quantize_sweep,
    uniform_sweep,
)

_LIMITS = 24
_ROUNDS, _OFFLOAD_ROUNDS = 20, 8
# The number of trials in each descent: over block-uniform atoms, over single values, and over
# single values of micro-batches.
_BLOCK_UNIFORM_EFFORTS, _EFFORTS, _EFFORTS_ON_PARTS = (250,), (500, 1000), (250,)
# The number of trials, multiplied by that of program lines: small programs get more trials, and the
# search never takes long.
_KICKING_WORK = 20_000_000
_KICKS_PER_LIMIT = 4
_STALE_RATIO = 0.995
# Block-uniform plans make short plan files; this much slowdown is accepted for that.
_MAX_SHORT_PLAN_SLOWDOWN = 1.001


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Explored:
    """The plans found for one step.

    ``chain`` has a plan for each amount of memory, by rising peak and strictly falling seconds.
    ``groups`` are the choices for one value in all blocks of a run.
    """

    estimator: FastEstimator
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

    def recomputed(self, point: Point) -> dict[str, int]:
        """Return the values to recompute, with the maximum number of recomputations of each."""
        estimator, choices = self.estimator, self.choices_of(point)
        times = estimator.times_of(choices)
        return {
            estimator.value_on[s]: times.get(s, 1) for s in choices if estimator.is_recompute(s)
        }

    def offloaded(self, point: Point) -> dict[str, tuple[int, int]]:
        """Return the values to offload, with the lag and the lead of each."""
        return self.estimator.lags_and_leads(self.choices_of(point))

    def slice_counts(self, point: Point) -> dict[str, int]:
        """Return the number of slices of each offloaded value that is fetched in slices."""
        return self.estimator.slice_counts(self.choices_of(point))

    def unsliced(self, point: Point) -> Point:
        """Return the same plan with whole fetches instead of sliced ones."""
        choices = self.estimator.unsliced(self.choices_of(point))
        estimate = self.estimator.estimate(choices)
        return Point(peak_bytes=estimate.peak_bytes, seconds=estimate.seconds, choices=choices)

    def quantized(self, point: Point) -> frozenset[str]:
        """Return the values to keep in 8 bits."""
        estimator = self.estimator
        evicted = estimator.estimate(self.choices_of(point)).evicted
        return frozenset(estimator.evicted_value(c) for c in evicted if estimator.is_quantize(c))

    def choices_of(self, point: Point) -> frozenset[int]:
        """Return the choices of a plan, extended to all blocks of a run if that costs nothing."""
        choices = point.choices
        for group in self.groups:
            if group & choices and not group <= choices:
                more = self.estimator.estimate(choices | group)
                if more.peak_bytes <= point.peak_bytes and more.seconds <= point.seconds:
                    choices |= group
        return choices


def explore(
    program: Program,
    costs: CostTable,
    values: Iterable[str],
    offloadable: Iterable[str] = (),
    quantizable: Iterable[str] = (),
    slices: Mapping[str, int] = MappingProxyType({}),
    *,
    known: "Explored | None" = None,
    thorough: bool = True,
    repeats: bool = True,
    known_plans_only: bool = False,
) -> Explored:
    """Explore the plans of one step.

    ``values`` may be recomputed (with ``repeats``, more than once), ``offloadable`` ones moved to
    offload memory, those in ``slices`` fetched in slices, and ``quantizable`` ones kept in 8 bits.
    The search starts from the plans of ``known``, the same step in another variant. With
    ``known_plans_only``, only sweeps and baseline plans are tried, for a budget that needs no
    better plans.
    """
    estimator = FastEstimator(program, costs, values, offloadable, quantizable, slices)
    trials = Trials(estimator)
    groups = _groups(estimator)
    choices = [*estimator.unit_of, *estimator.eviction_choices()]
    if choices:
        if known is not None:
            _start_from(trials, known)
        _sweep(trials)
    if choices and not known_plans_only:
        if len(groups) < len(choices):
            _improve(
                trials,
                LocalSearch(trials, groups, are_block_uniform=True),
                efforts=_BLOCK_UNIFORM_EFFORTS,
            )
        local_search = LocalSearch(
            trials, (frozenset({s}) for s in choices), are_block_uniform=False
        )
        _improve(trials, local_search, efforts=_EFFORTS if thorough else _EFFORTS_ON_PARTS)
        if thorough:
            _kick(trials, local_search)
        if repeats and estimator.unit_of:
            recompute_repeatedly(trials)
    chain = prefer_block_uniform(trials.archive, trials.block_uniform)
    return Explored(estimator=estimator, chain=chain, groups=tuple(groups), trials=trials.num_tried)


def sketch(program: Program, costs: CostTable, values: Iterable[str]) -> Explored:
    """Try only the sweeps and baseline plans, for a quick and approximate Pareto front."""
    estimator = FastEstimator(program, costs, values)
    trials = Trials(estimator)
    if estimator.unit_of:
        _sweep(trials)
    chain = prefer_block_uniform(trials.archive, trials.block_uniform)
    return Explored(estimator=estimator, chain=chain, groups=(), trials=trials.num_tried)


def reevaluate(program: Program, costs: CostTable, *, known: Explored) -> Explored:
    """Evaluate the plans of ``known``, which has the same passes with another optimizer update."""
    source = known.estimator
    recomputable, offloadable, quantizable = (
        v.values() for v in (source.value_on, source.offloadable, source.quantizable)
    )
    trials = Trials(
        FastEstimator(program, costs, recomputable, offloadable, quantizable, source.slices)
    )
    for point in known.chain:
        trials.evaluate(point.choices)
    return Explored(
        estimator=trials.estimator,
        chain=tuple(trials.archive),
        groups=known.groups,
        trials=trials.num_tried,
    )


def spread(chain: Sequence[Point], count: int) -> list[Point]:
    """Return up to ``count`` of these plans, evenly spread from the least memory to the fastest."""
    last = len(chain) - 1
    numbers = dict.fromkeys(last * i // (count - 1) for i in range(count))
    return [chain[number] for number in numbers]


def values_in_trace(values: Iterable[str], graph: Graph, to: FastEstimator) -> frozenset[str]:
    """Return the same values in another trace of the step, if they can be recomputed there."""
    possible = set(to.value_on.values())
    return frozenset(
        name for name in _names_in_trace(values, graph, to).values() if name in possible
    )


def choices_in_trace(
    estimator: FastEstimator, choices: frozenset[int], to: FastEstimator
) -> frozenset[int]:
    """Return the same choices in another trace of the step, as far as they are possible there."""
    graph, times = estimator.program.graph, estimator.times_of(choices)
    found: set[int] = set()
    recomputed = {
        estimator.value_on[c]: times.get(c, 1) for c in choices if estimator.is_recompute(c)
    }
    recomputable = {value: storage for storage, value in to.value_on.items()}
    for value, name in _names_in_trace(recomputed, graph, to).items():
        if name in recomputable:
            storage = recomputable[name]
            found.update(
                (
                    storage,
                    *(to.repeat_choice(storage, more) for more in range(2, 1 + recomputed[value])),
                )
            )
    offloadable = {value: storage for storage, value in to.offloadable.items()}
    quantizable = {value: storage for storage, value in to.quantizable.items()}
    evicted = {
        estimator.evicted_value(c): c
        for c in choices
        if estimator.is_offload(c) or estimator.is_quantize(c)
    }
    for value, name in _names_in_trace(evicted, graph, to).items():
        if estimator.is_quantize(evicted[value]):
            found.update([to.quantize_choice(quantizable[name])] if name in quantizable else [])
        elif name in offloadable:
            mode = estimator.mode(evicted[value])
            found.add(
                to.offload_choice(
                    offloadable[name], mode if offloadable[name] in to.sliced else mode.unsliced
                )
            )
    return frozenset(found)


def _names_in_trace(values: Iterable[str], graph: Graph, to: FastEstimator) -> dict[str, str]:
    """Map the names of these values to the names in the other trace."""
    names_by_spot = spots(to.program.graph)
    spots_here = {v: spot_of(graph, graph.by_name[v]) for v in values}
    return {
        v: names_by_spot[spot]
        for v, spot in spots_here.items()
        if spot is not None and spot in names_by_spot
    }


def _start_from(trials: Trials, known: Explored) -> None:
    for point in known.chain:
        trials.evaluate(choices_in_trace(known.estimator, point.choices, trials.estimator))


def _sweep(trials: Trials) -> None:
    cut = MinCut(trials.estimator)
    gaps = Gaps(trials.estimator, cut.kept)
    uniform_sweep(trials, cut, gaps)
    packed_sweep(trials, cut, gaps)
    for plan in simple_plans(trials.estimator):
        trials.evaluate(plan)
    peak = trials.plain.peak_bytes
    limits = [round(peak * (1 - i / (_LIMITS + 3))) for i in range(1, _LIMITS + 1)]
    priced_sweep(trials, cut, gaps, limits=limits, rounds=_ROUNDS)
    if trials.estimator.quantizable:
        quantize_sweep(trials, cut, gaps, limits=limits[::2], rounds=_ROUNDS)
        _try_quantize_all(trials)
    if trials.estimator.offloadable:
        offload_sweep(trials, cut, gaps, limits=limits[::3], rounds=_OFFLOAD_ROUNDS)
        _try_offload_all(trials)


def _try_offload_all(trials: Trials) -> None:
    """Try offloading every value on top of each plan so far, however much link time it costs.

    The first offloaded value also adds the transfer buffers, so alone it may save nothing.
    Therefore no single change leads from a plan that offloads nothing to these plans.
    """
    estimator = trials.estimator
    for point in (trials.plain, *trials.archive.hull()):
        for mode in TransferMode:
            if not mode.is_sliced or estimator.sliced:
                trials.evaluate(
                    point.choices
                    | {
                        estimator.offload_choice(
                            s, mode if s in estimator.sliced else mode.unsliced
                        )
                        for s in estimator.offloadable
                    }
                )


def _try_quantize_all(trials: Trials) -> None:
    """Try keeping every possible value in 8 bits, on top of the recomputations of each plan so
    far.
    """
    all_quantized = {trials.estimator.quantize_choice(s) for s in trials.estimator.quantizable}
    for point in (trials.plain, *trials.archive.hull()):
        trials.evaluate(point.choices | all_quantized)


def _improve(trials: Trials, local_search: LocalSearch, *, efforts: tuple[int, ...]) -> None:
    known = trials.block_uniform if local_search.are_block_uniform else trials.archive
    local_search.seed(trials.archive.hull())
    for effort in efforts:
        local_search.relink(known.hull())
        local_search.descend(trials=effort)
        local_search.relink(known.hull())
        for limit in _memory_limits(known):
            local_search.settle(limit)
    for limit in _memory_limits(known):
        local_search.exchange(limit, trials=40)
    local_search.relink(known.hull())


def _kick(trials: Trials, local_search: LocalSearch) -> None:
    """Make random changes until they hardly help, or until enough was tried for this program's
    size.
    """
    max_tried = _KICKING_WORK // (200 + trials.estimator.num_lines)
    limits = _memory_limits(trials.archive)
    stale = number = 0
    before = _overhead(trials, limits)
    while stale < 2 and trials.num_tried < max_tried:
        for limit in limits:
            local_search.kick(limit, times=_KICKS_PER_LIMIT, seed=number)
        local_search.relink(trials.archive.hull())
        after = _overhead(trials, limits)
        stale = stale + 1 if after >= before * _STALE_RATIO else 0
        before = after
        number += 1


def _overhead(trials: Trials, limits: Iterable[int]) -> float:
    """Return the seconds paid for memory, summed over all limits."""
    points = (trials.archive.within(limit) for limit in limits)
    return sum(p.seconds - trials.plain.seconds for p in points if p is not None)


def _memory_limits(known: ParetoFront) -> list[int]:
    low, high = known.least.peak_bytes, known.fastest.peak_bytes
    return [round(low + (high - low) * i / _LIMITS) for i in range(_LIMITS + 1)]


def _groups(estimator: FastEstimator) -> list[frozenset[int]]:
    """Return the choices for the same value in all blocks of a run, as one atom each."""
    graph = estimator.program.graph
    runs = sorted(graph.runs, key=lambda r: -len(r.prefix))
    members: dict[tuple[CallSite, int], set[int]] = {}
    recomputes = ((storage, value, 0) for storage, value in estimator.value_on.items())
    evictions = (
        (c, estimator.evicted_value(c), c // len(estimator.nbytes))
        for c in estimator.eviction_choices()
    )
    for choice, value, kind in (*recomputes, *evictions):
        spot = spot_of(graph, graph.by_name[value])
        assert spot is not None
        members.setdefault((_pattern(spot, runs), kind), set()).add(choice)
    return [frozenset(m) for m in members.values()]


def _pattern(spot: CallSite, runs: list[BlockRun]) -> CallSite:
    for run in runs:
        module = starred(spot.module, run)
        if module is not None:
            # Two runs of the same module list must stay distinct.
            return CallSite(f"{run.first}:{module}", spot.op, spot.nth)
    return spot


def prefer_block_uniform(archive: ParetoFront, block_uniform: ParetoFront) -> tuple[Point, ...]:
    """Return the archive, with block-uniform plans in place of others that are hardly better."""
    chain: list[Point] = []
    for point in archive:
        uniform_point = block_uniform.within(point.peak_bytes)
        if (
            uniform_point is not None
            and uniform_point.seconds <= point.seconds * _MAX_SHORT_PLAN_SLOWDOWN
        ):
            point = uniform_point
        if not chain or point.seconds < chain[-1].seconds:
            chain.append(point)
    return tuple(chain)
