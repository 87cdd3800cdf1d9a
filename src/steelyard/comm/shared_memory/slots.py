"""The slots of an edge between two ranks, in memory that both have: where messages are written, and
where they are read without a copy.

Not for who rings whom: see same_host.py.
"""

import contextlib
import math
import mmap
import os
import struct
import weakref
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from io import FileIO
from itertools import count
from typing import Any

import torch

from steelyard.ir.message_slots import SlotSpec

# Of a slot that is free again: the edge, the slot.
CREDIT = struct.Struct("<II")
_FILES = count()

# The shape and the dtype of a value.
Like = tuple[Sequence[int], torch.dtype]


def memory_of(nbytes: int) -> FileIO:
    """That is there and not only promised: who writes to what cannot be had is ended."""
    file = FileIO(os.memfd_create(f"steelyard {next(_FILES)}"), "r+")
    try:
        os.posix_fallocate(file.fileno(), 0, nbytes)
    except OSError:
        file.close()
        raise
    return file


def mapped(memory: FileIO, nbytes: int) -> torch.Tensor:
    """All of it, as bytes to write to."""
    return torch.frombuffer(mmap.mmap(memory.fileno(), nbytes), dtype=torch.uint8)


class Room(ABC):
    """The slots of an edge, where they are read."""

    def __init__(self, edge: SlotSpec) -> None:
        self.edge, self._offsets = edge, edge.offsets
        # What stands for a slot that is held; it says when it goes.
        self._held: dict[int, weakref.ref[Any]] = {}

    @property
    def is_full(self) -> bool:
        return not self.edge.holds_all and len(self._held) >= self.edge.count

    def tensors(
        self, slot: int, likes: Sequence[Like], give_back: "GiveBack"
    ) -> list[torch.Tensor]:
        """On the slot itself, which is given back when the last of them is gone."""

        def let_go(_: object) -> None:
            del self._held[slot]
            self.over(slot)
            give_back()

        whole = self.lying(slot)
        self._held[slot] = weakref.ref(whole, let_go)
        return [*self._on(whole, likes)]

    @abstractmethod
    def lying(self, slot: int) -> Any:
        """What stands for all of it, and goes with the last tensor on it."""

    @abstractmethod
    def part(self, whole: Any, offset: int, nbytes: int) -> torch.Tensor:
        """Of that, some bytes, which are the storage of a tensor of their own."""

    @abstractmethod
    def over(self, slot: int) -> None:
        """Nothing here reads it any more, and nobody has been told."""

    def _on(self, whole: Any, likes: Sequence[Like]) -> Iterator[torch.Tensor]:
        sizes = self.edge.sizes
        for (shape, dtype), size, offset in zip(likes, sizes, self._offsets, strict=True):
            nbytes = math.prod(shape) * dtype.itemsize
            assert nbytes <= size, f"{list(shape)} is read where {size} bytes lie"
            yield self.part(whole, offset, nbytes).view(dtype).view(list(shape))


class SharedRoom(Room):
    """In memory of this host."""

    def __init__(self, edge: SlotSpec, memory: FileIO) -> None:
        super().__init__(edge)
        whole = memoryview(mmap.mmap(memory.fileno(), edge.nbytes))
        size = edge.slot_bytes
        self._slots = [whole[n * size : (n + 1) * size] for n in range(edge.count)]

    def lying(self, slot: int) -> memoryview:
        return self._slots[slot][:]  # one of its own

    def part(self, whole: memoryview, offset: int, nbytes: int) -> torch.Tensor:
        if not nbytes:
            return torch.empty(0, dtype=torch.uint8, device="cpu")
        return torch.frombuffer(whole, dtype=torch.uint8, count=nbytes, offset=offset)

    def over(self, slot: int) -> None:
        """A processor that reads no more has read all."""


class Outlet:
    """The slots of an edge, where they are written; ``waiting`` are messages that were not rung
    for. What the next one holds may be made in a slot that is taken for it before it is sent.
    ``whole`` are the bytes of all of them."""

    def __init__(self, edge: SlotSpec, whole: torch.Tensor) -> None:
        self.edge = edge
        self.free = deque(range(edge.count))
        self.waiting: deque[tuple[int, tuple[torch.Tensor, ...], int | None]] = deque()
        # Which message is being made, and in which slot.
        self._made: tuple[int, int] | None = None
        self._rooms = [
            [
                whole.narrow(0, slot * edge.slot_bytes + offset, size)
                for size, offset in zip(edge.sizes, edge.offsets, strict=True)
            ]
            for slot in range(edge.count)
        ]
        # The same as tensors of what goes there.
        self._places: dict[tuple[int, int, torch.dtype, torch.Size], torch.Tensor] = {}

    def begin(self) -> None:
        """Without what was left behind."""
        self.free += [slot for _, _, slot in self.waiting if slot is not None]
        self.waiting.clear()
        if self._made is not None:
            self.free.append(self._made[1])
            self._made = None

    def place(
        self, number: int, position: int, shape: Sequence[int], dtype: torch.dtype
    ) -> torch.Tensor | None:
        """In the slot of this message."""
        if self._made is None and self.free and not self.waiting:
            self._made = number, self.free.popleft()
        if self._made is None or self._made[0] != number:
            return None
        return self._place(self._made[1], position, torch.Size(shape), dtype)

    def put(self, number: int, values: Sequence[torch.Tensor]) -> None:
        slot = None
        if self._made is not None and self._made[0] == number:
            slot, self._made = self._made[1], None
        self.waiting.append((number, tuple(values), slot))

    def written(self) -> tuple[int, int, int] | None:
        """Of a message that now lies in a slot, its number, the slot, and its bytes; None where
        each that waits has none."""
        self.look()
        able = (n for n, (_, _, slot) in enumerate(self.waiting) if slot is not None or self.free)
        first = next(able, None)
        if first is None:
            return None
        number, values, made = self.waiting[first]
        del self.waiting[first]
        slot = self.free.popleft() if made is None else made
        for position, value in enumerate(values):
            if value.nbytes:
                place = self._place(slot, position, value.shape, value.dtype)
                if place.data_ptr() != value.data_ptr():
                    place.copy_(value)
        self.filled(slot)
        return number, slot, sum(value.nbytes for value in values)

    def give_back(self, slot: int) -> None:
        """Nobody is to read it any more."""
        self.free.append(slot)

    def look(self) -> None:
        """Which of those are really free by now."""

    @property
    def is_to_come(self) -> bool:
        """Whether one of those is not."""
        return False

    def filled(self, slot: int) -> None:
        """All of a message lies there, and nobody has been told."""

    def _place(
        self, slot: int, position: int, shape: torch.Size, dtype: torch.dtype
    ) -> torch.Tensor:
        key = slot, position, dtype, shape
        place = self._places.get(key)
        if place is None:
            room, nbytes = self._rooms[slot][position], math.prod(shape) * dtype.itemsize
            said = f"a value of {nbytes} bytes is sent where {room.nbytes} go"
            assert nbytes <= room.nbytes, said
            place = self._places[key] = room[:nbytes].view(dtype).view(shape)
        return place


@dataclass(frozen=True, slots=True)
class GiveBack:
    credit: FileIO
    index: int
    slot: int

    def __call__(self) -> None:
        # Whoever sent it may have ended by now, or this rank have closed all.
        with contextlib.suppress(OSError, ValueError):
            self.credit.write(CREDIT.pack(self.index, self.slot))
