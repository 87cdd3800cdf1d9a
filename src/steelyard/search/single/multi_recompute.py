"""Lowers the memory of plans by recomputing values more than once, for tight budgets.

It starts from the plans that recompute each value at most once, and only adds to them. Not for the
steps of the search: see local_search.py.
"""

from collections.abc import Iterator

from steelyard.search.pareto_front import Point
from steelyard.search.single.baseline_plans import checkpoints_between
from steelyard.search.single.estimator.fast_estimator import FastEstimator
from steelyard.search.single.evaluated_sets import Trials
from steelyard.search.single.local_search import LocalSearch

# The number of extra trials, as a share of those made before, and its minimum. They cover only the
# lower part of the memory range; above it, recomputing a value twice was never worthwhile
# (docs/log.md, 2026-11-22).
_EXTRA_SHARE, _FEWEST = 0.025, 400
_TIGHT_SHARE = 0.5
_LIMITS = 5
_MAX_TIMES = 3
_DESCENT_TRIALS = 200


def recompute_repeatedly(trials: Trials) -> None:
    """Search for plans that recompute values repeatedly, with a limited number of trials."""
    end = trials.num_tried + max(_FEWEST, int(_EXTRA_SHARE * trials.num_tried))
    local_search = LocalSearch(trials, _atoms(trials.estimator), are_block_uniform=False)
    known = trials.archive
    tight_bytes = round(
        known.least.peak_bytes * (1 - _TIGHT_SHARE) + known.fastest.peak_bytes * _TIGHT_SHARE
    )
    for plan in checkpoints_between(trials.estimator):
        trials.evaluate(plan)
    accepted, seed = -1, 0
    while trials.num_tried < end:
        is_stuck, accepted = known.accepted == accepted, known.accepted
        local_search.relink(_hull_up_to(trials, tight_bytes))
        local_search.descend(trials=min(_DESCENT_TRIALS, end - trials.num_tried))
        local_search.relink(_hull_up_to(trials, tight_bytes))
        least = known.least.peak_bytes
        for step in range(_LIMITS):
            limit = least + (tight_bytes - least) * step // _LIMITS
            if trials.num_tried >= end:
                break
            if is_stuck:
                local_search.kick(limit, times=1, seed=seed)
            else:
                local_search.settle(limit)
        seed += 1
    local_search.relink(_hull_up_to(trials, tight_bytes))


def _hull_up_to(trials: Trials, peak_bytes: int) -> list[Point]:
    return [point for point in trials.archive.hull() if point.peak_bytes <= peak_bytes]


def _atoms(estimator: FastEstimator) -> Iterator[frozenset[int]]:
    """Yield choices for single values, and choices to recompute a value up to as often as it is
    read.
    """
    yield from (
        frozenset({choice}) for choice in (*estimator.unit_of, *estimator.eviction_choices())
    )
    readers: dict[int, int] = {}
    for unit in estimator.units:
        for storage in unit.reads:
            readers[storage] = readers.get(storage, 0) + 1
    for storage, reads in estimator.backward_reads.items():
        max_times = min(_MAX_TIMES, len(reads) + readers.get(storage, 0))
        for times in range(2, 1 + max_times):
            yield frozenset({estimator.repeat_choice(storage, times)})
        if max_times > 1:
            yield frozenset({storage, estimator.repeat_choice(storage, 2)})
