"""Messages between ranks on GPUs of one host, each written once into the reader's GPU memory.

Each rank can write the slots of the others (gpu_memory.py). Notifications and returned slots go
through pipes, as among ranks of a host (same_host.py). When a host sends a notification, its GPU
has been given the work but may not have done it; a shared event tells when it has. The reader's
host waits for that event. If its GPU waited instead, it would hang forever once the writer has
ended. The writer waits for nothing: a slot that is still being read is not free. Not for deciding
which messages are sent, and when.
"""

import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from io import FileIO
from typing import ClassVar

import torch
import torch.distributed as dist

from steelyard.comm.json_gather import gathered
from steelyard.comm.shared_memory.gpu_memory import Event, Gpu
from steelyard.comm.shared_memory.same_host import (
    WATCHED_SECONDS,
    NotReachable,
    Offered,
    SharedMemoryTransport,
)
from steelyard.comm.shared_memory.slots import Outlet, Room
from steelyard.ir.message_slots import SlotSpec, evenly_held_bytes
from steelyard.units import format_bytes

# The pause between two queries of a busy GPU.
_PAUSE_SECONDS = 2e-5


class CudaIpcTransport(SharedMemoryTransport):
    """The transport among ranks of one host, each on its own GPU or several on one. Every rank
    allocates ``held_bytes``: as much memory as the rank that receives most.
    """

    expects: ClassVar[str] = (
        "ranks of one host and user, on GPUs that can access each other's memory"
    )
    through: ClassVar[str] = "shared GPU memory"

    def __init__(self, edges: Sequence[SlotSpec], *, group: dist.ProcessGroup, gpu: Gpu) -> None:
        self._gpu = gpu
        self._events: dict[int, list[Event]] = {}
        super().__init__(edges, group=group)

    # --- meeting

    @property
    def _offer_type(self) -> type[Offered]:
        return _OnGpu

    def _allocate(self, files: list[FileIO]) -> "_OnGpu":
        self.held_bytes = evenly_held_bytes(self._edges)
        try:
            return self._allocate_on_gpu(files)
        except RuntimeError as error:  # an error of the driver, or of an allocator
            size = format_bytes(self.held_bytes)
            raise NotReachable(
                f"{size} of its GPU cannot be shared: {_first_line(error)}"
            ) from None

    def _allocate_on_gpu(self, files: list[FileIO]) -> "_OnGpu":
        self._memory = self._gpu.memory(self.held_bytes)
        offsets, handles = _edge_offsets(self._edges), dict[int, list[str]]()
        for index, edge in enumerate(self._edges):
            if self._rank in (edge.source, edge.target):
                created = [self._gpu.event() for _ in range(edge.count)]
                self._events[index] = [event for event, _ in created]
                handles[index] = [handle for _, handle in created]
            if edge.target == self._rank:
                own = self._memory[offsets[index] : offsets[index] + edge.nbytes]
                self._rooms[index] = RoomOnGpu(edge, self._gpu, own, self._events[index])
        return self._offer(files, _OnGpu, gpu=self._gpu.name, events=handles)

    def _open(self, offers: Sequence[Offered], files: list[FileIO], *, host: str) -> None:
        """Open the other ranks' memory. Either all ranks raise for the same reason or none does,
        because torch opens the memory in a collective.
        """
        if any(offer.host != host for offer in offers):
            raise NotReachable("another rank is on another host or in another namespace")
        gpus = [offer.gpu for offer in offers if isinstance(offer, _OnGpu)]
        for rank, reaches in enumerate(self._reach_all(gpus)):
            if not reaches:
                raise NotReachable(f"the GPU of rank {rank} cannot access all others")
        try:
            self._views = self._gpu.views(self._memory, self._group)
            for index, room in self._rooms.items():
                assert isinstance(room, RoomOnGpu)
                room.filled = self._open_events(offers[room.edge.source], index)
            super()._open(offers, files, host=host)
        except RuntimeError as error:
            raise NotReachable(
                f"memory of another GPU cannot be opened: {_first_line(error)}"
            ) from None

    def _reach_all(self, gpus: Sequence[str]) -> list[bool]:
        """Return, for each rank, True if its GPU can access all of these GPUs."""
        return gathered(all(map(self._gpu.reaches, gpus)), bool, group=self._group)

    def _outlet_to(
        self,
        offer: Offered,
        index: int,
        files: list[FileIO],  # noqa: ARG002 - there are none
        *,
        host: str,  # noqa: ARG002 - checked in _open
    ) -> Outlet:
        edge, begin = self._edges[index], _edge_offsets(self._edges)[index]
        whole = self._views[edge.target][begin : begin + edge.nbytes]
        return OutletOnGpu(
            edge, whole, filled=self._events[index], emptied=self._open_events(offer, index)
        )

    def _open_events(self, offer: Offered, index: int) -> list[Event]:
        assert isinstance(offer, _OnGpu)
        if len(offer.events.get(index, ())) != self._edges[index].count:
            raise NotReachable("another rank did not offer an event for each slot")
        return [self._gpu.opened(handle) for handle in offer.events[index]]

    # --- waiting

    def _await_filled(self, index: int, slot: int, deadline: float) -> None:
        room = self._rooms[index]
        assert isinstance(room, RoomOnGpu)
        spin_end = time.perf_counter() + WATCHED_SECONDS
        while not room.filled[slot].query():
            if time.monotonic() >= deadline:
                raise self._timeout_error({room.edge.source})
            self._handle(self._poll.poll(0), {room.edge.source})
            self._push_all()
            if time.perf_counter() > spin_end:
                time.sleep(_PAUSE_SECONDS)

    def _poll_pipes(self, deadline: float) -> list[tuple[int, int]]:
        """Poll instead of sleeping while a returned slot is still being read, because nothing
        notifies the writer when that ends.
        """
        if not any(o.waiting and o.has_pending_slots for o in self._outlets.values()):
            return super()._poll_pipes(deadline)
        time.sleep(_PAUSE_SECONDS)
        return self._poll.poll(0)


