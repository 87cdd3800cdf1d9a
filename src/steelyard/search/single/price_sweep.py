"""Solves the minimum cut at many prices: one price for all saved bytes, then prices for each line.

This is the global half of the search. Not for changes to single values: see local_search.py.
"""

from collections.abc import Callable, Iterable, Sequence

import numpy as np

from steelyard.search.single.estimator.estimate import Floats, PeakEstimate
from steelyard.search.single.estimator.fast_estimator import FastEstimator
from steelyard.search.single.estimator.transfer_timing import TransferMode
from steelyard.search.single.evaluated_sets import Trials
from steelyard.search.single.min_cut import MinCut, RecomputeChoice

# Prices from one at which nothing is worth recomputing to one at which everything is, in steps of a
# third.
_UNIFORM_PRICES = np.geomspace(1e-4, 1e4, 64)
_PACKED_LEVELS = 512
_PACKINGS = 64
_PACKED_PRICES = (1.0, 1e4)
# The price of a second on the link: zero if the link would be idle, one if every transfer stalls
# the device.
_LINK_PRICES = (0.0, 0.03, 0.2, 1.0)
_GROWTH = 1.6
_PUSH = 12.0


class Gaps:
    """The lines at which a saved value is only idle, and the cost of saving it at given prices."""

    def __init__(self, estimator: FastEstimator, saved: Iterable[int]) -> None:
        saved = list(saved)
        end = estimator.num_lines
        self._nbytes = np.array([estimator.nbytes[s] for s in saved], dtype=np.float64)
        self._starts = np.array([min(estimator.forward_last[s] + 1, end) for s in saved])
        self._ends = np.array([min(estimator.needed_at[s], end) for s in saved])

    def weights(self, prices: Floats) -> Floats:
        """Return the seconds for each saved value, given seconds per byte on each line."""
        price_sums = np.concatenate(([0.0], np.cumsum(prices)))
        gap_prices: Floats = np.maximum(0.0, price_sums[self._ends] - price_sums[self._starts])
        return self._nbytes * gap_prices

    def uniform(self, price: float) -> Floats:
        """Return the seconds for each saved value at one price per byte, however long it is
        idle.
        """
        return self._nbytes * price


def uniform_sweep(trials: Trials, cut: MinCut, gaps: Gaps) -> None:
    """Try torch's min-cut over the whole range of its memory ratios, and beyond."""
    seconds_per_byte = trials.plain.seconds / max(1, trials.plain.peak_bytes)
    for price in _UNIFORM_PRICES:
        trials.evaluate(cut.solve(gaps.uniform(seconds_per_byte * price)).recomputed)


