"""Finds the plans between the unplanned step and the plan with the least memory.

Every exploration begins with a sweep, which finds plans for all amounts of memory. A local search
then improves the plans around one memory limit, until the gap to the lower bound is small, or all
plans. Nothing that was found is dropped, so that a larger budget never gets a slower plan from the
same exploration. Not for choosing among the plans found: see search.py.
"""

import math
from collections.abc import Iterable, Mapping
from functools import cached_property
from types import MappingProxyType

from steelyard.ir.program import Program
from steelyard.plans.stop_request import StopRequest
from steelyard.predict.cost_table import CostTable
from steelyard.search.pareto_front import ParetoFront, Point
from steelyard.search.single.baseline_plans import simple_plans
from steelyard.search.single.estimator.fast_estimator import FastEstimator
from steelyard.search.single.estimator.transfer_timing import TransferMode
from steelyard.search.single.evaluated_sets import Trials
from steelyard.search.single.local_search import LocalSearch
from steelyard.search.single.lower_bound import least_seconds
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
from steelyard.search.single.step_plans import (
    Explored,
    block_uniform_choices,
    choices_in_trace,
    prefer_block_uniform,
)

# A plan whose time is within this share of the lower bound is not improved any further.
ENOUGH = 0.01
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
# Around one limit: the trials of a descent and of an exchange, the rounds, the kicks of a round,
# and the plans on either side of the limit that are mixed.
_DESCENT, _EXCHANGE, _ROUNDS_AT_LIMIT, _KICKS_AT_LIMIT, _NEIGHBORS = 250, 80, 6, 8, 3


class Exploration:
    """The search over one program, swept once and improved on demand.

    ``values`` may be recomputed (with ``repeats``, more than once), ``offloadable`` ones moved to
    offload memory, those in ``slices`` fetched in slices, and ``quantizable`` ones kept in 8 bits.
    The search starts from the plans of ``known``, the same step in another variant. Micro-batches
    are explored less thoroughly than the whole batch.
    """

    def __init__(
        self,
        program: Program,
        costs: CostTable,
        values: Iterable[str],
        offloadable: Iterable[str] = (),
        quantizable: Iterable[str] = (),
        slices: Mapping[str, int] = MappingProxyType({}),
        *,
        known: Explored | None = None,
        thorough: bool = True,
        repeats: bool = True,
    ) -> None:
        self._estimator = FastEstimator(program, costs, values, offloadable, quantizable, slices)
        self._groups = block_uniform_choices(self._estimator)
        self._choices = [*self._estimator.unit_of, *self._estimator.eviction_choices()]
        self._thorough, self._repeats = thorough, repeats
        self._bounds: dict[tuple[int, bool], float] = {}
        self._improved: set[int] = set()
        self.is_complete = not self._choices
        self._trials = self._swept(known)

    def _swept(self, known: Explored | None) -> Trials:
        trials = Trials(self._estimator)
        if self._choices:
            if known is not None:
                _start_from(trials, known)
            _sweep(trials, self._cut)
        return trials

    @cached_property
    def _cut(self) -> MinCut:
        return MinCut(self._estimator)

    def _local_searches(self) -> tuple[LocalSearch, ...]:
        """The search over block-uniform atoms, if there are any, and that over single choices."""
        single = LocalSearch(
            self._trials, (frozenset({s}) for s in self._choices), are_block_uniform=False
        )
        if len(self._groups) == len(self._choices):
            return (single,)
        return LocalSearch(self._trials, self._groups, are_block_uniform=True), single

    @property
    def num_tried(self) -> int:
        """The number of plans that were tried so far."""
        return self._trials.num_tried

    def explored(self) -> Explored:
        """Return the plans found so far."""
        return Explored(
            estimator=self._estimator,
            chain=prefer_block_uniform(self._trials.archive, self._trials.block_uniform),
            groups=tuple(self._groups),
            trials=self._trials.num_tried,
        )

    def lower_bound(self, limit_bytes: int) -> float:
        """Return a lower bound on the seconds of the plans of this program within the limit.

        It is for plans that recompute each value at most once, unless the best plan so far
        recomputes one more often. This is the bound that is printed with the plan.
        """
        known = self._trials.archive.within(limit_bytes) or self._trials.archive.least
        is_often = bool(self._estimator.times_of(known.choices))
        key = limit_bytes, is_often
        if key not in self._bounds:
            plain = self._trials.plain
            self._bounds[key] = (
                plain.seconds - self._estimator.slicing_gain_seconds
                if not self._choices or plain.peak_bytes <= limit_bytes
                else least_seconds(
                    self._estimator,
                    self._cut,
                    limit_bytes=limit_bytes,
                    within_seconds=known.seconds,
                    repeats=is_often,
                )
            )
        return self._bounds[key]

    def is_near_bound(self, limit_bytes: int) -> bool:
        """True if the best plan within the limit is hardly slower than the lower bound."""
        best = self._trials.archive.within(limit_bytes)
        return best is not None and self._is_near(best.seconds, limit_bytes)

    def _is_near(self, seconds: float, limit_bytes: int) -> bool:
        return seconds <= (1 + ENOUGH) * self.lower_bound(limit_bytes)

    def improve(
        self, limit_bytes: int, stop: StopRequest, *, to_beat_seconds: float = math.inf
    ) -> None:
        """Improve the plans around a memory limit, until they are near the lower bound or a few
        rounds bring nothing.

        Does nothing if no plan of this program can be considerably faster than
        ``to_beat_seconds``.
        """
        if self.is_complete or limit_bytes in self._improved:
            return
        if to_beat_seconds < math.inf and self._is_near(to_beat_seconds, limit_bytes):
            return
        for local_search in self._local_searches():
            self._improve_at(limit_bytes, local_search, stop)
        if not stop.is_granted:
            self._improved.add(limit_bytes)

    def _improve_at(self, limit_bytes: int, local_search: LocalSearch, stop: StopRequest) -> None:
        trials = self._trials
        known = trials.block_uniform if local_search.are_block_uniform else trials.archive
        local_search.seed(_around(trials.archive, limit_bytes, 2 * _NEIGHBORS))
        stale = 0
        for number in range(_ROUNDS_AT_LIMIT):
            if stop.is_granted or self.is_near_bound(limit_bytes) or stale == 2:
                return
            before = _overhead_within(trials, limit_bytes)
            if number == 0:
                local_search.descend(trials=_DESCENT)
            local_search.relink(_around(known, limit_bytes, _NEIGHBORS))
            local_search.settle(limit_bytes)
            local_search.exchange(limit_bytes, trials=_EXCHANGE)
            if number:
                local_search.kick(limit_bytes, times=_KICKS_AT_LIMIT, seed=number)
            is_stale = _overhead_within(trials, limit_bytes) >= before * _STALE_RATIO
            stale = stale + 1 if is_stale else 0

    def complete(self, known: Explored | None = None, stop: StopRequest | None = None) -> None:
        """Improve the plans for all amounts of memory.

        The local search depends on where it starts. So it starts from the sweep again, to find no
        worse plans than without an earlier improvement.
        """
        stop = stop or StopRequest()
        if self.is_complete or stop.is_granted:
            return
        earlier = self._trials
        if self._improved:
            self._trials = self._swept(known)
        local_searches = self._local_searches()
        for local_search in local_searches:
            efforts = _EFFORTS if self._thorough else _EFFORTS_ON_PARTS
            if local_search.are_block_uniform:
                efforts = _BLOCK_UNIFORM_EFFORTS
            _improve(self._trials, local_search, efforts=efforts, stop=stop)
        if self._thorough:
            _kick(self._trials, local_searches[-1], stop)
        if self._repeats and self._estimator.unit_of and not stop.is_granted:
            recompute_repeatedly(self._trials)
        self._trials.add_all(earlier)
        self.is_complete = not stop.is_granted


