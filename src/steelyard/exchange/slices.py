"""Weights in far memory that are read slice by slice: the next ones come while one computes.

Not for which weights, how many slices, nor what is computed with them: that is the program's.
"""

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

import torch

from steelyard.core.far_calls import rows_of_slice
from steelyard.core.graph import Body
from steelyard.exchange.far import FarMemory
from steelyard.operators import sliced


@dataclass(slots=True, kw_only=True, eq=False)
class _Slices:
    """The rows of a weight, some at a time: the next are on their way while these are used."""

    weight: torch.Tensor
    memory: FarMemory
    offset: int
    room: torch.Tensor
    arriving: "deque[tuple[Future[None], torch.Tensor]]"

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

    def carrying_out(self, body: Body) -> Callable[..., tuple[torch.Tensor, ...]]:
        """What takes the names of weights, and then all else that ``body`` takes."""
        run = sliced(body)

        def carry_out(names: Sequence[str], *taken: torch.Tensor) -> tuple[torch.Tensor, ...]:
            return run(*(self._slicing[name][0] for name in names), *taken)

        return carry_out

    def end(self, name: str) -> None:
        self._slicing[name].popleft()
