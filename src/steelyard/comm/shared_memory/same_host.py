"""Messages between ranks of one host, each written once into shared memory.

Before the first step, the reader allocates as many slots as the schedule needs. The sender writes
into a slot and notifies the reader through a pipe, its ``bell``. A slot is given back when the last
tensor on it is freed. If no slot is free, the message waits at its sender, which continues to
compute. Nothing has a name in the file system, so a rank leaves nothing behind, however it ends.
Not for deciding which messages are sent, and when: see run/pipeline/driver.py.
"""

import os
import select
import struct
import time
import weakref
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from io import FileIO
from itertools import chain
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import torch
import torch.distributed as dist

from steelyard.comm.json_gather import gathered
from steelyard.comm.shared_memory.slots import (
    CREDIT,
    GiveBack,
    Like,
    Outlet,
    Room,
    SharedRoom,
    allocate_shared,
    map_memory,
)
from steelyard.errors import BadInput, RankFailed
from steelyard.hardware.host_os import quota_cores
from steelyard.ir.message_slots import SlotSpec
from steelyard.ir.rule import trade_name
from steelyard.ir.rule_kinds import SharedMemoryMessages
from steelyard.units import format_bytes, format_seconds

# The notification of a message: its sequence number at this sender, edge, step, number, slot.
_BELL = struct.Struct("<QIQQI")
# The largest number of records that are read at once.
_MAX_RECORDS = 16
WATCHED_SECONDS = 200e-6


