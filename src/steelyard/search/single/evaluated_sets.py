"""Try sets of recomputations one after another, and keep the best of all that were tried.

Counts trials, so that a search can stop after a number of them and never after a time: the same
question has the same answer on any machine. Not for what to try: see price_sweep.py and
local_search.py.
"""

from steelyard.search.pareto_front import ParetoFront, Point
from steelyard.search.single.estimate import PeakEstimate
from steelyard.search.single.fast_estimator import FastEstimator

# So many storages may be held by remembered sets; beyond that all are forgotten at once.
_REMEMBERED = 4_000_000


class Trials:
    """``whole`` holds only plans that treat all blocks of a run alike, which makes short files."""

    def __init__(self, tally: FastEstimator) -> None:
        self.tally = tally
        self.archive = ParetoFront()
        self.whole = ParetoFront()
        self.made = 0
        self._known: dict[frozenset[int], Point] = {}
        able = len(tally.unit_of) + len(tally.far_value_on) + len(tally.coded_value_on)
        self._room = _REMEMBERED // max(1, able)
        self.plain = self.point(frozenset(), is_whole=True)

    def point(self, again: frozenset[int], *, is_whole: bool = False) -> Point:
        known = self._known.get(again)
        if known is None:
            return self.noted(again, self.counted(again), is_whole=is_whole)
        if not is_whole:
            return known
        return self._whole_point(again, known.peak_bytes, known.seconds)

    def counted(self, again: frozenset[int]) -> PeakEstimate:
        self.made += 1
        return self.tally.count(again)

    def noted(
        self, again: frozenset[int], counted: PeakEstimate, *, is_whole: bool = False
    ) -> Point:
        """The plan as a point of the archive, without what nobody reads; whole ones stay whole."""
        units = self.tally.units
        active = frozenset(s for u in counted.active for s in units[u].makes if s in again)
        active |= frozenset((*counted.away, *counted.often))
        point = Point(peak_bytes=counted.peak_bytes, seconds=counted.seconds, again=active)
        self.archive.add(point)
        if len(self._known) >= self._room:
            self._known.clear()
        self._known[again] = point
        if is_whole:
            return self._whole_point(again, counted.peak_bytes, counted.seconds)
        return point

    def _whole_point(self, again: frozenset[int], peak_bytes: int, seconds: float) -> Point:
        point = Point(peak_bytes=peak_bytes, seconds=seconds, again=again)
        self.whole.add(point)
        return point
