"""Gradients that are computed a few rows at a time; each slice is sent while the next is
computed.

The program determines which gradients are sliced, and the number of slices.
"""

from collections import deque
from concurrent.futures import Future
from dataclasses import dataclass, field

import torch

from steelyard.offload.location import TensorLocation
from steelyard.offload.tier import OffloadFile
from steelyard.passes.offload.transfer_nodes import rows_of_slice


@dataclass(slots=True, kw_only=True, eq=False)
class _SlicedGradient:
    """One gradient and its buffer of two slices. A gradient that is added to an offloaded one has
    a third slice for the product. ``arriving`` is the fetch of the old values of the next slice."""

    location: TensorLocation
    memory: OffloadFile
    room: torch.Tensor
    arriving: "Future[None] | None" = None
    leaving: "deque[Future[None]]" = field(default_factory=deque)

    @classmethod
    def of(cls, location: TensorLocation, memory: OffloadFile, parts: int) -> "_SlicedGradient":
        offloaded = location.offloaded
        rows = rows_of_slice(offloaded.shape[0], offloaded[0].nbytes, parts)
        is_added = location.is_offloaded(location.parameter.grad)
        room = offloaded.new_empty((3 if is_added else 2, rows, offloaded.shape[1]))
        gradient = cls(location=location, memory=memory, room=room)
        if is_added:
            gradient._fetch(0)
        return gradient

    def compute(self, left: torch.Tensor, right: torch.Tensor) -> None:
        current, rows = self.location.parameter.grad, self.room.shape[1]
        is_added = self.location.is_offloaded(current)
        for number, start in enumerate(range(0, len(left), rows)):
            slot, block = self.room[number % 2], left[start : start + rows]
            if current is not None and not is_added:
                current[start : start + rows].add_(torch.mm(block, right, out=slot[: len(block)]))
                continue
            if not is_added:
                self._await_sent(pending=1)
                torch.mm(block, right, out=slot[: len(block)])
            else:
                product = torch.mm(block, right, out=self.room[2][: len(block)])
                self._await_sent(pending=0)
                arriving, self.arriving = self.arriving, None
                self._fetch(number + 1)
                assert arriving is not None
                self.memory.await_fetched(arriving)
                slot[: len(block)].add_(product)
            self.leaving.append(self.memory.send(self._offset(start), slot[: len(block)]))

    def end(self) -> None:
        self._await_sent(pending=0)
        if self.location.parameter.grad is None:
            self.location.parameter.grad = self.location.offloaded

    def _fetch(self, number: int) -> None:
        """Fetch the old values of a slice into the buffer of the slice before last, which has
        already been sent.
        """
        rows = self.room.shape[1]
        count = min(rows, len(self.location.offloaded) - number * rows)
        if count > 0:
            slot = self.room[number % 2][:count]
            self.arriving = self.memory.fetch(self._offset(number * rows), slot)

    def _await_sent(self, *, pending: int) -> None:
        while len(self.leaving) > pending:
            self.memory.await_sent(self.leaving.popleft())

    def _offset(self, start: int) -> int:
        return self.location.offset + start * self.location.offloaded[0].nbytes


class OffloadedGradients:
    """The gradients that are being computed, by name in the program."""

    def __init__(self, memory: OffloadFile) -> None:
        self._memory = memory
        self._gradients: dict[str, _SlicedGradient] = {}

    def clear(self) -> None:
        self._gradients.clear()

    def begin(self, name: str, location: TensorLocation, parts: int) -> torch.Tensor:
        current = location.parameter.grad
        if current is not None and location.is_offloaded(current) and not current.is_contiguous():
            # The gradient was computed unsliced, by the program for another batch shape.
            location.parameter.grad = current.contiguous()
        location.set_row_major()
        gradient = self._gradients[name] = _SlicedGradient.of(location, self._memory, parts)
        return gradient.room

    def rows(self, name: str, left: torch.Tensor, right: torch.Tensor) -> None:
        """Compute ``left @ right`` in slices, and send or add each of them."""
        self._gradients[name].compute(left, right)

    def end(self, name: str) -> None:
        self._gradients.pop(name).end()
