"""Which lines a choice adds to a program, and how far they move the others.

The tally's part for copies and for values in 8 bits: it mirrors what the trades write. Not for what
these hold or cost.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Copies:
    """Operators that run again and their lines in the longer program; how far others moved.

    ``first_read`` and ``last_read`` are the lines at which copies read each storage; ``first`` is
    the line of the plain program at which it is first wanted late.
    """

    units: tuple[int, ...]
    lines: tuple[int, ...]
    shift: Ints
    first: list[int]
    first_read: dict[int, int]
    last_read: dict[int, int]

    def moved(self, to: Ints) -> "Copies":
        """With further lines between: what stood at ``i`` now stands at ``to[i]``."""
        own = np.arange(len(self.shift))
        return replace(
            self,
            lines=tuple(to[list(self.lines)].tolist()) if self.lines else (),
            shift=to[own + self.shift] - own,
            first_read={s: int(to[line]) for s, line in self.first_read.items()},
            last_read={s: int(to[line]) for s, line in self.last_read.items()},
        )


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
