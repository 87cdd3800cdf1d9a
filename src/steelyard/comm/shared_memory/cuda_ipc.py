"""Messages between ranks on GPUs of one host, each written once, into the GPU memory of who reads.

Slots are memory that each rank may write of the others (gpu_memory.py). Bells, and slots that come
back, go through pipes as among ranks of a host (same_host.py). What a host says so its GPU has been
told and not yet done: events that both ranks have say when it is. Who reads has its host wait for
that, as a GPU that waited for a rank that has ended would wait for good; who writes waits for
nothing, and a slot that is still read is none. Not for what is sent, nor when.
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

# Between two looks at a GPU that has much to do.
_PAUSE_SECONDS = 2e-5


class CudaIpcTransport(SharedMemoryTransport):
    """As among ranks of one host, each on its GPU, or some of them on one. All have as much room as
    the one that reads most: ``held_bytes``."""

    expects: ClassVar[str] = "ranks of one host and user, on GPUs that reach each other's memory"
    through: ClassVar[str] = "memory of GPUs that ranks share"

    def __init__(self, edges: Sequence[SlotSpec], *, group: dist.ProcessGroup, gpu: Gpu) -> None:
        self._gpu = gpu
        self._events: dict[int, list[Event]] = {}
        super().__init__(edges, group=group)

    # --- meeting

    @property
    def _kind(self) -> type[Offered]:
        return _OnGpu

    def _made(self, files: list[FileIO]) -> "_OnGpu":
        self.held_bytes = evenly_held_bytes(self._edges)
        try:
            return self._made_here(files)
        except RuntimeError as error:  # the driver's own, or an allocator's
            size = format_bytes(self.held_bytes)
            raise NotReachable(f"no {size} of its GPU can be shared: {_said(error)}") from None

    def _made_here(self, files: list[FileIO]) -> "_OnGpu":
        self._whole = self._gpu.memory(self.held_bytes)
        begins, handles = _begins(self._edges), dict[int, list[str]]()
        for index, edge in enumerate(self._edges):
            if self._rank in (edge.source, edge.target):
                made = [self._gpu.event() for _ in range(edge.count)]
                self._events[index] = [event for event, _ in made]
                handles[index] = [handle for _, handle in made]
            if edge.target == self._rank:
                own = self._whole[begins[index] : begins[index] + edge.nbytes]
                self._read[index] = RoomOnGpu(edge, self._gpu, own, self._events[index])
        return self._offered(files, _OnGpu, gpu=self._gpu.name, events=handles)

    def _open(self, everyones: Sequence[Offered], files: list[FileIO], *, host: str) -> None:
        """All find the same in the way, or nothing: torch has them come together."""
        if any(each.host != host for each in everyones):
            raise NotReachable("another rank is on another host, or kept apart from this one")
        gpus = [each.gpu for each in everyones if isinstance(each, _OnGpu)]
        for rank, reaches in enumerate(self._all_reach(gpus)):
            if not reaches:
                raise NotReachable(f"the GPU of rank {rank} does not reach all others")
        try:
            self._views = self._gpu.views(self._whole, self._group)
            for index, room in self._read.items():
                assert isinstance(room, RoomOnGpu)
                room.filled = self._opened(everyones[room.edge.source], index)
            super()._open(everyones, files, host=host)
        except RuntimeError as error:
            raise NotReachable(f"what another GPU has cannot be opened: {_said(error)}") from None

    def _all_reach(self, gpus: Sequence[str]) -> list[bool]:
        """By rank, whether its GPU reaches all of these."""
        return gathered(all(map(self._gpu.reaches, gpus)), bool, group=self._group)

    def _outlet_to(
        self,
        theirs: Offered,
        index: int,
        files: list[FileIO],  # noqa: ARG002 - there are none
        *,
        host: str,  # noqa: ARG002 - was looked at
    ) -> Outlet:
        edge, begin = self._edges[index], _begins(self._edges)[index]
        whole = self._views[edge.target][begin : begin + edge.nbytes]
        return OutletOnGpu(
            edge, whole, filled=self._events[index], emptied=self._opened(theirs, index)
        )

    def _opened(self, theirs: Offered, index: int) -> list[Event]:
        assert isinstance(theirs, _OnGpu)
        if len(theirs.events.get(index, ())) != self._edges[index].count:
            raise NotReachable("another rank made no event for each slot")
        return [self._gpu.opened(handle) for handle in theirs.events[index]]

    # --- waiting

    def _until_filled(self, index: int, slot: int, until: float) -> None:
        room = self._read[index]
        assert isinstance(room, RoomOnGpu)
        watched = time.perf_counter() + WATCHED_SECONDS
        while not room.filled[slot].query():
            if time.monotonic() >= until:
                raise self._silent({room.edge.source})
            self._listen(self._asked.poll(0), {room.edge.source})
            self._push_all()
            if time.perf_counter() > watched:
                time.sleep(_PAUSE_SECONDS)

    def _heard(self, until: float) -> list[tuple[int, int]]:
        """Nobody rings when a slot that was given back is read no more."""
        if not any(o.waiting and o.is_to_come for o in self._written.values()):
            return super()._heard(until)
        time.sleep(_PAUSE_SECONDS)
        return self._asked.poll(0)


class RoomOnGpu(Room):
    """On these bytes; ``filled`` are the events of who writes, known once it has been met."""

    filled: Sequence[Event]

    def __init__(
        self, edge: SlotSpec, gpu: Gpu, whole: torch.Tensor, emptied: Sequence[Event]
    ) -> None:
        super().__init__(edge)
        self._gpu, self._whole, self._emptied = gpu, whole, emptied

    def lying(self, slot: int) -> "_Slot":
        return _Slot(self._whole, slot * self.edge.slot_bytes)

    def part(self, whole: "_Slot", offset: int, nbytes: int) -> torch.Tensor:
        return self._gpu.lent(whole, whole.address + offset, nbytes)

    def over(self, slot: int) -> None:
        self._emptied[slot].record()


class OutletOnGpu(Outlet):
    """What was given back is free when its reader's GPU is done with it."""

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
        self._given_back: deque[int] = deque()

    @property
    def is_to_come(self) -> bool:
        return bool(self._given_back)

    def give_back(self, slot: int) -> None:
        self._given_back.append(slot)

    def look(self) -> None:
        while self._given_back and self._emptied[self._given_back[0]].query():
            self.free.append(self._given_back.popleft())

    def filled(self, slot: int) -> None:
        self._filled[slot].record()


@dataclass(frozen=True, kw_only=True)
class _OnGpu(Offered):
    """Which GPU it is on, and by edge what others open the events of its slots by."""

    gpu: str = ""
    events: Mapping[int, Sequence[str]] = field(default_factory=dict)


class _Slot:
    """A message that is held, and with it the memory that it lies in."""

    def __init__(self, whole: torch.Tensor, begin: int) -> None:
        self._whole = whole
        self.address = whole.data_ptr() + begin


def _begins(edges: Sequence[SlotSpec]) -> list[int]:
    """Where each edge's slots begin in the memory of who reads them."""
    ends: dict[int, int] = {}
    found = []
    for edge in edges:
        found.append(ends.get(edge.target, 0))
        ends[edge.target] = found[-1] + edge.nbytes
    return found


def _said(error: RuntimeError) -> str:
    return (str(error).strip().splitlines() or ["nothing"])[0]
