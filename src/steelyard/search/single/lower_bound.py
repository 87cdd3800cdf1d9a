"""A lower bound on the step time of all plans: the Lagrangian dual of the minimum cut.

It counts only bytes that every plan holds at a line. Temporary memory for the copies is left out,
so the bound is loose if memory is tight. Not for finding plans.
"""

import numpy as np

from steelyard.passes.recompute_copies import merged
from steelyard.search.single.estimator.copy_placement import NEVER
from steelyard.search.single.estimator.estimate import Floats
from steelyard.search.single.estimator.fast_estimator import FastEstimator
from steelyard.search.single.min_cut import MinCut

_ROUNDS = 150
_MIXTURES = (0.0, 0.001, 0.01, 0.05, 0.2)
_FEWEST_IMPROVEMENTS = 12


def least_seconds(
    estimator: FastEstimator,
    cut: MinCut,
    *,
    limit_bytes: int,
    within_seconds: float,
    repeats: bool = False,
) -> float:
    """Return a lower bound on the seconds of a step within ``limit_bytes``.

    The bound covers plans that keep the order of operators and compute each value at most twice
    (with ``repeats``, any number of times). ``within_seconds`` is the time of some known plan; it
    only sets the step sizes of the ascent.

    With offload memory, a step takes at least as long as its operators, and at least as long as
    each of the two links; so it takes at least as long as any weighted mean of the three. The bound
    assumes that all products which are faster in slices use slices.
    """
    shares = _MIXTURES if estimator.offloadable else (0.0,)
    gaps = _CertainGaps(estimator, cut, repeats=repeats)
    least = max(
        _least(estimator, cut, gaps, limit_bytes, within_seconds, link_share=share)
        for share in shares
    )
    return least - estimator.slicing_gain_seconds


def _least(
    estimator: FastEstimator,
    cut: MinCut,
    gaps: "_CertainGaps",
    limit_bytes: int,
    within_seconds: float,
    *,
    link_share: float,
) -> float:
    room = limit_bytes - estimator.resident_bytes - gaps.unavoidable
    prices = np.zeros(estimator.num_lines)
    best, slack, stale = 0.0, 2.0, 0
    plain = (1 - link_share) * estimator.plain_seconds
    target = within_seconds - plain
    offload_seconds = None
    if estimator.offloadable:
        offload_seconds = estimator.transfer_seconds(
            cut.kept, share=link_share * estimator.program.repeats / 2
        )
    for _ in range(_ROUNDS):
        choice = cut.solve(
            gaps.weights(prices),
            offload_seconds=offload_seconds,
            allows_quantize=True,
            compute_scale=1 - link_share,
        )
        # Capacities are rounded to integers, so the most that rounding may have added is
        # subtracted.
        value = choice.seconds - cut.rounding_seconds - float(prices @ room)
        if value > best:
            best, stale = value, 0
        else:
            stale += 1
            if stale >= _FEWEST_IMPROVEMENTS:
                slack, stale = slack / 2, 0
        slope = gaps.saved_bytes(choice.kept - choice.offloaded, quantized=choice.quantized) - room
        slope[(slope < 0) & (prices == 0)] = 0.0
        size = float(slope @ slope)
        if size == 0.0 or target <= value:
            break
        prices = np.maximum(0.0, prices + slack * (target - value) / size * slope)
    return max(estimator.plain_seconds, plain + best)


class _CertainGaps:
    """The lines at which a saved value is certainly idle, and the bytes that every plan holds."""

    def __init__(self, estimator: FastEstimator, cut: MinCut, *, repeats: bool) -> None:
        lines = estimator.num_lines
        self._lines = lines
        saved = self._saved = cut.kept
        self._quantized_shares = cut.quantized_shares
        self._nbytes = np.array([estimator.nbytes[s] for s in saved], dtype=np.float64)
        self._starts = np.array([min(estimator.forward_last[s] + 1, lines) for s in saved])
        # A value that only copies read is certainly alive until the end of the forward pass, but no
        # longer.
        ends = [estimator.backward_first[s] if estimator.backward_first[s] != NEVER
                else estimator.backward_start for s in saved]  # fmt: skip
        self._ends = np.maximum(self._starts, np.array([min(e, lines) for e in ends]))
        self.unavoidable = unavoidable_bytes(estimator, estimator.persistent, repeats=repeats)
        if estimator.program.repeats > 1:
            # In later micro-batches the gradients already exist, and new ones are added to them.
            later = unavoidable_bytes(
                estimator, estimator.persistent - estimator.gradients, repeats=repeats
            )
            self.unavoidable = np.maximum(self.unavoidable, later + estimator.persistent_bytes)

    def weights(self, prices: Floats) -> Floats:
        price_sums = np.concatenate(([0.0], np.cumsum(prices)))
        weights: Floats = self._nbytes * (price_sums[self._ends] - price_sums[self._starts])
        return weights

    def saved_bytes(self, saved: frozenset[int], *, quantized: frozenset[int]) -> Floats:
        """Return the bytes of idle saved values at each line; ``quantized`` ones take fewer."""
        saved_shares = np.array([s in saved for s in self._saved], dtype=np.float64)
        saved_shares *= np.where([s in quantized for s in self._saved], self._quantized_shares, 1.0)
        change = np.zeros(self._lines + 1)
        np.add.at(change, self._starts, self._nbytes * saved_shares)
        np.add.at(change, self._ends, -self._nbytes * saved_shares)
        saved_bytes: Floats = np.cumsum(change)[:-1]
        return saved_bytes


def unavoidable_bytes(
    estimator: FastEstimator, persistent: frozenset[int], *, repeats: bool = False
) -> Floats:
    """Return the bytes that every plan holds at each line.

    ``persistent`` storages live to the end. A value that cannot be sliced is in memory as a whole
    at each read.
    """
    lines = estimator.num_lines
    change = np.zeros(lines + 1)
    for storage in estimator.storages:
        born, backward_last = estimator.born[storage], estimator.backward_last[storage]
        spans = []
        if born < estimator.backward_start:
            spans.append((born, estimator.forward_last[storage]))
            if repeats and storage in estimator.unit_of:
                # Between its reads, the value may be dropped.
                spans += merged(estimator.backward_reads[storage])
            elif backward_last >= 0:
                spans.append((estimator.backward_first[storage], backward_last))
            if storage in estimator.sliced:
                del spans[1:]
        else:
            spans.append((born, backward_last))
        if storage in persistent:
            spans = [(born, lines - 1)]
        for start, end in spans:
            change[start] += estimator.nbytes[storage]
            change[end + 1] -= estimator.nbytes[storage]
    nbytes: Floats = np.cumsum(change)[:-1] + np.minimum(
        estimator.workspace, estimator.min_workspace
    )
    return nbytes
