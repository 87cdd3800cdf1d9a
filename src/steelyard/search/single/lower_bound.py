"""How fast no plan can be: the Lagrangian dual of the cut, a true lower bound.

Counted are only bytes that every plan holds at a line whatever else it chooses; the copies' own
transients are left out, so the bound is loose where memory is tight. Not for finding plans.
"""

import numpy as np

from steelyard.passes.recompute_copies import merged
from steelyard.search.single.copy_placement import NEVER
from steelyard.search.single.estimate import Floats
from steelyard.search.single.fast_estimator import FastEstimator
from steelyard.search.single.min_cut import MinCut

_ROUNDS = 150
_MIXTURES = (0.0, 0.001, 0.01, 0.05, 0.2)
_FEWEST_IMPROVEMENTS = 12


def least_seconds(
    tally: FastEstimator,
    cut: MinCut,
    *,
    limit_bytes: int,
    within_seconds: float,
    repeats: bool = False,
) -> float:
    """A step that computes each value at most twice (or ``repeats``), in this order, within
    ``limit_bytes``, takes at least this long. ``within_seconds`` is what some plan reaches; it only
    sets the steps taken.

    With offload memory it takes no less than its operators, nor than either link: so no less than
    any mixture of the three. Products that are faster in slices may all be so.
    """
    shares = _MIXTURES if tally.far_value_on else (0.0,)
    certain = _CertainGaps(tally, cut, repeats=repeats)
    least = max(
        _least(tally, cut, certain, limit_bytes, within_seconds, far_share=share)
        for share in shares
    )
    return least - tally.quickened_seconds


def _least(
    tally: FastEstimator,
    cut: MinCut,
    certain: "_CertainGaps",
    limit_bytes: int,
    within_seconds: float,
    *,
    far_share: float,
) -> float:
    room = limit_bytes - tally.resident_bytes - certain.always
    prices = np.zeros(tally.num_lines)
    best, slack, stale = 0.0, 2.0, 0
    plain = (1 - far_share) * tally.plain_seconds
    target = within_seconds - plain
    far = None
    if tally.far_value_on:
        far = tally.far_seconds(cut.kept, share=far_share * tally.program.repeats / 2)
    for _ in range(_ROUNDS):
        choice = cut.solve(certain.weights(prices), far=far, is_coding=True, paid=1 - far_share)
        # Capacities are rounded to ticks; what that may add is taken off again.
        value = choice.seconds - cut.rounding_seconds - float(prices @ room)
        if value > best:
            best, stale = value, 0
        else:
            stale += 1
            if stale >= _FEWEST_IMPROVEMENTS:
                slack, stale = slack / 2, 0
        slope = certain.held(choice.kept - choice.away, in_8_bits=choice.coded) - room
        slope[(slope < 0) & (prices == 0)] = 0.0
        size = float(slope @ slope)
        if size == 0.0 or target <= value:
            break
        prices = np.maximum(0.0, prices + slack * (target - value) / size * slope)
    return max(tally.plain_seconds, plain + best)


class _CertainGaps:
    """Where a kept value surely waits, and what is surely held at each line besides."""

    def __init__(self, tally: FastEstimator, cut: MinCut, *, repeats: bool) -> None:
        lines = tally.num_lines
        self._lines = lines
        kept = self._kept = cut.kept
        self._coded_shares = cut.coded_shares
        self._nbytes = np.array([tally.nbytes[s] for s in kept], dtype=np.float64)
        self._starts = np.array([min(tally.forward_last[s] + 1, lines) for s in kept])
        # A value that only copies read is surely held to the end of the forward pass, no longer.
        ends = [tally.late_first[s] if tally.late_first[s] != NEVER else tally.first_late
                for s in kept]  # fmt: skip
        self._ends = np.maximum(self._starts, np.array([min(e, lines) for e in ends]))
        self.always = surely_held(tally, tally.staying, repeats=repeats)
        if tally.program.repeats > 1:
            # A later micro-batch: the gradients are there already, and new ones are added to them.
            later = surely_held(tally, tally.staying - tally.gradients, repeats=repeats)
            self.always = np.maximum(self.always, later + tally.left_bytes)

    def weights(self, prices: Floats) -> Floats:
        so_far = np.concatenate(([0.0], np.cumsum(prices)))
        weights: Floats = self._nbytes * (so_far[self._ends] - so_far[self._starts])
        return weights

    def held(self, kept: frozenset[int], *, in_8_bits: frozenset[int]) -> Floats:
        """Bytes that wait at each line when these are kept, some in fewer."""
        keeps = np.array([s in kept for s in self._kept], dtype=np.float64)
        keeps *= np.where([s in in_8_bits for s in self._kept], self._coded_shares, 1.0)
        change = np.zeros(self._lines + 1)
        np.add.at(change, self._starts, self._nbytes * keeps)
        np.add.at(change, self._ends, -self._nbytes * keeps)
        held: Floats = np.cumsum(change)[:-1]
        return held


def surely_held(tally: FastEstimator, staying: frozenset[int], *, repeats: bool = False) -> Floats:
    """What every plan holds at each line, and a value is read whole that may not be in slices;
    ``staying`` is there to the end."""
    lines = tally.num_lines
    change = np.zeros(lines + 1)
    for storage in tally.storages:
        born, late = tally.born[storage], tally.late_last[storage]
        spans = []
        if born < tally.first_late:
            spans.append((born, tally.forward_last[storage]))
            if repeats and storage in tally.unit_of:
                # Between reads it may be forgotten.
                spans += merged(tally.late_reads[storage])
            elif late >= 0:
                spans.append((tally.late_first[storage], late))
            if storage in tally.sliced:
                del spans[1:]
        else:
            spans.append((born, late))
        if storage in staying:
            spans = [(born, lines - 1)]
        for start, end in spans:
            change[start] += tally.nbytes[storage]
            change[end + 1] -= tally.nbytes[storage]
    held: Floats = np.cumsum(change)[:-1] + np.minimum(tally.workspace, tally.least_workspace)
    return held
