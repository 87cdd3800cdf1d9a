"""Products with a weight in far memory: one slice of it computes while the next is fetched.

Not for which weights, nor how many slices: that is the program's.
"""

from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass

import torch

from steelyard.core.far_calls import rows_of_slice
from steelyard.exchange.far import FarMemory

_HALVES = (torch.float16, torch.bfloat16)


@dataclass(slots=True, kw_only=True, eq=False)
class _Slices:
    """The rows of a weight, some at a time: the next are on their way while these are used."""

    weight: torch.Tensor
    memory: FarMemory
    offset: int
    room: torch.Tensor
    arriving: "deque[tuple[Future[None], int, torch.Tensor]]"

    @classmethod
    def of(cls, weight: torch.Tensor, offset: int, memory: FarMemory, parts: int) -> "_Slices":
        rows = rows_of_slice(weight.shape[0], weight[0].nbytes, parts)
        room = weight.new_empty((2, rows, weight.shape[1]))
        slices = cls(weight=weight, memory=memory, offset=offset, room=room, arriving=deque())
        for number in range(2):
            slices._fetch(number)
        return slices

    def _fetch(self, number: int) -> None:
        each = self.room.shape[1]
        start, end = number * each, min((number + 1) * each, self.weight.shape[0])
        if start < end:
            rows = self.room[number % 2, : end - start]
            offset = self.offset + start * self.weight[0].nbytes
            self.arriving.append((self.memory.fetch(offset, rows), start, rows))

    def __iter__(self) -> Iterator[tuple[int, torch.Tensor]]:
        number = 2
        while self.arriving:
            transfer, start, rows = self.arriving.popleft()
            self.memory.await_fetched(transfer)
            yield start, rows
            self._fetch(number)
            number += 1


class FarProducts:
    """Each weight that is being read, by its name in the program; the same one may be twice."""

    def __init__(self, memory: FarMemory) -> None:
        self._memory = memory
        self._slicing: dict[str, deque[_Slices]] = {}

    def clear(self) -> None:
        self._slicing.clear()

    def begin(self, name: str, weight: torch.Tensor, offset: int, parts: int) -> torch.Tensor:
        """Begin to fetch the first two slices; the room for them."""
        slices = _Slices.of(weight, offset, self._memory, parts)
        self._slicing.setdefault(name, deque()).append(slices)
        return slices.room

    def columns(
        self, name: str, first: torch.Tensor, second: torch.Tensor | None = None
    ) -> torch.Tensor:
        """``x @ weight.T``, or ``bias + x @ weight.T``: each slice gives columns."""
        bias, x = (None, first) if second is None else (first, second)
        slices = self._slicing[name][0]
        out = x.new_empty((x.shape[0], slices.weight.shape[0]))
        for start, rows in slices:
            some = out[:, start : start + len(rows)]
            if bias is None:
                torch.mm(x, rows.t(), out=some)
            else:
                own = bias if bias.shape[-1] == 1 else bias[..., start : start + len(rows)]
                torch.addmm(own, x, rows.t(), out=some)
        return out

    def sum(self, name: str, x: torch.Tensor) -> torch.Tensor:
        """``x @ weight``: each slice gives a term of the sum."""
        slices = self._slicing[name][0]
        shape = (x.shape[0], slices.weight.shape[1])
        if x.dtype not in _HALVES:
            out = x.new_zeros(shape)
            for start, rows in slices:
                out.addmm_(x[:, start : start + len(rows)], rows)
            return out
        # Kept in half precision, the sum would be rounded anew with every slice.
        whole = x.new_zeros(shape, dtype=torch.float32)
        for start, rows in slices:
            whole += x[:, start : start + len(rows)] @ rows
        return whole.to(x.dtype)

    def end(self, name: str) -> None:
        self._slicing[name].popleft()