class SharedMemoryTransport:
    """The messages of one rank of ``group`` along ``edges``, which are the same on all ranks.

    Creating it is a collective: every rank must do so. ``held_bytes`` is the memory allocated here
    for incoming messages, ``moved_bytes`` the total this rank has written. If ``polls`` is True, a
    wait polls for a moment before it sleeps. This is the default if each rank has a core of its
    own; otherwise, polling would take the core from another rank.
    """

    expects: ClassVar[str] = "ranks of one host, user and process namespace"
    through: ClassVar[str] = "shared memory"

    def __init__(self, edges: Sequence[SlotSpec], *, group: dist.ProcessGroup) -> None:
        self._edges, self._group, self._rank = edges, group, dist.get_rank(group)
        backend: Any = group._get_backend(torch.device("cpu"))
        self._timeout: float = backend.options._timeout.total_seconds()
        self.held_bytes = sum(edge.nbytes for edge in edges if edge.target == self._rank)
        self.moved_bytes = 0
        self.polls = False
        self._step = 0
        self._rooms: dict[int, Room] = {}
        self._outlets: dict[int, Outlet] = {}
        # By rank: the pipes of the ranks that this rank reads from, and of those that it sends to.
        self._from: dict[int, From] = {}
        self._to: dict[int, To] = {}
        self._arrived: dict[tuple[int, int, int], int] = {}
        # All pipe ends that are still open, by file descriptor.
        self._ends: dict[int, tuple[int, From | To]] = {}
        self._poll = select.poll()
        files: list[FileIO] = []
        self._close = weakref.finalize(self, _close_all, files)
        self._meet(files)
        for rank, end in chain[tuple[int, From | To]](self._from.items(), self._to.items()):
            self._ends[end.file.fileno()] = rank, end
            self._poll.register(end.file, select.POLLIN)

    def close(self) -> None:
        self._close()

    def begin(self) -> None:
        """Begin a step; messages left over from an interrupted step are dropped."""
        self._step += 1
        for outlet in self._outlets.values():
            outlet.begin()
        for key in [key for key in self._arrived if key[0] < self._step]:
            self._give_back(key[1], self._arrived.pop(key))()

    # --- meeting

    def _meet(self, files: list[FileIO]) -> None:
        """Allocate the slots for incoming messages, and open the slots of the other ranks."""
        own_offer, failure = self._offer_type(), None
        try:
            own_offer = self._allocate(files)
        except OSError as error:
            failure = (
                f"{format_bytes(self.held_bytes)} of shared memory cannot be allocated: "
                f"{error.strerror}"
            )
        except NotReachable as unreachable:
            failure = str(unreachable)
        offers = gathered(own_offer, self._offer_type, group=self._group)
        self.polls = all(offer.has_cores for offer in offers) and len(
            {core for offer in offers for core in offer.cores}
        ) >= len(offers)
        if failure is None and all(offer.is_allocated for offer in offers):
            try:
                self._open(offers, files, host=own_offer.host)
            except OSError as error:
                failure = f"memory of another rank cannot be opened: {error.strerror}"
            except NotReachable as unreachable:
                failure = str(unreachable)
        failures = gathered(failure, str | None, group=self._group)
        # The others have opened these by now. A pipe shows that the other rank has ended only if
        # this rank has closed its own copies.
        for file in files:
            if file.fileno() in own_offer.given_descriptors:
                file.close()
        for rank, fault in enumerate(failures):
            if fault is not None:
                self.close()
                who = dist.get_global_rank(self._group, rank)
                raise BadInput(
                    f"messages cannot use {self.through}: on rank {who}, {fault}",
                    expected=self.expects,
                    remedy=f"remove [[{trade_name(SharedMemoryMessages)}]] from the plan, or "
                    "plan again",
                )

    @property
    def _offer_type(self) -> "type[Offered]":
        """The type of the offer that each rank makes to the others."""
        return Offered

    def _allocate(self, files: list[FileIO]) -> "Offered":
        rooms: dict[int, int] = {}
        for index, edge in enumerate(self._edges):
            if edge.target == self._rank:
                files.append(memory := allocate_shared(edge.nbytes))
                self._rooms[index] = SharedRoom(edge, memory)
                rooms[index] = memory.fileno()
        return self._offer(files, Offered, rooms=rooms)

    def _offer(self, files: list[FileIO], kind: "type[O]", **made: Any) -> "O":
        """Return this rank's offer, with the pipe ends that other ranks write to."""
        bells: dict[int, int] = {}
        credit_ends: dict[int, int] = {}
        for edge in self._edges:
            if edge.target == self._rank:
                if edge.source not in self._from:
                    ring, bell = pipe(files)
                    self._from[edge.source] = From(ring)
                    bells[edge.source] = bell.fileno()
            elif edge.source == self._rank and edge.target not in self._to:
                free, credit = pipe(files)
                self._to[edge.target] = To(free)
                credit_ends[edge.target] = credit.fileno()
        return kind(
            host=host(), pid=os.getpid(), bells=bells, credits=credit_ends, is_allocated=True,
            cores=frozenset(os.sched_getaffinity(0)),
            has_cores=quota_cores() >= dist.get_world_size(self._group),
            **made,
        )  # fmt: skip

    def _open(self, offers: "Sequence[Offered]", files: list[FileIO], *, host: str) -> None:
        for index, edge in enumerate(self._edges):
            if edge.source == self._rank:
                offer, to = offers[edge.target], self._to[edge.target]
                self._outlets[index] = self._outlet_to(offer, index, files, host=host)
                if to.bell is None:
                    to.bell = offer.pipe(offer.bells, self._rank, host=host)
                    files.append(to.bell)
            elif edge.target == self._rank and self._from[edge.source].credit is None:
                offer = offers[edge.source]
                credit = offer.pipe(offer.credits, self._rank, host=host)
                files.append(credit)
                self._from[edge.source].credit = credit

    def _outlet_to(self, offer: "Offered", index: int, files: list[FileIO], *, host: str) -> Outlet:
        """Open the memory that the reader has allocated for an edge."""
        edge = self._edges[index]
        files.append(memory := offer.memory(index, host=host))
        if os.fstat(memory.fileno()).st_size != edge.nbytes:
            raise NotReachable("memory of another rank has a different size than planned")
        return Outlet(edge, map_memory(memory, edge.nbytes))

    # --- sending

    def place(self, index: int, number: int, position: int, like: Like) -> torch.Tensor | None:
        """Return a place in which to compute a value of a message before it is sent. Return None if
        no slot is free, if a message waits for one, or if another message has reserved one.
        """
        return self._outlet(index).place(number, position, *like)

    def send(self, index: int, number: int, values: Sequence[torch.Tensor]) -> None:
        """Send values along an edge. A message without a free slot is kept until there is one."""
        self._outlet(index).enqueue(number, values)
        self._push(index)

    def _outlet(self, index: int) -> Outlet:
        """Return the outlet of an edge, after reading returned slots if none is free."""
        outlet = self._outlets[index]
        outlet.refresh_free()
        if not outlet.free:
            self._read_credits(outlet.edge.target)
            outlet.refresh_free()
        return outlet

    def settle(self) -> None:
        """Wait until all sent messages are in their slots."""
        deadline = time.monotonic() + self._timeout
        while waited_for := {o.edge.target for o in self._outlets.values() if o.waiting}:
            self._await(waited_for, deadline)

    def _push(self, index: int) -> None:
        outlet = self._outlets[index]
        to = self._to[outlet.edge.target]
        assert to.bell is not None
        while (message := outlet.write_next()) is not None:
            number, slot, nbytes = message
            self.moved_bytes += nbytes
            try:
                to.bell.write(_BELL.pack(to.num_sent, index, self._step, number, slot))
            except BrokenPipeError:
                raise self._ended_error(outlet.edge.target) from None
            to.num_sent += 1

    def _read_credits(self, rank: int) -> None:
        """Read the notifications of slots that ``rank`` has given back."""
        for index, slot in CREDIT.iter_unpack(_read_records(self._to[rank], CREDIT.size)):
            self._outlets[index].take_back(slot)

    # --- reading

    def receive(self, index: int, number: int, likes: Sequence[Like]) -> list[torch.Tensor]:
        """Wait for a message and return its values, with these shapes and dtypes."""
        room, deadline = self._rooms[index], time.monotonic() + self._timeout
        key = self._step, index, number
        while key not in self._arrived:
            self._await({room.edge.source}, deadline)
        self._await_filled(index, self._arrived[key], deadline)
        slot = self._arrived.pop(key)
        values = room.tensors(slot, likes, self._give_back(index, slot))
        if room.is_full:
            # Avoid a deadlock, in which the sender waits for slots in use here, and this rank for
            # the sender.
            values = [value.clone() for value in values]
        return values

    def _await_filled(self, index: int, slot: int, deadline: float) -> None:
        """Wait until the writer's device has written the slot; a CPU has done so before it
        notifies.
        """

    def _give_back(self, index: int, slot: int) -> GiveBack:
        credit = self._from[self._rooms[index].edge.source].credit
        assert credit is not None
        return GiveBack(credit, index, slot)

    def _await(self, ranks: Collection[int], deadline: float) -> None:
        """Wait until a notification from any rank arrives, and handle it."""
        events = self._poll_pipes(deadline)
        if not events and time.monotonic() >= deadline:
            raise self._timeout_error(ranks)
        self._handle(events, ranks)
        self._push_all()

    def _push_all(self) -> None:
        """Write messages that are waiting for a slot."""
        for index, outlet in self._outlets.items():
            if outlet.waiting:
                self._push(index)

    def _handle(self, events: Sequence[tuple[int, int]], ranks: Collection[int]) -> None:
        """Handle these notifications; raise RankFailed if one of the awaited ranks has ended."""
        for number, _ in events:
            rank, end = self._ends[number]
            if isinstance(end, From):
                self._read_bells(rank, end)
            else:
                self._read_credits(rank)
            if end.is_closed:
                self._poll.unregister(number)
                del self._ends[number]
        for rank in ranks:
            if any(end.is_closed for end in (self._from.get(rank), self._to.get(rank)) if end):
                raise self._ended_error(rank)

    def _poll_pipes(self, deadline: float) -> list[tuple[int, int]]:
        events = self._poll_briefly() if self.polls else []
        return events or self._poll.poll(1000 * max(0.0, deadline - time.monotonic()))

    def _poll_briefly(self) -> list[tuple[int, int]]:
        """Poll for a moment without sleeping: a sleeping core takes some time to wake."""
        end = time.perf_counter() + WATCHED_SECONDS
        while not (events := self._poll.poll(0)) and time.perf_counter() < end:
            pass
        return events

    def _read_bells(self, rank: int, source: "From") -> None:
        for order, index, step, number, slot in _BELL.iter_unpack(
            _read_records(source, _BELL.size)
        ):
            assert order == source.num_received, (
                f"message {order} of rank {rank} is not {source.num_received}"
            )
            source.num_received += 1
            if step < self._step:  # left over from a step that was interrupted here
                self._give_back(index, slot)()
            else:
                self._arrived[step, index, number] = slot

    def _timeout_error(self, ranks: Collection[int]) -> RankFailed:
        global_ranks = [dist.get_global_rank(self._group, r) for r in sorted(ranks)]
        names = ", ".join(map(str, global_ranks))
        return RankFailed(
            f"no message from rank {names} within {format_seconds(self._timeout)}",
            expected="all ranks to take the same steps",
            remedy="find out what that rank is doing, or allow ranks to wait longer",
            rank=global_ranks[0],
        )

    def _ended_error(self, rank: int) -> RankFailed:
        return RankFailed(
            f"rank {dist.get_global_rank(self._group, rank)} has exited, and messages use "
            f"{self.through}",
            expected="every rank to complete its steps",
            remedy="start again from the last checkpoint, with --resume",
        )