def explore(
    program: Program,
    costs: CostTable,
    values: Iterable[str],
    offloadable: Iterable[str] = (),
    quantizable: Iterable[str] = (),
    *,
    repeats: bool = True,
) -> Explored:
    """Explore the plans of one step for all amounts of memory; see ``Exploration``."""
    exploration = Exploration(program, costs, values, offloadable, quantizable, repeats=repeats)
    exploration.complete()
    return exploration.explored()


def sketch(program: Program, costs: CostTable, values: Iterable[str]) -> Explored:
    """Try only the sweeps and baseline plans, for a quick and approximate Pareto front."""
    return Exploration(program, costs, values).explored()


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


def _start_from(trials: Trials, known: Explored) -> None:
    for point in known.chain:
        trials.evaluate(choices_in_trace(known.estimator, point.choices, trials.estimator))


def _sweep(trials: Trials, cut: MinCut) -> None:
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


def _overhead_within(trials: Trials, limit_bytes: int) -> float:
    """Return the seconds that the best plan within the limit pays; infinite if there is none."""
    point = trials.archive.within(limit_bytes)
    return math.inf if point is None else point.seconds - trials.plain.seconds


def _around(known: ParetoFront, limit_bytes: int, count: int) -> list[Point]:
    """Return up to ``count`` plans on either side of the limit."""
    points = list(known)
    within = sum(point.peak_bytes <= limit_bytes for point in points)
    return points[max(0, within - count) : within + count]


def _improve(
    trials: Trials, local_search: LocalSearch, *, efforts: tuple[int, ...], stop: StopRequest
) -> None:
    known = trials.block_uniform if local_search.are_block_uniform else trials.archive
    local_search.seed(trials.archive.hull())
    for effort in efforts:
        local_search.relink(known.hull())
        local_search.descend(trials=effort)
        local_search.relink(known.hull())
        for limit in _memory_limits(known):
            if stop.is_granted:
                return
            local_search.settle(limit)
    for limit in _memory_limits(known):
        if stop.is_granted:
            return
        local_search.exchange(limit, trials=40)
    local_search.relink(known.hull())


def _kick(trials: Trials, local_search: LocalSearch, stop: StopRequest) -> None:
    """Make random changes until they hardly help, or until enough was tried for this program's
    size.
    """
    max_tried = _KICKING_WORK // (200 + trials.estimator.num_lines)
    limits = _memory_limits(trials.archive)
    stale = number = 0
    before = _overhead(trials, limits)
    while stale < 2 and trials.num_tried < max_tried and not stop.is_granted:
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
