"""The best plans found so far: the fastest for each amount of memory.

Seconds fall strictly as memory rises. A search keeps all its results here, so that every budget
is answered from the same plans and a larger budget never gets a slower plan. Not for finding
plans: see search/single/price_sweep.py and search/single/local_search.py.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    peak_bytes: int
    seconds: float
    choices: frozenset[int]


class ParetoFront:
    """Points sorted by peak bytes; a point with a larger peak is faster."""

    def __init__(self) -> None:
        self._peaks: list[int] = []
        self._points: list[Point] = []
        self.accepted = 0

    def __iter__(self) -> Iterator[Point]:
        return iter(self._points)

    def __len__(self) -> int:
        return len(self._points)

    def add(self, point: Point) -> bool:
        """Add the point unless a known point dominates it, and drop the points that it dominates.

        Return True if the point was added.
        """
        at = bisect_right(self._peaks, point.peak_bytes)
        if at and self._points[at - 1].seconds <= point.seconds:
            return False
        start = bisect_left(self._peaks, point.peak_bytes)
        end = start
        while end < len(self._points) and self._points[end].seconds >= point.seconds:
            end += 1
        self._points[start:end] = [point]
        self._peaks[start:end] = [point.peak_bytes]
        self.accepted += 1
        return True

    def within(self, peak_bytes: int) -> Point | None:
        """Return the fastest point with at most this peak, or None."""
        at = bisect_right(self._peaks, peak_bytes)
        return self._points[at - 1] if at else None

    def above(self, peak_bytes: int) -> Point | None:
        """Return the point with the next larger peak, or None."""
        at = bisect_right(self._peaks, peak_bytes)
        return self._points[at] if at < len(self._points) else None

    @property
    def least(self) -> Point:
        return self._points[0]

    @property
    def fastest(self) -> Point:
        return self._points[-1]

    def hull(self) -> list[Point]:
        """Return the points on the lower convex hull, along which each further byte saves less
        time.
        """
        hull: list[Point] = []
        for point in self._points:
            while len(hull) > 1 and _is_above(hull[-2], hull[-1], point):
                hull.pop()
            hull.append(point)
        return hull


def _is_above(left: Point, middle: Point, right: Point) -> bool:
    run = right.peak_bytes - left.peak_bytes
    chord = left.seconds + (right.seconds - left.seconds) * (
        (middle.peak_bytes - left.peak_bytes) / run
    )
    return middle.seconds >= chord
