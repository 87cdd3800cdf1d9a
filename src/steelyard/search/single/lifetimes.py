"""From which line to which a storage is there: the tally's part for what comes, leaves, comes back.

Not for which lines those are: that is the choice's.
"""

import numpy as np
from numpy.typing import NDArray

from steelyard.search.single.estimate import Floats, Ints


class Lifetimes:
    """The lines at which the storage of each row is born and dies; and of copies, which are there
    besides."""

    def __init__(self, born: Ints, dies: Ints, forward_last: Ints) -> None:
        self.born = born
        self.dies = dies
        self._forward_last = forward_last
        self._rows: list[int] = []
        self._from: list[int] = []
        self._to: list[int] = []

    def come(self, row: int, begin: int, end: int) -> None:
        self._rows.append(row)
        self._from.append(begin)
        self._to.append(end)

    def leave(self, row: int, *, gone: int, back: int | None) -> None:
        """Not before the forward pass has read it for the last time; perhaps never to come back."""
        if back is not None:
            self.come(row, back, int(self.dies[row]))
        self.dies[row] = max(int(self._forward_last[row]), gone)

    def held(self, nbytes: Floats, length: int, *, stays: NDArray[np.bool_]) -> Floats:
        """What each line has more than the one before; what ``stays`` is there to the end."""
        dies = np.where(stays, length, self.dies)
        held = np.zeros(length + 1)
        held += np.bincount(self.born, weights=nbytes, minlength=length + 1)[: length + 1]
        held -= np.bincount(dies + 1, weights=nbytes, minlength=length + 2)[: length + 1]
        if self._rows:
            sizes = nbytes[self._rows]
            held += np.bincount(self._from, weights=sizes, minlength=length + 1)
            held -= np.bincount(np.array(self._to) + 1, weights=sizes, minlength=length + 1)
        return held
