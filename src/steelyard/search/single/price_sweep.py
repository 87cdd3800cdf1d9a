"""Ask the cut at many prices: one price for every byte kept, then prices on the lines of the peak.

The global half of the search. Not for changes to single values: see local_search.py.
"""

from collections.abc import Callable, Iterable, Sequence

import numpy as np

from steelyard.search.single.estimate import Floats, PeakEstimate
from steelyard.search.single.evaluated_sets import Trials
from steelyard.search.single.fast_estimator import FastEstimator
from steelyard.search.single.min_cut import MinCut, RecomputeChoice
from steelyard.search.single.transfer_timing import TransferMode

# From where nothing is worth recomputing to where everything is, in steps of a third.
_UNIFORM_PRICES = np.geomspace(1e-4, 1e4, 64)
_PACKED_LEVELS = 512
_PACKINGS = 64
_PACKED_PRICES = (1.0, 1e4)
# What a second on the link is worth: nothing while it would stand idle, itself where all wait.
_LINK_PRICES = (0.0, 0.03, 0.2, 1.0)
_GROWTH = 1.6
_PUSH = 12.0


class Gaps:
    """The lines through which a kept value would only wait, and what that costs at given prices."""

    def __init__(self, tally: FastEstimator, kept: Iterable[int]) -> None:
        kept = list(kept)
        end = tally.num_lines
        self._nbytes = np.array([tally.nbytes[s] for s in kept], dtype=np.float64)
        self._starts = np.array([min(tally.forward_last[s] + 1, end) for s in kept])
        self._ends = np.array([min(tally.wanted[s], end) for s in kept])

    def weights(self, prices: Floats) -> Floats:
        """Seconds for each kept value, from seconds per byte on each line."""
        so_far = np.concatenate(([0.0], np.cumsum(prices)))
        waited: Floats = np.maximum(0.0, so_far[self._ends] - so_far[self._starts])
        return self._nbytes * waited

    def uniform(self, price: float) -> Floats:
        """Seconds for each kept value at one price per byte, however long it waits."""
        return self._nbytes * price


def uniform_sweep(trials: Trials, cut: MinCut, gaps: Gaps) -> None:
    """torch's min-cut over all its memory ratios, and beyond."""
    seconds_per_byte = trials.plain.seconds / max(1, trials.plain.peak_bytes)
    for price in _UNIFORM_PRICES:
        trials.point(cut.solve(gaps.uniform(seconds_per_byte * price)).again)


def packed_sweep(trials: Trials, cut: MinCut, gaps: Gaps) -> None:
    """torch's second step (2.13, ``knapsack_solver="dp"``): pack the outputs of the dear operators
    into ever less memory, and cut with those that found no room free to run again."""
    tally = trials.tally
    graph = tally.program.graph
    dear = [n for n, unit in enumerate(tally.units) if graph.by_name[unit.node].flops > 0]
    if not dear:
        return
    nbytes = [sum(tally.nbytes[s] for s in tally.units[n].makes) for n in dear]
    seconds = np.array([tally.seconds_of((n,)) for n in dear])
    size = max(1.0, sum(nbytes) / _PACKED_LEVELS)
    sizes = [max(1, round(b / size)) for b in nbytes]
    kept = _packed(sizes, seconds, room=_PACKED_LEVELS)
    seconds_per_byte = trials.plain.seconds / max(1, trials.plain.peak_bytes)
    for room in range(0, _PACKED_LEVELS + 1, _PACKED_LEVELS // _PACKINGS):
        never = [n for n, stays in zip(dear, kept(room), strict=True) if stays]
        for price in _PACKED_PRICES:
            weights = gaps.uniform(seconds_per_byte * price)
            trials.point(cut.solve(weights, never=never).again)


def _packed(sizes: list[int], worth: Floats, *, room: int) -> Callable[[int], list[bool]]:
    """The knapsack by dynamic programming: what to take into any room up to the given one."""
    best = np.zeros(room + 1)
    takes = np.zeros((len(sizes), room + 1), dtype=bool)
    for item, size in enumerate(sizes):
        with_it = np.concatenate((np.full(min(size, room + 1), -1.0), best[:-size] + worth[item]))
        takes[item] = with_it[: room + 1] > best
        best = np.where(takes[item], with_it[: room + 1], best)

    def taken(room: int) -> list[bool]:
        chosen = [False] * len(sizes)
        for item in reversed(range(len(sizes))):
            if takes[item, room]:
                chosen[item] = True
                room -= sizes[item]
        return chosen

    return taken


def coded_sweep(
    trials: Trials, cut: MinCut, gaps: Gaps, *, limits: Sequence[int], rounds: int
) -> None:
    """The same where values may wait in 8 bits instead."""
    seconds_per_byte = trials.plain.seconds / max(1, trials.plain.peak_bytes)
    for price in _UNIFORM_PRICES[::2]:
        _note(trials, cut.solve(gaps.uniform(seconds_per_byte * price), is_coding=True))
    priced_sweep(trials, cut, gaps, limits=limits, rounds=rounds, is_coding=True)


def far_sweep(
    trials: Trials, cut: MinCut, gaps: Gaps, *, limits: Sequence[int], rounds: int
) -> None:
    """The same with offload memory: at several prices of the link, from nothing to all it takes."""
    is_coding = bool(trials.tally.coded_value_on)
    for share in _LINK_PRICES:
        far = trials.tally.far_seconds(cut.kept, share=share)
        for price in _UNIFORM_PRICES[::8]:
            seconds_per_byte = trials.plain.seconds / max(1, trials.plain.peak_bytes)
            weights = gaps.uniform(seconds_per_byte * price)
            _note(trials, cut.solve(weights, far=far, is_coding=is_coding))
        priced_sweep(trials, cut, gaps, limits=limits, rounds=rounds, far=far, is_coding=is_coding)


def _note(trials: Trials, choice: RecomputeChoice) -> PeakEstimate:
    """Of those that go far, also only those for whom the road is long: they hardly meet on it."""
    tally = trials.tally
    near = choice.again | {tally.coded(s) for s in choice.coded}
    longest = sorted(choice.away, key=lambda s: tally.born[s])
    counted = None
    for number in dict.fromkeys(len(longest) * quarters // 4 for quarters in (4, 3, 2, 1)):
        chosen = near | {tally.far(s, TransferMode.EASY) for s in longest[:number]}
        found = trials.counted(chosen)
        trials.noted(chosen, found)
        counted = counted or found
    assert counted is not None
    return counted


def priced_sweep(
    trials: Trials,
    cut: MinCut,
    gaps: Gaps,
    *,
    limits: Iterable[int],
    rounds: int,
    far: Floats | None = None,
    is_coding: bool = False,
) -> None:
    """Multiplicative weights: lines above the limit grow dearer, the total follows the peak."""
    lines = trials.tally.num_lines
    dearness = np.zeros(lines)
    total = trials.plain.seconds / max(1, trials.plain.peak_bytes)
    for limit in limits:
        dearness *= 0.5
        for number in range(rounds):
            shares = np.exp(dearness - dearness.max())
            prices = shares * (total / shares.sum())
            counted = _note(trials, cut.solve(gaps.weights(prices), far=far, is_coding=is_coding))
            over = np.clip(counted.folded() / limit - 1.0, -0.5, 0.5)
            dearness += over * (_PUSH / (1 + number / 10))
            total *= _GROWTH if counted.peak_bytes > limit else 1 / _GROWTH