class NotReachable(Exception):
    """The error if another rank's memory or pipes cannot be used from this one."""


@dataclass(frozen=True, kw_only=True)
class Offered:
    """The offer of a rank: file descriptors of its memory, by edge, and of its pipe ends for
    notifications and returned slots, by rank.

    ``cores`` are the cores on which it may run. ``has_cores`` is True if its control group has one
    core for each rank.
    """

    host: str = ""
    pid: int = 0
    rooms: Mapping[int, int] = field(default_factory=dict)
    bells: Mapping[int, int] = field(default_factory=dict)
    credits: Mapping[int, int] = field(default_factory=dict)
    is_allocated: bool = False
    cores: frozenset[int] = frozenset()
    has_cores: bool = False

    @property
    def given_descriptors(self) -> frozenset[int]:
        return frozenset((*self.rooms.values(), *self.bells.values(), *self.credits.values()))

    def memory(self, index: int, *, host: str) -> FileIO:
        """Open the memory that this rank allocated for an edge."""
        path = self._path(self.rooms, index, host=host)
        if not str(path.readlink()).startswith("/memfd:"):
            raise NotReachable("another rank offered a file that is not shared memory")
        return FileIO(path, "r+")

    def pipe(self, numbers: Mapping[int, int], rank: int, *, host: str) -> FileIO:
        """Open the write end of the pipe that this rank made for ``rank``. The file descriptor
        comes from another rank, so a file that is not a pipe is not even opened for writing.
        """
        path = self._path(numbers, rank, host=host)
        if not path.is_fifo():
            raise NotReachable("another rank offered a file that is not a pipe")
        return FileIO(path, "w")

    def _path(self, numbers: Mapping[int, int], key: int, *, host: str) -> Path:
        if self.host != host:
            raise NotReachable("another rank is on another host or in another namespace")
        if key not in numbers:
            raise NotReachable("another rank did not offer memory to this one")
        return Path(f"/proc/{self.pid}/fd/{numbers[key]}")


