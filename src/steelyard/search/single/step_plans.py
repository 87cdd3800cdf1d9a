"""The plans found for one step, and the same choices in another trace of the step.

Not for finding plans: see explore.py. Not for choosing among them: see search.py.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from steelyard.ir.graph import BlockRun, Graph
from steelyard.ir.rule import CallSite, spot_of, spots, starred
from steelyard.search.pareto_front import ParetoFront, Point
from steelyard.search.single.estimator.fast_estimator import FastEstimator

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


def block_uniform_choices(estimator: FastEstimator) -> list[frozenset[int]]:
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