class RoomOnGpu(Room):
    """The slots of an edge in GPU memory. ``filled`` are the writer's events, once the ranks have
    exchanged them.
    """

    filled: Sequence[Event]

    def __init__(
        self, edge: SlotSpec, gpu: Gpu, whole: torch.Tensor, emptied: Sequence[Event]
    ) -> None:
        super().__init__(edge)
        self._gpu, self._memory, self._emptied = gpu, whole, emptied

    def lease(self, slot: int) -> "_Slot":
        return _Slot(self._memory, slot * self.edge.slot_bytes)

    def bytes_at(self, whole: "_Slot", offset: int, nbytes: int) -> torch.Tensor:
        return self._gpu.lent(whole, whole.address + offset, nbytes)

    def release(self, slot: int) -> None:
        self._emptied[slot].record()


class OutletOnGpu(Outlet):
    """The writer's side of an edge. A returned slot is free once the reader's GPU is done with
    it."""

    def __init__(
        self,
        edge: SlotSpec,
        whole: torch.Tensor,
        *,
        filled: Sequence[Event],
        emptied: Sequence[Event],
    ) -> None:
        super().__init__(edge, whole)
        self._filled, self._emptied = filled, emptied
        self._returned: deque[int] = deque()

    @property
    def has_pending_slots(self) -> bool:
        return bool(self._returned)

    def take_back(self, slot: int) -> None:
        self._returned.append(slot)

    def refresh_free(self) -> None:
        while self._returned and self._emptied[self._returned[0]].query():
            self.free.append(self._returned.popleft())

    def mark_filled(self, slot: int) -> None:
        self._filled[slot].record()


@dataclass(frozen=True, kw_only=True)
class _OnGpu(Offered):
    """A rank's offer, with the name of its GPU and the event handles of the slots by edge."""

    gpu: str = ""
    events: Mapping[int, Sequence[str]] = field(default_factory=dict)


class _Slot:
    """A message that is being read; it keeps its memory alive."""

    def __init__(self, whole: torch.Tensor, begin: int) -> None:
        self._memory = whole
        self.address = whole.data_ptr() + begin


def _edge_offsets(edges: Sequence[SlotSpec]) -> list[int]:
    """Return the offset of each edge's slots in the memory of its reader."""
    ends: dict[int, int] = {}
    offsets = []
    for edge in edges:
        offsets.append(ends.get(edge.target, 0))
        ends[edge.target] = offsets[-1] + edge.nbytes
    return offsets


def _first_line(error: RuntimeError) -> str:
    return (str(error).strip().splitlines() or ["nothing"])[0]
