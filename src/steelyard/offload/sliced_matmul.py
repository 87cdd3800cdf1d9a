"""Matrices in offload memory that are read slice by slice: the next one comes while one computes.

Not for which, how many slices, nor what is computed with them: that is the program's.
"""

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

import torch

from steelyard.ir.graph import Body
from steelyard.offload.tier import OffloadFile
from steelyard.operators import sliced
from steelyard.passes.offload.transfer_nodes import rows_of_slice


@dataclass(frozen=True, slots=True, kw_only=True)
class OffloadedMatrix:
    """A matrix in offload memory, row behind row."""

    offset: int
    rows: int
    columns: int
    dtype: torch.dtype

    @property
    def row_bytes(self) -> int:
        return self.columns * self.dtype.itemsize


@dataclass(slots=True, kw_only=True, eq=False)
class _MatrixSlices:
    """Its rows, some at a time: the next are on their way while these are used."""

    there: OffloadedMatrix
    memory: OffloadFile
    room: torch.Tensor
    arriving: "deque[tuple[Future[None], torch.Tensor]]"

    @classmethod
    def of(cls, there: OffloadedMatrix, memory: OffloadFile, parts: int) -> "_MatrixSlices":
        rows = rows_of_slice(there.rows, there.row_bytes, parts)
        near = min(2, -(-there.rows // rows))
        room = torch.empty((near, rows, there.columns), dtype=there.dtype, device="cpu")
        slices = cls(there=there, memory=memory, room=room, arriving=deque())
        for number in range(near):
            slices._fetch(number)
        return slices

    def _fetch(self, number: int) -> None:
        each = self.room.shape[1]
        start, end = number * each, min((number + 1) * each, self.there.rows)
        if start < end:
            rows = self.room[number % 2, : end - start]
            offset = self.there.offset + start * self.there.row_bytes
            self.arriving.append((self.memory.fetch(offset, rows), rows))

    def narrow(self, dim: int, start: int, length: int) -> torch.Tensor:
        """The next rows, in the place of those before the last, which nobody needs any more."""
        number = start // self.room.shape[1]
        if number:
            self._fetch(number + 1)
        transfer, rows = self.arriving.popleft()
        assert (dim, length) == (0, len(rows)), (dim, length, len(rows))
        self.memory.await_fetched(transfer)
        return rows


class SlicedMatmuls:
    """Each matrix that is being read, by its name or number in the program; the same one may be
    twice."""

    def __init__(self, memory: OffloadFile) -> None:
        self._memory = memory
        self._slicing: dict[str | int, deque[_MatrixSlices]] = {}

    def clear(self) -> None:
        self._slicing.clear()

    def forget(self, name: str | int) -> None:
        """What a step that failed left of it."""
        self._slicing.pop(name, None)

    def begin(self, name: str | int, there: OffloadedMatrix, parts: int) -> torch.Tensor:
        """Begin to fetch the first two slices; the room for them."""
        slices = _MatrixSlices.of(there, self._memory, parts)
        self._slicing.setdefault(name, deque()).append(slices)
        return slices.room

    def carrying_out(self, body: Body) -> Callable[..., tuple[torch.Tensor, ...]]:
        """What takes the names of these, and then all else that ``body`` takes."""
        run = sliced(body)

        def carry_out(names: Sequence[str | int], *taken: torch.Tensor) -> tuple[torch.Tensor, ...]:
            return run(*(self._slicing[name][0] for name in names), *taken)

        return carry_out

    def end(self, name: str | int) -> None:
        self._slicing[name].popleft()