def packed_sweep(trials: Trials, cut: MinCut, gaps: Gaps) -> None:
    """Try the second step of torch 2.13 (``knapsack_solver="dp"``) for ever less memory.

    A knapsack chooses the expensive operators whose outputs are saved; the cut is free to
    recompute all others.
    """
    estimator = trials.estimator
    graph = estimator.program.graph
    expensive = [n for n, unit in enumerate(estimator.units) if graph.by_name[unit.node].flops > 0]
    if not expensive:
        return
    nbytes = [sum(estimator.nbytes[s] for s in estimator.units[n].makes) for n in expensive]
    seconds = np.array([estimator.seconds_of((n,)) for n in expensive])
    size = max(1.0, sum(nbytes) / _PACKED_LEVELS)
    sizes = [max(1, round(b / size)) for b in nbytes]
    saved_within = _knapsack(sizes, seconds, room=_PACKED_LEVELS)
    seconds_per_byte = trials.plain.seconds / max(1, trials.plain.peak_bytes)
    for room in range(0, _PACKED_LEVELS + 1, _PACKED_LEVELS // _PACKINGS):
        not_recomputed = [
            n for n, is_saved in zip(expensive, saved_within(room), strict=True) if is_saved
        ]
        for price in _PACKED_PRICES:
            weights = gaps.uniform(seconds_per_byte * price)
            trials.evaluate(cut.solve(weights, not_recomputed=not_recomputed).recomputed)


def _knapsack(sizes: list[int], worth: Floats, *, room: int) -> Callable[[int], list[bool]]:
    """Solve the knapsack by dynamic programming.

    The returned function gives the selected items for any room up to ``room``.
    """
    best = np.zeros(room + 1)
    takes = np.zeros((len(sizes), room + 1), dtype=bool)
    for item, size in enumerate(sizes):
        with_it = np.concatenate((np.full(min(size, room + 1), -1.0), best[:-size] + worth[item]))
        takes[item] = with_it[: room + 1] > best
        best = np.where(takes[item], with_it[: room + 1], best)

    def solve(room: int) -> list[bool]:
        chosen = [False] * len(sizes)
        for item in reversed(range(len(sizes))):
            if takes[item, room]:
                chosen[item] = True
                room -= sizes[item]
        return chosen

    return solve


def quantize_sweep(
    trials: Trials, cut: MinCut, gaps: Gaps, *, limits: Sequence[int], rounds: int
) -> None:
    """Repeat the sweeps with values that may be saved in 8 bits."""
    seconds_per_byte = trials.plain.seconds / max(1, trials.plain.peak_bytes)
    for price in _UNIFORM_PRICES[::2]:
        _try_choice(trials, cut.solve(gaps.uniform(seconds_per_byte * price), allows_quantize=True))
    priced_sweep(trials, cut, gaps, limits=limits, rounds=rounds, allows_quantize=True)


def offload_sweep(
    trials: Trials, cut: MinCut, gaps: Gaps, *, limits: Sequence[int], rounds: int
) -> None:
    """Repeat the sweeps with offload memory, at link prices from zero to the full transfer time."""
    allows_quantize = bool(trials.estimator.quantizable)
    for share in _LINK_PRICES:
        offload_seconds = trials.estimator.transfer_seconds(cut.kept, share=share)
        for price in _UNIFORM_PRICES[::8]:
            seconds_per_byte = trials.plain.seconds / max(1, trials.plain.peak_bytes)
            weights = gaps.uniform(seconds_per_byte * price)
            _try_choice(
                trials,
                cut.solve(
                    weights, offload_seconds=offload_seconds, allows_quantize=allows_quantize
                ),
            )
        priced_sweep(
            trials,
            cut,
            gaps,
            limits=limits,
            rounds=rounds,
            offload_seconds=offload_seconds,
            allows_quantize=allows_quantize,
        )


def _try_choice(trials: Trials, choice: RecomputeChoice) -> PeakEstimate:
    """Record the choice, also with only some of its offloaded values; return its estimate.

    In the latter case, the values that were made first are offloaded: they are idle for longest, so
    their transfers hardly compete for the link.
    """
    estimator = trials.estimator
    resident = choice.recomputed | {estimator.quantize_choice(s) for s in choice.quantized}
    by_birth = sorted(choice.offloaded, key=lambda s: estimator.born[s])
    first_estimate = None
    for number in dict.fromkeys(len(by_birth) * quarters // 4 for quarters in (4, 3, 2, 1)):
        chosen = resident | {
            estimator.offload_choice(s, TransferMode.HIDDEN) for s in by_birth[:number]
        }
        estimate = trials.estimate(chosen)
        trials.record(chosen, estimate)
        first_estimate = first_estimate or estimate
    assert first_estimate is not None
    return first_estimate


def priced_sweep(
    trials: Trials,
    cut: MinCut,
    gaps: Gaps,
    *,
    limits: Iterable[int],
    rounds: int,
    offload_seconds: Floats | None = None,
    allows_quantize: bool = False,
) -> None:
    """Search line prices by multiplicative weights.

    Lines above the limit become more expensive, and the total price follows the peak.
    """
    lines = trials.estimator.num_lines
    log_weights = np.zeros(lines)
    total = trials.plain.seconds / max(1, trials.plain.peak_bytes)
    for limit in limits:
        log_weights *= 0.5
        for number in range(rounds):
            shares = np.exp(log_weights - log_weights.max())
            prices = shares * (total / shares.sum())
            estimate = _try_choice(
                trials,
                cut.solve(
                    gaps.weights(prices),
                    offload_seconds=offload_seconds,
                    allows_quantize=allows_quantize,
                ),
            )
            excess = np.clip(estimate.folded() / limit - 1.0, -0.5, 0.5)
            log_weights += excess * (_PUSH / (1 + number / 10))
            total *= _GROWTH if estimate.peak_bytes > limit else 1 / _GROWTH
