"""The storage lifetimes of a program as line intervals, with evictions and recomputed copies.

Not for choosing the lines, which follow from the choices.
"""

import numpy as np
from numpy.typing import NDArray

from steelyard.search.single.estimator.estimate import Floats, Ints


class Lifetimes:
    """The first and last line of the storage in each row, and the line intervals of its copies."""

    def __init__(self, born: Ints, dies: Ints, forward_last: Ints) -> None:
        self.born = born
        self.dies = dies
        self._forward_last = forward_last
        self._rows: list[int] = []
        self._from: list[int] = []
        self._to: list[int] = []

    def add_copy(self, row: int, begin: int, end: int) -> None:
        self._rows.append(row)
        self._from.append(begin)
        self._to.append(end)

    def evict(self, row: int, *, evicted_at: int, restored_at: int | None) -> None:
        """Free the storage after ``evicted_at``, but not before its last forward read.

        A copy lives from ``restored_at`` to the original end of the storage; None means that it is
        not restored.
        """
        if restored_at is not None:
            self.add_copy(row, restored_at, int(self.dies[row]))
        self.dies[row] = max(int(self._forward_last[row]), evicted_at)

    def byte_changes(self, nbytes: Floats, length: int, *, persistent: NDArray[np.bool_]) -> Floats:
        """Return the change in live bytes at each line; ``persistent`` storages live to the end."""
        dies = np.where(persistent, length, self.dies)
        byte_changes = np.zeros(length + 1)
        byte_changes += np.bincount(self.born, weights=nbytes, minlength=length + 1)[: length + 1]
        byte_changes -= np.bincount(dies + 1, weights=nbytes, minlength=length + 2)[: length + 1]
        if self._rows:
            sizes = nbytes[self._rows]
            byte_changes += np.bincount(self._from, weights=sizes, minlength=length + 1)
            byte_changes -= np.bincount(np.array(self._to) + 1, weights=sizes, minlength=length + 1)
        return byte_changes
