"""Chooses recomputations by a minimum cut: seconds for recomputed values, weights for saved ones.

The network is that of torch's min-cut partitioner (He and Yu, 2023) with one change. To save a
value costs its bytes times a price for each line of the gap during which it is idle; so peaks have
a price, instead of the sum of all saved bytes. Not for setting these prices: see price_sweep.py.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
from ortools.graph.python import max_flow

from steelyard.search.single.estimator.copy_placement import NEVER
from steelyard.search.single.estimator.estimate import Floats
from steelyard.search.single.estimator.fast_estimator import FastEstimator

# Capacities are integers, in picoseconds. This leaves room for steps of ten hours.
_TICKS_PER_SECOND = 1e12
_UNCUTTABLE = 1 << 58
_SOURCE, _SINK = 0, 1


@dataclass(frozen=True, slots=True, kw_only=True)
class RecomputeChoice:
    """The result of a cut.

    ``recomputed`` are the storages to recompute, and ``kept`` those that must be saved for this: on
    the device or, if that is cheaper, ``offloaded`` or ``quantized``. ``seconds`` is the value of
    the whole cut, including all these prices.
    """

    recomputed: frozenset[int]
    kept: frozenset[int]
    offloaded: frozenset[int]
    quantized: frozenset[int]
    seconds: float


class MinCut:
    """One network per program; only the capacities change from one solve to the next."""

    def __init__(self, estimator: FastEstimator) -> None:
        self._tally = estimator
        self._flow = max_flow.SimpleMaxFlow()
        self._arcs: list[tuple[int, int, int]] = []
        self._next_node = 2
        self._in_node: dict[int, int] = {}
        self._out_node: dict[int, int] = {}
        self._compute_arc: dict[int, int] = {}
        self.kept: list[int] = []
        self._build()
        self._quantize_seconds, self.quantized_shares = estimator.quantization_costs(self.kept)
        tails, heads, capacities = (np.array(column) for column in zip(*self._arcs))
        self._first_saved_arc = len(self._arcs) - len(self.kept)
        self._ticks = capacities
        self._all_arcs = self._flow.add_arcs_with_capacity(tails, heads, capacities)

    def _build(self) -> None:
        estimator = self._tally
        forward = [s for s in estimator.storages if estimator.born[s] < estimator.backward_start]
        saved_arcs: list[tuple[int, int, int]] = []
        for storage in forward:
            self._in_node[storage] = self._node()
            self._out_node[storage] = self._node()
            saved_arcs.append((self._in_node[storage], self._out_node[storage], 0))
            if storage not in estimator.unit_of:
                self._arcs.append((_SOURCE, self._in_node[storage], _UNCUTTABLE))
            if estimator.backward_first[storage] != NEVER:
                self._arcs.append((self._out_node[storage], _SINK, _UNCUTTABLE))
        for number, unit in enumerate(estimator.units):
            unit_results = [s for s in unit.makes if estimator.unit_of.get(s) == number]
            entry = self._in_node[unit_results[0]]
            if len(unit_results) > 1:
                # If a call has several results, its seconds are paid once, however many of the
                # results are needed.
                entry = self._node()
                self._arcs += [(entry, self._in_node[s], _UNCUTTABLE) for s in unit_results]
            ticks = round(estimator.seconds_of((number,)) * _TICKS_PER_SECOND)
            self._compute_arc[number] = len(self._arcs)
            self._arcs.append((_SOURCE, entry, ticks))
            self._arcs += [
                (self._out_node[s], entry, _UNCUTTABLE) for s in unit.reads if s in self._out_node
            ]
        self.kept = forward
        self._arcs += saved_arcs

    def _node(self) -> int:
        self._next_node += 1
        return self._next_node - 1

    def solve(
        self,
        weights: Sequence[float] | Floats,
        *,
        offload_seconds: Floats | None = None,
        allows_quantize: bool = False,
        not_recomputed: Collection[int] = (),
        compute_scale: float = 1.0,
    ) -> RecomputeChoice:
        """Return the cheapest set of recomputations at these prices.

        ``weights`` are the seconds charged for saving each of ``kept`` on the device,
        ``offload_seconds`` those for offloading it (infinite if that is impossible). Units in
        ``not_recomputed`` must not run again. The seconds of recomputation and codecs are
        multiplied by ``compute_scale``.
        """
        ticks = self._ticks.copy()
        if compute_scale != 1.0:
            arcs = list(self._compute_arc.values())
            ticks[arcs] = np.rint(ticks[arcs] * compute_scale).astype(np.int64)
        resident = np.asarray(weights)
        # A quantized value also occupies memory while it is idle, but with fewer bytes.
        quantized = np.full_like(resident, np.inf)
        if allows_quantize:
            quantized = compute_scale * self._quantize_seconds + resident * self.quantized_shares
        offloaded = np.full_like(resident, np.inf) if offload_seconds is None else offload_seconds
        cheaper = np.minimum(np.minimum(resident, quantized), offloaded)
        saved_ticks = np.minimum(np.rint(cheaper * _TICKS_PER_SECOND), 2.0**52)
        ticks[self._first_saved_arc :] = saved_ticks.astype(np.int64)
        ticks[[self._compute_arc[number] for number in not_recomputed]] = _UNCUTTABLE
        self._flow.set_arcs_capacity(self._all_arcs, ticks)
        status = self._flow.solve(_SOURCE, _SINK)
        assert status == self._flow.OPTIMAL, status
        source_side = set(self._flow.get_source_side_min_cut())
        recomputed = (s for s in self._tally.unit_of if self._in_node[s] not in source_side)
        saved_flags = [
            self._in_node[s] in source_side and self._out_node[s] not in source_side
            for s in self.kept
        ]
        saved = [
            (s, index)
            for index, (s, is_saved) in enumerate(zip(self.kept, saved_flags))
            if is_saved
        ]
        evicted = [(s, index) for s, index in saved if cheaper[index] < resident[index]]
        return RecomputeChoice(
            recomputed=frozenset(recomputed),
            kept=frozenset(s for s, _ in saved),
            offloaded=frozenset(s for s, index in evicted if offloaded[index] <= quantized[index]),
            quantized=frozenset(s for s, index in evicted if quantized[index] < offloaded[index]),
            seconds=self._flow.optimal_flow() / _TICKS_PER_SECOND,
        )

    @property
    def rounding_seconds(self) -> float:
        """The maximum rounding error of a cut's value, which is half a unit for each arc."""
        return len(self._arcs) * 0.5 / _TICKS_PER_SECOND
