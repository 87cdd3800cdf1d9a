"""The slots of an edge between two ranks, in shared memory. Messages are written into them, and
read from them without a copy.

Not for the notifications between ranks: see same_host.py.
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

# The record of a slot that is free again: edge, slot.
CREDIT = struct.Struct("<II")
_FILES = count()

# The shape and the dtype of a value.
Like = tuple[Sequence[int], torch.dtype]


def allocate_shared(nbytes: int) -> FileIO:
    """Allocate shared memory and commit it. Memory that is only reserved may be missing later, and
    the kernel would kill the process that writes to it.
    """
    file = FileIO(os.memfd_create(f"steelyard {next(_FILES)}"), "r+")
    try:
        os.posix_fallocate(file.fileno(), 0, nbytes)
    except OSError:
        file.close()
        raise
    return file


def map_memory(memory: FileIO, nbytes: int) -> torch.Tensor:
    """Map all of the memory as a writable byte tensor."""
    return torch.frombuffer(mmap.mmap(memory.fileno(), nbytes), dtype=torch.uint8)


class Room(ABC):
    """The slots of an edge on the reader's side."""

    def __init__(self, edge: SlotSpec) -> None:
        self.edge, self._offsets = edge, edge.offsets
        # A weak reference for each slot in use; its callback gives the slot back.
        self._leases: dict[int, weakref.ref[Any]] = {}

    @property
    def is_full(self) -> bool:
        return not self.edge.holds_all and len(self._leases) >= self.edge.count

    def tensors(
        self, slot: int, likes: Sequence[Like], give_back: "GiveBack"
    ) -> list[torch.Tensor]:
        """Return the tensors of a message, as views of the slot; the slot is given back when the
        last of them is freed.
        """

        def on_freed(_: object) -> None:
            del self._leases[slot]
            self.release(slot)
            give_back()

        whole = self.lease(slot)
        self._leases[slot] = weakref.ref(whole, on_freed)
        return [*self._views_on(whole, likes)]

    @abstractmethod
    def lease(self, slot: int) -> Any:
        """Return an object for the slot's memory that dies with the last tensor on it."""

    @abstractmethod
    def bytes_at(self, whole: Any, offset: int, nbytes: int) -> torch.Tensor:
        """Return some of its bytes as a tensor with a storage of its own."""

    @abstractmethod
    def release(self, slot: int) -> None:
        """Mark the slot as read; the sender has not been notified yet."""

    def _views_on(self, whole: Any, likes: Sequence[Like]) -> Iterator[torch.Tensor]:
        sizes = self.edge.sizes
        for (shape, dtype), size, offset in zip(likes, sizes, self._offsets, strict=True):
            nbytes = math.prod(shape) * dtype.itemsize
            assert nbytes <= size, (
                f"a value of shape {list(shape)} is read from a slot of {size} bytes"
            )
            yield self.bytes_at(whole, offset, nbytes).view(dtype).view(list(shape))


class SharedRoom(Room):
    """The slots of an edge in host memory."""

    def __init__(self, edge: SlotSpec, memory: FileIO) -> None:
        super().__init__(edge)
        whole = memoryview(mmap.mmap(memory.fileno(), edge.nbytes))
        size = edge.slot_bytes
        self._slots = [whole[n * size : (n + 1) * size] for n in range(edge.count)]

    def lease(self, slot: int) -> memoryview:
        return self._slots[slot][:]  # a new object, which lives as long as this message

    def bytes_at(self, whole: memoryview, offset: int, nbytes: int) -> torch.Tensor:
        if not nbytes:
            return torch.empty(0, dtype=torch.uint8, device="cpu")
        return torch.frombuffer(whole, dtype=torch.uint8, count=nbytes, offset=offset)

    def release(self, slot: int) -> None:
        """Do nothing: a CPU has already completed all its reads."""


