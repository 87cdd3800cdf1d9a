"""Less memory by making values again more than once: plans for tight budgets.

It begins where the search that makes each value again once has ended, and only adds to what that
found. Not for what is tried at each step: see local_search.py.
"""

from collections.abc import Iterator

from steelyard.search.pareto_front import Point
from steelyard.search.single.baseline_plans import checkpoints_between
from steelyard.search.single.evaluated_sets import Trials
from steelyard.search.single.fast_estimator import FastEstimator
from steelyard.search.single.local_search import LocalSearch

# So many trials more, as a share of those made before; and so far up from the least memory: where
# there is more room, nothing made twice ever paid (docs/log.md, 2026-11-22).
_MORE, _FEWEST = 0.025, 400
_TIGHT = 0.5
_LIMITS = 5
_MOST_TIMES = 3
_DESCENDING = 200


def recompute_repeatedly(trials: Trials) -> None:
    """For a number of trials."""
    end = trials.made + max(_FEWEST, int(_MORE * trials.made))
    moves = LocalSearch(trials, _atoms(trials.tally), are_whole=False)
    known = trials.archive
    tight = round(known.least.peak_bytes * (1 - _TIGHT) + known.fastest.peak_bytes * _TIGHT)
    for plan in checkpoints_between(trials.tally):
        trials.point(plan)
    accepted, seed = -1, 0
    while trials.made < end:
        is_stuck, accepted = known.accepted == accepted, known.accepted
        moves.relink(_up_to(trials, tight))
        moves.descend(trials=min(_DESCENDING, end - trials.made))
        moves.relink(_up_to(trials, tight))
        least = known.least.peak_bytes
        for step in range(_LIMITS):
            limit = least + (tight - least) * step // _LIMITS
            if trials.made >= end:
                break
            if is_stuck:
                moves.kick(limit, times=1, seed=seed)
            else:
                moves.settle(limit)
        seed += 1
    moves.relink(_up_to(trials, tight))


def _up_to(trials: Trials, peak_bytes: int) -> list[Point]:
    return [point for point in trials.archive.hull() if point.peak_bytes <= peak_bytes]


def _atoms(tally: FastEstimator) -> Iterator[frozenset[int]]:
    """Single choices, those to make a value oftener as far as it is read so often."""
    yield from (frozenset({choice}) for choice in (*tally.unit_of, *tally.elsewhere()))
    readers: dict[int, int] = {}
    for unit in tally.units:
        for storage in unit.reads:
            readers[storage] = readers.get(storage, 0) + 1
    for storage, reads in tally.late_reads.items():
        most = min(_MOST_TIMES, len(reads) + readers.get(storage, 0))
        for times in range(2, 1 + most):
            yield frozenset({tally.often(storage, times)})
        if most > 1:
            yield frozenset({storage, tally.often(storage, 2)})
