"""A record of all sets of choices that a search has tried, and the best plans among them.

It counts trials, so that a search can stop after a number of trials instead of a time. The same
search then has the same result on any machine. Not for choosing what to try: see price_sweep.py and
local_search.py.
"""

from steelyard.search.pareto_front import ParetoFront, Point
from steelyard.search.single.estimator.estimate import PeakEstimate
from steelyard.search.single.estimator.fast_estimator import FastEstimator

# The maximum number of storages in all remembered sets, which limits the memory of the cache. If it
# is exceeded, the cache is cleared.
_MAX_REMEMBERED_STORAGES = 4_000_000


class Trials:
    """The plans that were tried so far; ``archive`` holds the best of them.

    ``block_uniform`` holds only plans that make the same choice in all blocks of a run: these
    make short plan files.
    """

    def __init__(self, estimator: FastEstimator) -> None:
        self.estimator = estimator
        self.archive = ParetoFront()
        self.block_uniform = ParetoFront()
        self.num_tried = 0
        self._known: dict[frozenset[int], Point] = {}
        num_values = (
            len(estimator.unit_of) + len(estimator.offloadable) + len(estimator.quantizable)
        )
        self._max_known = _MAX_REMEMBERED_STORAGES // max(1, num_values)
        self.plain = self.evaluate(frozenset(), is_block_uniform=True)

    def evaluate(self, choices: frozenset[int], *, is_block_uniform: bool = False) -> Point:
        known = self._known.get(choices)
        if known is None:
            return self.record(choices, self.estimate(choices), is_block_uniform=is_block_uniform)
        if not is_block_uniform:
            return known
        return self._block_uniform_point(choices, known.peak_bytes, known.seconds)

    def estimate(self, choices: frozenset[int]) -> PeakEstimate:
        self.num_tried += 1
        return self.estimator.estimate(choices)

    def record(
        self, choices: frozenset[int], estimate: PeakEstimate, *, is_block_uniform: bool = False
    ) -> Point:
        """Add the plan to the archive, without choices that have no effect.

        Block-uniform plans keep those choices.
        """
        units = self.estimator.units
        active = frozenset(s for u in estimate.active for s in units[u].makes if s in choices)
        active |= frozenset((*estimate.evicted, *estimate.repeated))
        point = Point(peak_bytes=estimate.peak_bytes, seconds=estimate.seconds, choices=active)
        self.archive.add(point)
        if len(self._known) >= self._max_known:
            self._known.clear()
        self._known[choices] = point
        if is_block_uniform:
            return self._block_uniform_point(choices, estimate.peak_bytes, estimate.seconds)
        return point

    def add_all(self, others: "Trials") -> None:
        """Add the best plans of other trials of the same program."""
        if others is not self:
            self.num_tried += others.num_tried
            for point in others.archive:
                self.archive.add(point)
            for point in others.block_uniform:
                self.block_uniform.add(point)

    def _block_uniform_point(
        self, choices: frozenset[int], peak_bytes: int, seconds: float
    ) -> Point:
        point = Point(peak_bytes=peak_bytes, seconds=seconds, choices=choices)
        self.block_uniform.add(point)
        return point
