"""Gradients of which some rows are made at a time, and sent while the next ones are computed.

Not for which gradients, nor how many slices: that is the program's.
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
    """One gradient: room for two slices; of one that is added to what is there, for the product
    besides. ``arriving`` is what the next slice is added to."""

    home: TensorLocation
    memory: OffloadFile
    room: torch.Tensor
    arriving: "Future[None] | None" = None
    leaving: "deque[Future[None]]" = field(default_factory=deque)

    @classmethod
    def of(cls, home: TensorLocation, memory: OffloadFile, parts: int) -> "_SlicedGradient":
        there = home.there
        rows = rows_of_slice(there.shape[0], there[0].nbytes, parts)
        is_added = home.is_home(home.parameter.grad)
        room = there.new_empty((3 if is_added else 2, rows, there.shape[1]))
        making = cls(home=home, memory=memory, room=room)
        if is_added:
            making._fetch(0)
        return making

    def make(self, left: torch.Tensor, right: torch.Tensor) -> None:
        held, rows = self.home.parameter.grad, self.room.shape[1]
        is_added = self.home.is_home(held)
        for number, start in enumerate(range(0, len(left), rows)):
            slot, some = self.room[number % 2], left[start : start + rows]
            if held is not None and not is_added:
                held[start : start + rows].add_(torch.mm(some, right, out=slot[: len(some)]))
                continue
            if not is_added:
                self._let_go(but=1)
                torch.mm(some, right, out=slot[: len(some)])
            else:
                made = torch.mm(some, right, out=self.room[2][: len(some)])
                self._let_go(but=0)
                arriving, self.arriving = self.arriving, None
                self._fetch(number + 1)
                assert arriving is not None
                self.memory.await_fetched(arriving)
                slot[: len(some)].add_(made)
            self.leaving.append(self.memory.send(self._offset(start), slot[: len(some)]))

    def end(self) -> None:
        self._let_go(but=0)
        if self.home.parameter.grad is None:
            self.home.parameter.grad = self.home.there

    def _fetch(self, number: int) -> None:
        """What was sent before, where the slice before the last one was: that is gone."""
        rows = self.room.shape[1]
        count = min(rows, len(self.home.there) - number * rows)
        if count > 0:
            slot = self.room[number % 2][:count]
            self.arriving = self.memory.fetch(self._offset(number * rows), slot)

    def _let_go(self, *, but: int) -> None:
        while len(self.leaving) > but:
            self.memory.await_sent(self.leaving.popleft())

    def _offset(self, start: int) -> int:
        return self.home.offset + start * self.home.there[0].nbytes


class OffloadedGradients:
    """Each gradient that is being made, by its name in the program."""

    def __init__(self, memory: OffloadFile) -> None:
        self._memory = memory
        self._making: dict[str, _SlicedGradient] = {}

    def clear(self) -> None:
        self._making.clear()

    def begin(self, name: str, home: TensorLocation, parts: int) -> torch.Tensor:
        held = home.parameter.grad
        if held is not None and home.is_home(held) and not held.is_contiguous():
            home.parameter.grad = held.contiguous()  # made whole at another shape of the batch
        home.lay_out_rows()
        making = self._making[name] = _SlicedGradient.of(home, self._memory, parts)
        return making.room

    def rows(self, name: str, left: torch.Tensor, right: torch.Tensor) -> None:
        """``left @ right``, as far as it goes to offload memory."""
        self._making[name].make(left, right)

    def end(self, name: str) -> None:
        self._making.pop(name).end()