O = TypeVar("O", bound=Offered)


@dataclass(slots=True)
class _End:
    """The read end of a pipe. ``is_closed`` means that no process has the write end open any
    more.
    """

    file: FileIO
    is_closed: bool = False


@dataclass(slots=True)
class From(_End):
    """The pipes of a rank that this rank reads from. Notifications arrive here (``num_received`` so
    far), and ``credit`` returns slots.
    """

    credit: FileIO | None = None
    num_received: int = 0


@dataclass(slots=True)
class To(_End):
    """The pipes of a rank that this rank sends to. Returned slots arrive here, and ``bell`` takes
    notifications (``num_sent`` so far).
    """

    bell: FileIO | None = None
    num_sent: int = 0


def host() -> str:
    """Return an identifier of the processes that can share memory: kernel, PID namespace and
    network namespace. Processes in different namespaces count as two hosts.
    """
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    spaces = Path("/proc/self/ns")
    return " ".join((boot, *(str((spaces / kind).readlink()) for kind in ("pid", "net"))))


def pipe(files: list[FileIO]) -> tuple[FileIO, FileIO]:
    """Make a pipe and return both ends. This rank keeps the read end, which does not block."""
    read, write = os.pipe()
    os.set_blocking(read, False)
    ends = FileIO(read, "r"), FileIO(write, "w")
    files += ends
    return ends


def _read_records(end: _End, size: int) -> bytes:
    data = end.file.read(size * _MAX_RECORDS)
    if data == b"":
        end.is_closed = True
    return data or b""


def _close_all(files: Sequence[FileIO]) -> None:
    for file in files:
        file.close()
