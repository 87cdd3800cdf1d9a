"""Better plans next to known ones: mixtures of two, values taken out, put in, or exchanged.

Every step is counted exactly; a number of trials, never a time, ends each. Not for the global
view, which is the cut's: see price_sweep.py.
"""

from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from random import Random

from steelyard.search.pareto_front import ParetoFront, Point
from steelyard.search.single.copy_placement import NEVER
from steelyard.search.single.estimate import PeakEstimate
from steelyard.search.single.evaluated_sets import Trials
from steelyard.search.single.fast_estimator import FastEstimator

_WIDTH = 8
_FEW = 4
# Where none of a few helps, so many times as many are tried.
_WIDEST = 5


class LocalSearch:
    """``atoms`` are what is moved at once: single values, or a value in all blocks of a run."""

    def __init__(self, trials: Trials, atoms: Iterable[frozenset[int]], *, are_whole: bool) -> None:
        self._trials = trials
        self._tally = trials.tally
        self.are_whole = are_whole
        tally = self._tally
        self.atoms = tuple(sorted(atoms, key=min))
        # The first of those that share a choice: it alone.
        self._atom_of: dict[int, frozenset[int]] = {}
        for atom in self.atoms:
            for choice in atom:
                self._atom_of.setdefault(choice, atom)
        # Those that only say how often, in a set that keeps its order.
        self._oftener = dict.fromkeys(a for a in self.atoms if all(map(tally.is_often, a)))
        self._others = [a for a in self.atoms if a not in self._oftener]
        # Less than this counts as nothing paid.
        self._trifle = 1e-9 * tally.plain_seconds
        self._seconds = {a: tally.alone_seconds(a) for a in self.atoms}
        self._nbytes = {a: sum(tally.nbytes[tally.storage(s)] for s in a) for a in self.atoms}
        # What costs much and holds little is the first to be kept after all.
        self._dearest = sorted(
            self.atoms, key=lambda a: (-self._seconds[a] / (1 + self._nbytes[a]), min(a))
        )
        self._longest = sorted(self.atoms, key=lambda a: (-self._seconds[a], min(a)))
        self._largest = sorted(self.atoms, key=lambda a: (-self._nbytes[a], min(a)))

    def seed(self, points: Iterable[Point]) -> None:
        """Start from known plans; where atoms are several values, rounded to all and to none."""
        for point in points:
            touched = [a for a in self.atoms if a & point.again]
            self._point(frozenset().union(*touched))
            self._point(frozenset().union(*(a for a in touched if a <= point.again)))
            self._point(
                frozenset().union(*(a for a in touched if 2 * len(a & point.again) > len(a)))
            )

    def relink(self, points: Sequence[Point], *, steps: int = 24) -> None:
        """Mixtures of neighbours: one plan's choices up to a line, the other's from there on."""
        born, storage = self._tally.born, self._tally.storage
        for left, right in pairwise(points):
            differ = sorted(left.again ^ right.again, key=lambda s: (born[storage(s)], s))
            cuts = {round(i * len(differ) / steps) for i in range(1, steps)}
            for cut in sorted(cuts - {0, len(differ)}):
                changed = frozenset(differ[:cut])
                self._trials.point(left.again ^ changed)
                self._trials.point(right.again ^ changed)

    def settle(self, limit_bytes: int) -> None:
        """The best known plan within the limit, and the next above it, brought to rest there."""
        below, above = self._known.within(limit_bytes), self._known.above(limit_bytes)
        if below is not None:
            self.drop(below, limit_bytes)
        if above is not None:
            repaired = self.repair(above, limit_bytes)
            if repaired is not None:
                self.drop(repaired, limit_bytes)

    @property
    def _known(self) -> ParetoFront:
        return self._trials.whole if self.are_whole else self._trials.archive

    def drop(self, point: Point, limit_bytes: int) -> Point:
        """Keep what need not be computed again, while the peak stays within the limit."""
        again_better = True
        while again_better:
            again_better = False
            counted = self._trials.counted(point.again)
            line = counted.peak_line()
            for atom in self._dearest:
                if not atom & point.again:
                    continue
                if self._surely_too_much(atom, counted, line, limit_bytes - point.peak_bytes):
                    continue
                tried = self._point(point.again - atom)
                if tried.peak_bytes <= limit_bytes and tried.seconds < point.seconds:
                    point, again_better = tried, True
        return point

    def _surely_too_much(
        self, atom: frozenset[int], counted: PeakEstimate, line: int, slack_bytes: int
    ) -> bool:
        """Kept, it would wait across the peak, where no copy of it is now; no proof, for what is
        upstream of it may go."""
        tally = self._tally
        if atom in self._oftener:
            return False  # made less often it may wait there or not
        storages = {tally.storage(s) for s in atom}
        return (
            sum(tally.nbytes[s] for s in storages if _waits(tally, s, line, counted)) > slack_bytes
        )

    def repair(
        self, point: Point, limit_bytes: int, *, width: int = _WIDTH, steps: int = 200
    ) -> Point | None:
        """Change what holds most at the peak, cheapest first, until the limit is met."""
        again, counted = point.again, self._trials.counted(point.again)
        for _ in range(steps):
            if counted.peak_bytes <= limit_bytes:
                return self._trials.noted(again, counted, is_whole=self.are_whole)
            best = self._best_relief(again, counted, limit_bytes, width)
            if best is None:
                return None
            again, counted = best
        return None

    def _best_relief(
        self, again: frozenset[int], counted: PeakEstimate, limit_bytes: int, width: int
    ) -> tuple[frozenset[int], PeakEstimate] | None:
        """Of a few neighbours, the one that takes most off the excess for what it pays."""
        excess = counted.excess(limit_bytes)
        best: tuple[float, frozenset[int], PeakEstimate] | None = None
        for number, moved in enumerate(self._relieving(again, counted)):
            if number >= (width if best else _WIDEST * width):
                break
            tried = self._trials.counted(moved)
            self._trials.noted(moved, tried, is_whole=self.are_whole)
            left = tried.excess(limit_bytes)
            if left < excess:
                score = (excess - left) / max(tried.seconds - counted.seconds, self._trifle)
                if best is None or score > best[0]:
                    best = (score, moved, tried)
        return best and best[1:]

    def _relieving(self, again: frozenset[int], counted: PeakEstimate) -> Iterator[frozenset[int]]:
        """Neighbours that may hold less at the peak, those that pay least for a byte first:
        what waits there is not kept, and between them early copies are not made."""
        tally, line = self._tally, counted.peak_line()
        saved_for_backward = []
        for atom in self._oftener:
            if self._is_next(atom, again) and any(
                _is_copied(tally, tally.storage(c), line, counted) for c in atom
            ):
                paid = self._seconds[atom] / (1 + self._nbytes[atom])
                saved_for_backward.append((paid, min(atom), atom, atom))
        for atom in self._others:
            # What is moved may also be moved otherwise; what is made again is not there to move.
            new = {tally.storage(s) for s in atom - again} - again
            if any(_waits(tally, s, line, counted) for s in new):
                closed = self._closure(atom, again)
                paid = tally.alone_seconds(closed)
                saved_for_backward.append(
                    (paid / (1 + self._nbytes[atom]), min(atom), atom, closed)
                )
        copied = (
            atom
            for atom in self._largest
            if any(_is_copied(tally, tally.storage(s), line, counted) for s in atom & again)
        )
        for _, _, atom, closed in sorted(saved_for_backward, key=lambda w: w[:2]):
            yield again | atom
            if closed != atom:
                yield again | closed
            early = next(copied, None)
            if early is not None:
                yield again - early
        for atom in copied:
            yield again - atom

    def _is_next(self, atom: frozenset[int], again: frozenset[int]) -> bool:
        """Whether it makes once more what is made again."""
        return all(c not in again and self._tally.once_less(c) in again for c in atom)

    def _closure(self, atom: frozenset[int], again: frozenset[int]) -> frozenset[int]:
        """With what it would read that nothing else keeps, or else recomputing it pins that."""
        tally = self._tally
        found, pending = set(atom), list(atom)
        while pending:
            if not tally.is_again(choice := pending.pop()):
                continue
            for read in tally.units[tally.unit_of[choice]].reads:
                if read in found or read in again or read not in tally.unit_of:
                    continue
                if tally.late_first[read] == NEVER:
                    more = self._atom_of[read] - found
                    found |= more
                    pending += more
        return frozenset(found)

    def descend(self, *, trials: int) -> None:
        """Lower the least peak known: one change, even for the worse, then repair."""
        end = self._trials.made + trials
        while self._trials.made < end:
            least = self._known.least
            if not self._descended(least, end):
                return

    def _descended(self, least: Point, end: int) -> bool:
        tally, line = self._tally, self._trials.counted(least.again).peak_line()
        near = [a for a in self._largest if any(_lives(tally, tally.storage(s), line) for s in a)]
        for atom in near + [a for a in self._largest if a not in set(near)]:
            flips = {atom: None}
            if not atom & least.again:
                flips[self._closure(atom, least.again)] = None
            for flip in flips:
                start = self._point(least.again ^ flip)
                limit = least.peak_bytes - 1
                if self.repair(start, limit, width=_FEW, steps=_FEW) is not None:
                    return True
                if self._trials.made >= end:
                    return False
        return False

    def exchange(self, limit_bytes: int, *, trials: int) -> None:
        """Keep one value after all and repair elsewhere, longest operators first."""
        point = self._known.within(limit_bytes)
        end = self._trials.made + trials
        improved = point is not None
        while improved and self._trials.made < end:
            improved = False
            for atom in self._longest:
                assert point is not None
                if not atom & point.again:
                    continue
                tried: Point | None = self._point(point.again - atom)
                assert tried is not None
                if tried.peak_bytes > limit_bytes:
                    tried = self.repair(tried, limit_bytes, width=_FEW, steps=_FEW)
                if tried is not None and tried.seconds < point.seconds:
                    point, improved = self.drop(tried, limit_bytes), True
                if self._trials.made >= end:
                    return

    def kick(self, limit_bytes: int, *, times: int, seed: int) -> None:
        """Change a stretch of the model at random, repair and settle; keep what is better."""
        rng = Random(seed)
        for _ in range(times):
            point = self._known.within(limit_bytes)
            if point is None:
                return
            start = rng.randrange(len(self.atoms))
            length = 1 + rng.randrange(max(1, len(self.atoms) // 4))
            stretch = frozenset().union(*self.atoms[start : start + length])
            other = rng.choice(list(self._known)).again
            how = rng.randrange(3)
            inside = (frozenset(), stretch, stretch & other)[how]
            changed = self._point((point.again - stretch) | inside)
            repaired = self.repair(changed, limit_bytes, width=_FEW, steps=40)
            if repaired is not None:
                self.drop(repaired, limit_bytes)

    def _point(self, again: frozenset[int]) -> Point:
        return self._trials.point(again, is_whole=self.are_whole)


def _waits(tally: FastEstimator, storage: int, line: int, counted: PeakEstimate) -> bool:
    """A kept value that something reads only later."""
    return tally.forward_last[storage] < line < counted.first[storage] < NEVER


def _is_copied(tally: FastEstimator, storage: int, line: int, counted: PeakEstimate) -> bool:
    first = counted.first[storage]
    return first == line or first <= line <= tally.late_last[storage]


def _lives(tally: FastEstimator, storage: int, line: int) -> bool:
    last = max(tally.wanted[storage], tally.late_last[storage])
    return tally.forward_last[storage] <= line <= last