class Outlet:
    """The slots of an edge on the writer's side.

    ``waiting`` are messages of which the reader has not been notified. A slot can be reserved
    before its message is sent, so that values can be computed in place. ``whole`` contains the
    bytes of all slots.
    """

    def __init__(self, edge: SlotSpec, whole: torch.Tensor) -> None:
        self.edge = edge
        self.free = deque(range(edge.count))
        self.waiting: deque[tuple[int, tuple[torch.Tensor, ...], int | None]] = deque()
        # The message that is being computed in place, and its slot.
        self._reserved: tuple[int, int] | None = None
        self._buffers = [
            [
                whole.narrow(0, slot * edge.slot_bytes + offset, size)
                for size, offset in zip(edge.sizes, edge.offsets, strict=True)
            ]
            for slot in range(edge.count)
        ]
        # Views of the buffers, as tensors of the values written there.
        self._views: dict[tuple[int, int, torch.dtype, torch.Size], torch.Tensor] = {}

    def begin(self) -> None:
        """Begin a step; drop the messages of an interrupted step."""
        self.free += [slot for _, _, slot in self.waiting if slot is not None]
        self.waiting.clear()
        if self._reserved is not None:
            self.free.append(self._reserved[1])
            self._reserved = None

    def place(
        self, number: int, position: int, shape: Sequence[int], dtype: torch.dtype
    ) -> torch.Tensor | None:
        """Return the place of a value in the slot that is reserved for this message, or None."""
        if self._reserved is None and self.free and not self.waiting:
            self._reserved = number, self.free.popleft()
        if self._reserved is None or self._reserved[0] != number:
            return None
        return self._view(self._reserved[1], position, torch.Size(shape), dtype)

    def enqueue(self, number: int, values: Sequence[torch.Tensor]) -> None:
        slot = None
        if self._reserved is not None and self._reserved[0] == number:
            slot, self._reserved = self._reserved[1], None
        self.waiting.append((number, tuple(values), slot))

    def write_next(self) -> tuple[int, int, int] | None:
        """Write the next message that can get a slot. Return its number, the slot and its bytes, or
        None if there is no such message.
        """
        self.refresh_free()
        sendable = (
            n for n, (_, _, slot) in enumerate(self.waiting) if slot is not None or self.free
        )
        first = next(sendable, None)
        if first is None:
            return None
        number, values, reserved = self.waiting[first]
        del self.waiting[first]
        slot = self.free.popleft() if reserved is None else reserved
        for position, value in enumerate(values):
            if value.nbytes:
                view = self._view(slot, position, value.shape, value.dtype)
                if view.data_ptr() != value.data_ptr():
                    view.copy_(value)
        self.mark_filled(slot)
        return number, slot, sum(value.nbytes for value in values)

    def take_back(self, slot: int) -> None:
        """Record that the reader has given a slot back."""
        self.free.append(slot)

    def refresh_free(self) -> None:
        """Update which of the slots that were given back are free by now."""

    @property
    def has_pending_slots(self) -> bool:
        """True if a slot that was given back is not free yet."""
        return False

    def mark_filled(self, slot: int) -> None:
        """Mark the message as completely written; the reader has not been notified yet."""

    def _view(
        self, slot: int, position: int, shape: torch.Size, dtype: torch.dtype
    ) -> torch.Tensor:
        key = slot, position, dtype, shape
        view = self._views.get(key)
        if view is None:
            buffer, nbytes = self._buffers[slot][position], math.prod(shape) * dtype.itemsize
            message = f"a value of {nbytes} bytes is written to a slot of {buffer.nbytes}"
            assert nbytes <= buffer.nbytes, message
            view = self._views[key] = buffer[:nbytes].view(dtype).view(shape)
        return view


@dataclass(frozen=True, slots=True)
class GiveBack:
    credit: FileIO
    index: int
    slot: int

    def __call__(self) -> None:
        # The sender may have ended by now, or this rank may have closed its pipes.
        with contextlib.suppress(OSError, ValueError):
            self.credit.write(CREDIT.pack(self.index, self.slot))
