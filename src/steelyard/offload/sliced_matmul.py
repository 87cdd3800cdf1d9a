"""Offloaded matrices that are read in slices: while one slice is used, the next one is fetched.

The program determines which matrices are read, in how many slices, and what is computed.
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
    """A row-major matrix in offload memory."""

    offset: int
    rows: int
    columns: int
    dtype: torch.dtype

    @property
    def row_bytes(self) -> int:
        return self.columns * self.dtype.itemsize


@dataclass(slots=True, kw_only=True, eq=False)
class _MatrixSlices:
    """Row slices of a matrix: the next one is fetched while the current one is used."""

    matrix: OffloadedMatrix
    memory: OffloadFile
    room: torch.Tensor
    arriving: "deque[tuple[Future[None], torch.Tensor]]"

    @classmethod
    def of(cls, matrix: OffloadedMatrix, memory: OffloadFile, parts: int) -> "_MatrixSlices":
        rows = rows_of_slice(matrix.rows, matrix.row_bytes, parts)
        num_resident = min(2, -(-matrix.rows // rows))
        room = torch.empty((num_resident, rows, matrix.columns), dtype=matrix.dtype, device="cpu")
        slices = cls(matrix=matrix, memory=memory, room=room, arriving=deque())
        for number in range(num_resident):
            slices._fetch(number)
        return slices

    def _fetch(self, number: int) -> None:
        slice_rows = self.room.shape[1]
        start, end = number * slice_rows, min((number + 1) * slice_rows, self.matrix.rows)
        if start < end:
            rows = self.room[number % 2, : end - start]
            offset = self.matrix.offset + start * self.matrix.row_bytes
            self.arriving.append((self.memory.fetch(offset, rows), rows))

    def narrow(self, dim: int, start: int, length: int) -> torch.Tensor:
        """Return the next rows, and begin to fetch the rows after them into the buffer of the
        previous slice, which is no longer needed.
        """
        number = start // self.room.shape[1]
        if number:
            self._fetch(number + 1)
        transfer, rows = self.arriving.popleft()
        assert (dim, length) == (0, len(rows)), (dim, length, len(rows))
        self.memory.await_fetched(transfer)
        return rows


class SlicedMatmuls:
    """The matrices that are being read, by name or slot in the program. Two readers may read one
    matrix at the same time.
    """

    def __init__(self, memory: OffloadFile) -> None:
        self._memory = memory
        self._slicing: dict[str | int, deque[_MatrixSlices]] = {}

    def clear(self) -> None:
        self._slicing.clear()

    def forget(self, name: str | int) -> None:
        """Drop the reads that a failed step has left behind."""
        self._slicing.pop(name, None)

    def begin(self, name: str | int, matrix: OffloadedMatrix, parts: int) -> torch.Tensor:
        """Begin to fetch the first two slices; return their buffer."""
        slices = _MatrixSlices.of(matrix, self._memory, parts)
        self._slicing.setdefault(name, deque()).append(slices)
        return slices.room

    def carrying_out(self, body: Body) -> Callable[..., tuple[torch.Tensor, ...]]:
        """Return a function that takes the names of the matrices, then the other inputs of
        ``body``.
        """
        run = sliced(body)

        def run_body(names: Sequence[str | int], *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
            return run(*(self._slicing[name][0] for name in names), *inputs)

        return run_body

    def end(self, name: str | int) -> None:
        self._slicing[name].popleft()
