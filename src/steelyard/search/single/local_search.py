"""Improves known plans: mixes two of them, or removes, adds and exchanges single values.

Every step is estimated exactly, and ends after a number of trials, never after a time. Not for the
global search with minimum cuts: see price_sweep.py.
"""

from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from random import Random

from steelyard.search.pareto_front import ParetoFront, Point
from steelyard.search.single.estimator.copy_placement import NEVER
from steelyard.search.single.estimator.estimate import PeakEstimate
from steelyard.search.single.estimator.fast_estimator import FastEstimator
from steelyard.search.single.evaluated_sets import Trials

_MAX_NEIGHBORS = 8
_FEW_NEIGHBORS = 4
# If none of the first neighbours is better, up to this many times as many are tried.
_NEIGHBOR_FACTOR = 5


class LocalSearch:
    """A local search over ``atoms``: the sets of choices that are made or undone together.

    An atom is a single choice, or the choices for one value in all blocks of a run.
    """

    def __init__(
        self, trials: Trials, atoms: Iterable[frozenset[int]], *, are_block_uniform: bool
    ) -> None:
        self._trials = trials
        self._estimator = trials.estimator
        self.are_block_uniform = are_block_uniform
        estimator = self._estimator
        self.atoms = tuple(sorted(atoms, key=min))
        # If several atoms share a choice, the first one is used, which has only that choice.
        self._atom_of: dict[int, frozenset[int]] = {}
        for atom in self.atoms:
            for choice in atom:
                self._atom_of.setdefault(choice, atom)
        # Atoms that consist of repeat choices only; a dict, because it keeps its order.
        self._repeat_atoms = dict.fromkeys(
            a for a in self.atoms if all(map(estimator.is_repeat, a))
        )
        self._other_atoms = [a for a in self.atoms if a not in self._repeat_atoms]
        # Smaller differences count as zero.
        self._min_seconds = 1e-9 * estimator.plain_seconds
        self._seconds = {a: estimator.standalone_seconds(a) for a in self.atoms}
        self._nbytes = {
            a: sum(estimator.nbytes[estimator.storage(s)] for s in a) for a in self.atoms
        }
        # Sorted by seconds per byte, the largest first: these are the first to be saved instead.
        self._dearest = sorted(
            self.atoms, key=lambda a: (-self._seconds[a] / (1 + self._nbytes[a]), min(a))
        )
        self._longest = sorted(self.atoms, key=lambda a: (-self._seconds[a], min(a)))
        self._largest = sorted(self.atoms, key=lambda a: (-self._nbytes[a], min(a)))

    def seed(self, points: Iterable[Point]) -> None:
        """Start from known plans.

        If a plan makes only some choices of an atom, it is tried with all of them, with none, and
        with what the majority says.
        """
        for point in points:
            touched = [a for a in self.atoms if a & point.choices]
            self._evaluate(frozenset().union(*touched))
            self._evaluate(frozenset().union(*(a for a in touched if a <= point.choices)))
            self._evaluate(
                frozenset().union(*(a for a in touched if 2 * len(a & point.choices) > len(a)))
            )

    def relink(self, points: Sequence[Point], *, steps: int = 24) -> None:
        """Mix neighbouring plans: use the choices of one up to a line, and those of the other after
        it.
        """
        born, storage = self._estimator.born, self._estimator.storage
        for left, right in pairwise(points):
            differ = sorted(left.choices ^ right.choices, key=lambda s: (born[storage(s)], s))
            cuts = {round(i * len(differ) / steps) for i in range(1, steps)}
            for cut in sorted(cuts - {0, len(differ)}):
                changed = frozenset(differ[:cut])
                self._trials.evaluate(left.choices ^ changed)
                self._trials.evaluate(right.choices ^ changed)

    def settle(self, limit_bytes: int) -> None:
        """Improve the best plan within the limit; repair and improve the next one above it."""
        below, above = self._known.within(limit_bytes), self._known.above(limit_bytes)
        if below is not None:
            self.drop(below, limit_bytes)
        if above is not None:
            repaired = self.repair(above, limit_bytes)
            if repaired is not None:
                self.drop(repaired, limit_bytes)

    @property
    def _known(self) -> ParetoFront:
        return self._trials.block_uniform if self.are_block_uniform else self._trials.archive

    def drop(self, point: Point, limit_bytes: int) -> Point:
        """Undo choices that are not needed, as long as the peak stays within the limit."""
        improved = True
        while improved:
            improved = False
            estimate = self._trials.estimate(point.choices)
            line = estimate.peak_line()
            for atom in self._dearest:
                if not atom & point.choices:
                    continue
                if self._exceeds_slack(atom, estimate, line, limit_bytes - point.peak_bytes):
                    continue
                tried = self._evaluate(point.choices - atom)
                if tried.peak_bytes <= limit_bytes and tried.seconds < point.seconds:
                    point, improved = tried, True
        return point

    def _exceeds_slack(
        self, atom: frozenset[int], estimate: PeakEstimate, line: int, slack_bytes: int
    ) -> bool:
        """True if undoing the atom probably adds more bytes at the peak line than are free there.

        The saved values would be idle there, and no copy of them is live there now. This is no
        proof: values upstream of them may be dropped in exchange.
        """
        estimator = self._estimator
        if atom in self._repeat_atoms:
            return False  # with fewer copies, the value may be live there or not
        storages = {estimator.storage(s) for s in atom}
        return (
            sum(estimator.nbytes[s] for s in storages if _is_idle_at(estimator, s, line, estimate))
            > slack_bytes
        )

    def repair(
        self, point: Point, limit_bytes: int, *, width: int = _MAX_NEIGHBORS, steps: int = 200
    ) -> Point | None:
        """Change the values with the most bytes at the peak, cheapest first, until the limit is
        met.

        Return None if that does not succeed.
        """
        choices, estimate = point.choices, self._trials.estimate(point.choices)
        for _ in range(steps):
            if estimate.peak_bytes <= limit_bytes:
                return self._trials.record(
                    choices, estimate, is_block_uniform=self.are_block_uniform
                )
            best = self._best_relief(choices, estimate, limit_bytes, width)
            if best is None:
                return None
            choices, estimate = best
        return None

    def _best_relief(
        self, choices: frozenset[int], estimate: PeakEstimate, limit_bytes: int, width: int
    ) -> tuple[frozenset[int], PeakEstimate] | None:
        """Return the best of a few neighbours: the one that removes the most excess per second
        paid.
        """
        excess = estimate.excess(limit_bytes)
        best: tuple[float, frozenset[int], PeakEstimate] | None = None
        for number, neighbor in enumerate(self._relieving_neighbors(choices, estimate)):
            if number >= (width if best else _NEIGHBOR_FACTOR * width):
                break
            tried = self._trials.estimate(neighbor)
            self._trials.record(neighbor, tried, is_block_uniform=self.are_block_uniform)
            excess_left = tried.excess(limit_bytes)
            if excess_left < excess:
                score = (excess - excess_left) / max(
                    tried.seconds - estimate.seconds, self._min_seconds
                )
                if best is None or score > best[0]:
                    best = (score, neighbor, tried)
        return best and best[1:]

    def _relieving_neighbors(
        self, choices: frozenset[int], estimate: PeakEstimate
    ) -> Iterator[frozenset[int]]:
        """Yield neighbours that may need less memory at the peak, fewest seconds per byte first.

        They recompute or evict values that are idle at the peak; in between, they undo recomputes
        whose copies are made too early.
        """
        estimator, line = self._estimator, estimate.peak_line()
        candidates = []
        for atom in self._repeat_atoms:
            if self._adds_next_copy(atom, choices) and any(
                _is_copied(estimator, estimator.storage(c), line, estimate) for c in atom
            ):
                cost = self._seconds[atom] / (1 + self._nbytes[atom])
                candidates.append((cost, min(atom), atom, atom))
        for atom in self._other_atoms:
            # The transfer mode of an evicted value may change; a recomputed value cannot be
            # evicted.
            new_storages = {estimator.storage(s) for s in atom - choices} - choices
            if any(_is_idle_at(estimator, s, line, estimate) for s in new_storages):
                closure = self._closure(atom, choices)
                cost = estimator.standalone_seconds(closure)
                candidates.append((cost / (1 + self._nbytes[atom]), min(atom), atom, closure))
        with_copies_at_peak = (
            atom
            for atom in self._largest
            if any(
                _is_copied(estimator, estimator.storage(s), line, estimate) for s in atom & choices
            )
        )
        for _, _, atom, closure in sorted(candidates, key=lambda w: w[:2]):
            yield choices | atom
            if closure != atom:
                yield choices | closure
            undone = next(with_copies_at_peak, None)
            if undone is not None:
                yield choices - undone
        for atom in with_copies_at_peak:
            yield choices - atom

    def _adds_next_copy(self, atom: frozenset[int], choices: frozenset[int]) -> bool:
        """True if the atom recomputes values that are already recomputed once more."""
        return all(c not in choices and self._estimator.required_choice(c) in choices for c in atom)

    def _closure(self, atom: frozenset[int], choices: frozenset[int]) -> frozenset[int]:
        """Return the atom with all inputs of its recomputations that nothing else saves.

        Otherwise recomputing the atom would keep these inputs alive.
        """
        estimator = self._estimator
        found, pending = set(atom), list(atom)
        while pending:
            if not estimator.is_recompute(choice := pending.pop()):
                continue
            for read in estimator.units[estimator.unit_of[choice]].reads:
                if read in found or read in choices or read not in estimator.unit_of:
                    continue
                if estimator.backward_first[read] == NEVER:
                    more = self._atom_of[read] - found
                    found |= more
                    pending += more
        return frozenset(found)

    def descend(self, *, trials: int) -> None:
        """Lower the least known peak: change one atom, even if that is worse at first, then
        repair.
        """
        end = self._trials.num_tried + trials
        while self._trials.num_tried < end:
            least = self._known.least
            if not self._lower_least(least, end):
                return

    def _lower_least(self, least: Point, end: int) -> bool:
        estimator, line = self._estimator, self._trials.estimate(least.choices).peak_line()
        live_at_peak = [
            a
            for a in self._largest
            if any(_is_live_at(estimator, estimator.storage(s), line) for s in a)
        ]
        for atom in live_at_peak + [a for a in self._largest if a not in set(live_at_peak)]:
            flips = {atom: None}
            if not atom & least.choices:
                flips[self._closure(atom, least.choices)] = None
            for flip in flips:
                start = self._evaluate(least.choices ^ flip)
                limit = least.peak_bytes - 1
                if (
                    self.repair(start, limit, width=_FEW_NEIGHBORS, steps=_FEW_NEIGHBORS)
                    is not None
                ):
                    return True
                if self._trials.num_tried >= end:
                    return False
        return False

    def exchange(self, limit_bytes: int, *, trials: int) -> None:
        """Save one value and repair elsewhere, starting with the longest operators."""
        point = self._known.within(limit_bytes)
        end = self._trials.num_tried + trials
        improved = point is not None
        while improved and self._trials.num_tried < end:
            improved = False
            for atom in self._longest:
                assert point is not None
                if not atom & point.choices:
                    continue
                tried: Point | None = self._evaluate(point.choices - atom)
                assert tried is not None
                if tried.peak_bytes > limit_bytes:
                    tried = self.repair(
                        tried, limit_bytes, width=_FEW_NEIGHBORS, steps=_FEW_NEIGHBORS
                    )
                if tried is not None and tried.seconds < point.seconds:
                    point, improved = self.drop(tried, limit_bytes), True
                if self._trials.num_tried >= end:
                    return

    def kick(self, limit_bytes: int, *, times: int, seed: int) -> None:
        """Change a random range of atoms, then repair and undo; the archive keeps improvements."""
        rng = Random(seed)
        for _ in range(times):
            point = self._known.within(limit_bytes)
            if point is None:
                return
            start = rng.randrange(len(self.atoms))
            length = 1 + rng.randrange(max(1, len(self.atoms) // 4))
            stretch = frozenset().union(*self.atoms[start : start + length])
            other = rng.choice(list(self._known)).choices
            kind = rng.randrange(3)
            inside = (frozenset(), stretch, stretch & other)[kind]
            changed = self._evaluate((point.choices - stretch) | inside)
            repaired = self.repair(changed, limit_bytes, width=_FEW_NEIGHBORS, steps=40)
            if repaired is not None:
                self.drop(repaired, limit_bytes)

    def _evaluate(self, choices: frozenset[int]) -> Point:
        return self._trials.evaluate(choices, is_block_uniform=self.are_block_uniform)


def _is_idle_at(estimator: FastEstimator, storage: int, line: int, estimate: PeakEstimate) -> bool:
    """True if the saved value is not read at this line and its next read comes later."""
    return estimator.forward_last[storage] < line < estimate.first_needed[storage] < NEVER


def _is_copied(estimator: FastEstimator, storage: int, line: int, estimate: PeakEstimate) -> bool:
    first = estimate.first_needed[storage]
    return first == line or first <= line <= estimator.backward_last[storage]


def _is_live_at(estimator: FastEstimator, storage: int, line: int) -> bool:
    last = max(estimator.needed_at[storage], estimator.backward_last[storage])
    return estimator.forward_last[storage] <= line <= last
