"""Which lines a choice adds to a program, and how far they move the others.

The tally's part for copies and for values in 8 bits: it mirrors what the trades write. Not for what
these hold or cost.
"""

from bisect import bisect
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from steelyard.passes.recompute_copies import Span, starts
from steelyard.search.single.estimate import Ints, RecomputableUnit

# Later than any line.
NEVER = 1 << 40


@dataclass(frozen=True, slots=True, kw_only=True)
class Copies:
    """Operators that run again and their lines in the longer program; how far others moved.

    ``first_read`` and ``last_read`` are the lines at which copies read each storage; ``first`` is
    the line of the plain program at which it is first wanted late. ``often`` is of what is made
    several times: by storage and the line that makes a copy, the last that reads that copy.
    """

    units: tuple[int, ...]
    lines: tuple[int, ...]
    shift: Ints
    first: list[int]
    first_read: dict[int, int]
    last_read: dict[int, int]
    often: dict[tuple[int, int], int]

    def moved(self, to: Ints) -> "Copies":
        """With further lines between: what stood at ``i`` now stands at ``to[i]``."""
        own = np.arange(len(self.shift))
        return replace(
            self,
            lines=tuple(to[list(self.lines)].tolist()) if self.lines else (),
            shift=to[own + self.shift] - own,
            first_read={s: int(to[line]) for s, line in self.first_read.items()},
            last_read={s: int(to[line]) for s, line in self.last_read.items()},
            often={(s, int(to[k])): int(to[line]) for (s, k), line in self.often.items()},
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyPlacement:
    """The operators of one program that can run again, and where what they make is read late."""

    num_lines: int
    units: Sequence[RecomputableUnit]
    unit_of: Mapping[int, int]
    late_first: Sequence[int]
    late_reads: Mapping[int, Sequence[Span]]

    def copies(self, again: frozenset[int], times: Mapping[int, int]) -> Copies:
        """Which operators run again, and before which lines: the first that needs them, and those
        that end the longest waits of what is to be made several times."""
        first, begins, running = self._begun(again, times)
        before = np.bincount(
            np.array([line for line, _ in running], dtype=np.int64), minlength=self.num_lines
        )
        last_read: dict[int, int] = {}
        first_read: dict[int, int] = {}
        units = self.units
        for position, (line, number) in enumerate(running):
            unit = units[number]
            for storage in unit.reads + unit.touches:
                last_read[storage] = line + position
                first_read.setdefault(storage, line + position)
        shift = np.cumsum(before)
        return Copies(
            units=tuple(number for _, number in running),
            lines=tuple(line + position for position, (line, _) in enumerate(running)),
            shift=shift,
            first=first,
            first_read=first_read,
            last_read=last_read,
            often=self._last_reads(begins, running, shift) if begins else {},
        )

    def _begun(
        self, again: frozenset[int], times: Mapping[int, int]
    ) -> tuple[list[int], dict[int, tuple[int, ...]], list[tuple[int, int]]]:
        """The line that first wants each storage; those before which each is made that is made
        several times; and line and number of each operator that runs, in this order."""
        first = list(self.late_first)
        units, unit_of = self.units, self.unit_of
        often = {unit_of[s] for s in times if s in again}
        reads = {s: list(self.late_reads[s]) for u in often for s in units[u].makes if s in again}
        begins: dict[int, tuple[int, ...]] = {}
        running: list[tuple[int, int]] = []
        # From the last operator to the first, so that all that reads one is placed before it.
        for number in sorted({unit_of[s] for s in again}, reverse=True):
            unit = units[number]
            line = min(first[s] for s in unit.makes if s in again)
            if line == NEVER:
                continue
            for storage in unit.reads:
                if line < first[storage]:
                    first[storage] = line
            if not often:
                running.append((line, number))
                continue
            lines: tuple[int, ...] = (line,)
            if number in often:
                wanted = [s for s in unit.makes if reads.get(s)]
                most = max(times.get(s, 1) for s in wanted)
                lines = starts((span for s in wanted for span in reads[s]), most)
                if len(lines) > 1:
                    begins.update(dict.fromkeys(wanted, lines))
            running += [(at, number) for at in lines]
            for storage in reads.keys() & unit.reads:
                reads[storage] += [(at, at) for at in lines]
        return first, begins, sorted(running)

    def _last_reads(
        self,
        begins: Mapping[int, tuple[int, ...]],
        running: Iterable[tuple[int, int]],
        shift: Ints,
    ) -> dict[tuple[int, int], int]:
        """By storage and the line, copies counted, that makes a copy: the last that reads it."""
        made: dict[int, list[int]] = {s: [] for s in begins}
        last: dict[int, list[int]] = {s: [-1] * len(lines) for s, lines in begins.items()}
        for storage, lines in begins.items():
            for begin, end in self.late_reads[storage]:
                turn = bisect(lines, begin) - 1
                last[storage][turn] = max(last[storage][turn], end + int(shift[end]))
        for position, (line, number) in enumerate(running):
            unit, at = self.units[number], line + position
            for storage in unit.reads:
                if storage in begins:
                    turn = bisect(begins[storage], line) - 1
                    last[storage][turn] = max(last[storage][turn], at)
            for storage in unit.makes:
                if storage in begins:
                    made[storage].append(at)
        return {
            (storage, at): max(at, end)
            for storage in begins
            for at, end in zip(made[storage], last[storage], strict=True)
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Codes:
    """At which line each value is written down, and at which it is read back; ``copies`` are those
    of the program that these lines stand in."""

    by_storage: Mapping[int, tuple[int, int]] = field(default_factory=dict)
    copies: Copies | None = None


NO_CODES = Codes()


def placed(
    coded: Sequence[int],
    copies: Copies,
    *,
    num_lines: int,
    nbytes: Sequence[int],
    behind: Sequence[int],
    before: Mapping[int, int],
) -> Codes:
    """``behind``: the last line of the forward pass that reads each; ``before``: the first late
    one, copies counted.

    Of several at one place the smallest is written down first, and
    read back last.
    """
    added = sorted(
        [(behind[s] + 1, 0, nbytes[s], -s) for s in coded]
        + [(before[s], 1, -nbytes[s], s) for s in coded]
    )
    lines: dict[tuple[int, int], int] = {}
    length = num_lines + len(copies.units)
    inserted = np.zeros(length + 1, dtype=np.int64)
    for number, (place, kind, _, storage) in enumerate(added):
        lines[abs(storage), kind] = place + number
        inserted[place] += 1
    to: Ints = np.arange(length + 1) + np.cumsum(inserted)
    return Codes(by_storage={s: (lines[s, 0], lines[s, 1]) for s in coded}, copies=copies.moved(to))
