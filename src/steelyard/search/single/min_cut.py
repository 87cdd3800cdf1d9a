"""Choose recomputations by a minimum cut: seconds for what is made again, weights for what is kept.

The network of torch's min-cut partitioner (He and Yu, 2023) with one change: the weight of keeping
a value is its bytes times a price on each line of the gap in which it would only wait, so that
peaks are priced and not the sum of what is kept. Not for setting these prices: see price_sweep.py.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
from ortools.graph.python import max_flow

from steelyard.search.single.copy_placement import NEVER
from steelyard.search.single.estimate import Floats
from steelyard.search.single.fast_estimator import FastEstimator

# Capacities are whole numbers: picoseconds, which leaves room for steps of ten hours.
_TICKS_PER_SECOND = 1e12
_UNCUTTABLE = 1 << 58
_SOURCE, _SINK = 0, 1


@dataclass(frozen=True, slots=True, kw_only=True)
class RecomputeChoice:
    """``again`` is what to recompute and ``kept`` what to keep for that, near or, where that is
    cheaper, ``away`` or ``coded``; ``seconds`` is the value of the whole cut, all these prices
    included."""

    again: frozenset[int]
    kept: frozenset[int]
    away: frozenset[int]
    coded: frozenset[int]
    seconds: float


class MinCut:
    """One network per program; only the weights change from one question to the next."""

    def __init__(self, tally: FastEstimator) -> None:
        self._tally = tally
        self._flow = max_flow.SimpleMaxFlow()
        self._arcs: list[tuple[int, int, int]] = []
        self._next_node = 2
        self._enters: dict[int, int] = {}
        self._leaves: dict[int, int] = {}
        self._paid_at: dict[int, int] = {}
        self.kept: list[int] = []
        self._build()
        self._coded_seconds, self.coded_shares = tally.coded_prices(self.kept)
        tails, heads, capacities = (np.array(column) for column in zip(*self._arcs))
        self._first_kept = len(self._arcs) - len(self.kept)
        self._ticks = capacities
        self._all = self._flow.add_arcs_with_capacity(tails, heads, capacities)

    def _build(self) -> None:
        tally = self._tally
        forward = [s for s in tally.storages if tally.born[s] < tally.first_late]
        keeping: list[tuple[int, int, int]] = []
        for storage in forward:
            self._enters[storage] = self._node()
            self._leaves[storage] = self._node()
            keeping.append((self._enters[storage], self._leaves[storage], 0))
            if storage not in tally.unit_of:
                self._arcs.append((_SOURCE, self._enters[storage], _UNCUTTABLE))
            if tally.late_first[storage] != NEVER:
                self._arcs.append((self._leaves[storage], _SINK, _UNCUTTABLE))
        for number, unit in enumerate(tally.units):
            made = [s for s in unit.makes if tally.unit_of.get(s) == number]
            entry = self._enters[made[0]]
            if len(made) > 1:
                # Several results of one call: paid once, however many of them are wanted.
                entry = self._node()
                self._arcs += [(entry, self._enters[s], _UNCUTTABLE) for s in made]
            ticks = round(tally.seconds_of((number,)) * _TICKS_PER_SECOND)
            self._paid_at[number] = len(self._arcs)
            self._arcs.append((_SOURCE, entry, ticks))
            self._arcs += [
                (self._leaves[s], entry, _UNCUTTABLE) for s in unit.reads if s in self._leaves
            ]
        self.kept = forward
        self._arcs += keeping

    def _node(self) -> int:
        self._next_node += 1
        return self._next_node - 1

    def solve(
        self,
        weights: Sequence[float] | Floats,
        *,
        far: Floats | None = None,
        is_coding: bool = False,
        never: Collection[int] = (),
        paid: float = 1.0,
    ) -> RecomputeChoice:
        """``weights``: seconds that keeping each of ``kept`` near is worth avoiding; ``far``: that
        keeping it away costs (infinite where it cannot leave); ``never`` lists operators that must
        not run again; ``paid`` is the share that counts of what those take that do."""
        ticks = self._ticks.copy()
        if paid != 1.0:
            places = list(self._paid_at.values())
            ticks[places] = np.rint(ticks[places] * paid).astype(np.int64)
        near = np.asarray(weights)
        # What is coded waits as well, in fewer bytes.
        coded = np.full_like(near, np.inf)
        if is_coding:
            coded = paid * self._coded_seconds + near * self.coded_shares
        away = np.full_like(near, np.inf) if far is None else far
        cheaper = np.minimum(np.minimum(near, coded), away)
        weighed = np.minimum(np.rint(cheaper * _TICKS_PER_SECOND), 2.0**52)
        ticks[self._first_kept :] = weighed.astype(np.int64)
        ticks[[self._paid_at[number] for number in never]] = _UNCUTTABLE
        self._flow.set_arcs_capacity(self._all, ticks)
        status = self._flow.solve(_SOURCE, _SINK)
        assert status == self._flow.OPTIMAL, status
        source_side = set(self._flow.get_source_side_min_cut())
        again = (s for s in self._tally.unit_of if self._enters[s] not in source_side)
        is_kept = [
            self._enters[s] in source_side and self._leaves[s] not in source_side for s in self.kept
        ]
        kept = [(s, place) for place, (s, stays) in enumerate(zip(self.kept, is_kept)) if stays]
        left = [(s, place) for s, place in kept if cheaper[place] < near[place]]
        return RecomputeChoice(
            again=frozenset(again),
            kept=frozenset(s for s, _ in kept),
            away=frozenset(s for s, place in left if away[place] <= coded[place]),
            coded=frozenset(s for s, place in left if coded[place] < away[place]),
            seconds=self._flow.optimal_flow() / _TICKS_PER_SECOND,
        )

    @property
    def rounding_seconds(self) -> float:
        """By how much a cut's value may be off: half a tick for each arc."""
        return len(self._arcs) * 0.5 / _TICKS_PER_SECOND
