"""The lines that recomputation and quantization add to a program, and the shift of the others.

The fast estimator uses it to mirror the programs that the recompute and quantize_activations trades
write. Not for the memory or seconds of those lines.
"""

from bisect import bisect
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from steelyard.passes.recompute_copies import Span, starts
from steelyard.search.single.estimator.estimate import Ints, RecomputableUnit

# A line number after every line means that the value is never needed.
NEVER = 1 << 40


@dataclass(frozen=True, slots=True, kw_only=True)
class Copies:
    """The recomputed operators, their lines in the longer program, and the shift of other lines.

    ``first_read`` and ``last_read`` are the lines at which copies read each storage.
    ``first_needed`` is the line of the plain program before which the backward pass first needs a
    storage. ``repeated_last_read`` is for values that are recomputed several times: it maps a
    storage and the line that makes a copy to the last line that reads that copy.
    """

    units: tuple[int, ...]
    lines: tuple[int, ...]
    shift: Ints
    first_needed: list[int]
    first_read: dict[int, int]
    last_read: dict[int, int]
    repeated_last_read: dict[tuple[int, int], int]

    def shifted(self, new_line: Ints) -> "Copies":
        """Return the same copies after inserting lines: line ``i`` becomes line ``new_line[i]``."""
        own = np.arange(len(self.shift))
        return replace(
            self,
            lines=tuple(new_line[list(self.lines)].tolist()) if self.lines else (),
            shift=new_line[own + self.shift] - own,
            first_read={s: int(new_line[line]) for s, line in self.first_read.items()},
            last_read={s: int(new_line[line]) for s, line in self.last_read.items()},
            repeated_last_read={
                (s, int(new_line[k])): int(new_line[line])
                for (s, k), line in self.repeated_last_read.items()
            },
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyPlacement:
    """The recomputable operators of one program, and the backward lines that read their results."""

    num_lines: int
    units: Sequence[RecomputableUnit]
    unit_of: Mapping[int, int]
    backward_first: Sequence[int]
    backward_reads: Mapping[int, Sequence[Span]]

    def copies(self, recomputed: frozenset[int], times: Mapping[int, int]) -> Copies:
        """Return the operators to be recomputed, and their lines.

        A copy is placed before the first line that needs it. A value that is recomputed several
        times also gets copies at the ends of the longest gaps between its reads.
        """
        first_needed, copy_lines, placed_copies = self._place_copies(recomputed, times)
        num_before = np.bincount(
            np.array([line for line, _ in placed_copies], dtype=np.int64), minlength=self.num_lines
        )
        last_read: dict[int, int] = {}
        first_read: dict[int, int] = {}
        units = self.units
        for position, (line, number) in enumerate(placed_copies):
            unit = units[number]
            for storage in unit.reads + unit.touches:
                last_read[storage] = line + position
                first_read.setdefault(storage, line + position)
        shift = np.cumsum(num_before)
        return Copies(
            units=tuple(number for _, number in placed_copies),
            lines=tuple(line + position for position, (line, _) in enumerate(placed_copies)),
            shift=shift,
            first_needed=first_needed,
            first_read=first_read,
            last_read=last_read,
            repeated_last_read=self._last_reads(copy_lines, placed_copies, shift)
            if copy_lines
            else {},
        )

    def _place_copies(
        self, recomputed: frozenset[int], times: Mapping[int, int]
    ) -> tuple[list[int], dict[int, tuple[int, ...]], list[tuple[int, int]]]:
        """Return the first line that needs each storage, and the lines of the recomputed
        operators.

        The second result has the lines of all copies of each value that is recomputed repeatedly.
        The third has a pair (line, unit) for each recomputed operator, sorted.
        """
        first_needed = list(self.backward_first)
        units, unit_of = self.units, self.unit_of
        repeated = {unit_of[s] for s in times if s in recomputed}
        reads = {
            s: list(self.backward_reads[s])
            for u in repeated
            for s in units[u].makes
            if s in recomputed
        }
        copy_lines: dict[int, tuple[int, ...]] = {}
        placed_copies: list[tuple[int, int]] = []
        # Place operators from the last to the first, so that all readers of a result are placed
        # before its operator is.
        for number in sorted({unit_of[s] for s in recomputed}, reverse=True):
            unit = units[number]
            line = min(first_needed[s] for s in unit.makes if s in recomputed)
            if line == NEVER:
                continue
            for storage in unit.reads:
                if line < first_needed[storage]:
                    first_needed[storage] = line
            if not repeated:
                placed_copies.append((line, number))
                continue
            lines: tuple[int, ...] = (line,)
            if number in repeated:
                needed = [s for s in unit.makes if reads.get(s)]
                max_copies = max(times.get(s, 1) for s in needed)
                lines = starts((span for s in needed for span in reads[s]), max_copies)
                if len(lines) > 1:
                    copy_lines.update(dict.fromkeys(needed, lines))
            placed_copies += [(at, number) for at in lines]
            for storage in reads.keys() & unit.reads:
                reads[storage] += [(at, at) for at in lines]
        return first_needed, copy_lines, sorted(placed_copies)

    def _last_reads(
        self,
        copy_lines: Mapping[int, tuple[int, ...]],
        placed_copies: Iterable[tuple[int, int]],
        shift: Ints,
    ) -> dict[tuple[int, int], int]:
        """Return the last line that reads each copy; line numbers include the copies.

        The keys are the storage and the line that makes the copy.
        """
        made_at: dict[int, list[int]] = {s: [] for s in copy_lines}
        last_reads: dict[int, list[int]] = {s: [-1] * len(lines) for s, lines in copy_lines.items()}
        for storage, lines in copy_lines.items():
            for begin, end in self.backward_reads[storage]:
                copy_index = bisect(lines, begin) - 1
                last_reads[storage][copy_index] = max(
                    last_reads[storage][copy_index], end + int(shift[end])
                )
        for position, (line, number) in enumerate(placed_copies):
            unit, at = self.units[number], line + position
            for storage in unit.reads:
                if storage in copy_lines:
                    copy_index = bisect(copy_lines[storage], line) - 1
                    last_reads[storage][copy_index] = max(last_reads[storage][copy_index], at)
            for storage in unit.makes:
                if storage in copy_lines:
                    made_at[storage].append(at)
        return {
            (storage, at): max(at, end)
            for storage in copy_lines
            for at, end in zip(made_at[storage], last_reads[storage], strict=True)
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Codes:
    """The lines that encode and decode each value that is kept in 8 bits.

    ``copies`` are the copies of the program that contains these lines.
    """

    by_storage: Mapping[int, tuple[int, int]] = field(default_factory=dict)
    copies: Copies | None = None


NO_CODES = Codes()


def placed(
    quantized: Sequence[int],
    copies: Copies,
    *,
    num_lines: int,
    nbytes: Sequence[int],
    after_line: Sequence[int],
    before_line: Mapping[int, int],
) -> Codes:
    """Insert the lines that encode and decode quantized values.

    ``after_line`` is the last line of the forward pass that reads each value; ``before_line`` is
    the first later line that reads it. Both line numbers include the copies. If several values are
    encoded at the same place, the smallest one is encoded first and decoded last.
    """
    insertions = sorted(
        [(after_line[s] + 1, 0, nbytes[s], -s) for s in quantized]
        + [(before_line[s], 1, -nbytes[s], s) for s in quantized]
    )
    lines: dict[tuple[int, int], int] = {}
    length = num_lines + len(copies.units)
    inserted = np.zeros(length + 1, dtype=np.int64)
    for number, (at, kind, _, storage) in enumerate(insertions):
        lines[abs(storage), kind] = at + number
        inserted[at] += 1
    new_line: Ints = np.arange(length + 1) + np.cumsum(inserted)
    return Codes(
        by_storage={s: (lines[s, 0], lines[s, 1]) for s in quantized},
        copies=copies.shifted(new_line),
    )
