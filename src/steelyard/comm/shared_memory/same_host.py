"""Messages between ranks of one host, each written once, into memory that both have.

The reader of a message makes room for it before the first step, as many slots as the schedule
needs; whoever sends writes there and rings. A slot is given back when the last tensor on it is
gone. What has no slot yet waits with its sender, which goes on. Nothing has a name in the file
system, so that whatever ends a rank leaves nothing behind. Not for what is sent, nor when: that is
run/pipeline/driver.py.
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
    mapped,
    memory_of,
)
from steelyard.errors import BadInput, RankFailed
from steelyard.hardware.host_os import quota_cores
from steelyard.ir.message_slots import SlotSpec
from steelyard.units import format_bytes, format_seconds

# Of a message: the how-manieth from its sender, the edge, the step, its number, the slot.
_BELL = struct.Struct("<QIQQI")
# Of these, as many as are read at once.
_MANY = 16
WATCHED_SECONDS = 200e-6


class SharedMemoryTransport:
    """Of one rank of ``group``: what it reads and sends along ``edges``, which all ranks know.

    Made by all of them together. ``held_bytes`` is the room made here for what comes,
    ``moved_bytes`` what this rank has written in all. Who waits ``watches`` for a moment before it
    sleeps, where each rank has a core: else it is the other one's meanwhile.
    """

    expects: ClassVar[str] = "ranks of one host and one user that see each other's processes"
    through: ClassVar[str] = "memory that ranks share"

    def __init__(self, edges: Sequence[SlotSpec], *, group: dist.ProcessGroup) -> None:
        self._edges, self._group, self._rank = edges, group, dist.get_rank(group)
        backend: Any = group._get_backend(torch.device("cpu"))
        self._timeout: float = backend.options._timeout.total_seconds()
        self.held_bytes = sum(edge.nbytes for edge in edges if edge.target == self._rank)
        self.moved_bytes = 0
        self.watches = False
        self._step = 0
        self._read: dict[int, Room] = {}
        self._written: dict[int, Outlet] = {}
        # By the other rank: what it rings here, and what it says of its slots.
        self._from: dict[int, From] = {}
        self._to: dict[int, To] = {}
        self._came: dict[tuple[int, int, int], int] = {}
        # All ends that may still have something to say, by the numbers of their files.
        self._ends: dict[int, tuple[int, From | To]] = {}
        self._asked = select.poll()
        files: list[FileIO] = []
        self._close = weakref.finalize(self, _closed, files)
        self._meet(files)
        for rank, end in chain[tuple[int, From | To]](self._from.items(), self._to.items()):
            self._ends[end.file.fileno()] = rank, end
            self._asked.register(end.file, select.POLLIN)

    def close(self) -> None:
        self._close()

    def begin(self) -> None:
        """A step; what was left behind by one that was broken off is nobody's."""
        self._step += 1
        for outlet in self._written.values():
            outlet.begin()
        for key in [key for key in self._came if key[0] < self._step]:
            self._given_back(key[1], self._came.pop(key))()

    # --- meeting

    def _meet(self, files: list[FileIO]) -> None:
        """Each makes room for what it reads, and opens what the others made for it."""
        offered, failure = self._kind(), None
        try:
            offered = self._made(files)
        except OSError as error:
            failure = f"no {format_bytes(self.held_bytes)} to share can be had: {error.strerror}"
        except NotReachable as elsewhere:
            failure = str(elsewhere)
        everyones = gathered(offered, self._kind, group=self._group)
        self.watches = all(each.has_cores for each in everyones) and len(
            {core for each in everyones for core in each.cores}
        ) >= len(everyones)
        if failure is None and all(each.is_made for each in everyones):
            try:
                self._open(everyones, files, host=offered.host)
            except OSError as error:
                failure = f"what another rank made cannot be opened: {error.strerror}"
            except NotReachable as elsewhere:
                failure = str(elsewhere)
        failures = gathered(failure, str | None, group=self._group)
        for file in files:  # others have opened them, and when those end it is seen
            if file.fileno() in offered.for_others:
                file.close()
        for rank, said in enumerate(failures):
            if said is not None:
                self.close()
                who = dist.get_global_rank(self._group, rank)
                raise BadInput(
                    f"messages are to go through {self.through}, and on rank {who} {said}",
                    expected=self.expects,
                    remedy="take [[shared_memory_transfer]] out of the plan, or plan again",
                )

    @property
    def _kind(self) -> "type[Offered]":
        """The type of what each rank offers the others."""
        return Offered

    def _made(self, files: list[FileIO]) -> "Offered":
        rooms: dict[int, int] = {}
        for index, edge in enumerate(self._edges):
            if edge.target == self._rank:
                files.append(memory := memory_of(edge.nbytes))
                self._read[index] = SharedRoom(edge, memory)
                rooms[index] = memory.fileno()
        return self._offered(files, Offered, rooms=rooms)

    def _offered(self, files: list[FileIO], kind: "type[O]", **made: Any) -> "O":
        """With the ends of pipes that others write to."""
        bells: dict[int, int] = {}
        heard: dict[int, int] = {}
        for edge in self._edges:
            if edge.target == self._rank:
                if edge.source not in self._from:
                    ring, bell = pipe(files)
                    self._from[edge.source] = From(ring)
                    bells[edge.source] = bell.fileno()
            elif edge.source == self._rank and edge.target not in self._to:
                free, credit = pipe(files)
                self._to[edge.target] = To(free)
                heard[edge.target] = credit.fileno()
        return kind(
            host=host(), pid=os.getpid(), bells=bells, heard=heard, is_made=True,
            cores=frozenset(os.sched_getaffinity(0)),
            has_cores=quota_cores() >= dist.get_world_size(self._group),
            **made,
        )  # fmt: skip

    def _open(self, everyones: "Sequence[Offered]", files: list[FileIO], *, host: str) -> None:
        for index, edge in enumerate(self._edges):
            if edge.source == self._rank:
                theirs, to = everyones[edge.target], self._to[edge.target]
                self._written[index] = self._outlet_to(theirs, index, files, host=host)
                if to.bell is None:
                    to.bell = theirs.pipe(theirs.bells, self._rank, host=host)
                    files.append(to.bell)
            elif edge.target == self._rank and self._from[edge.source].credit is None:
                theirs = everyones[edge.source]
                credit = theirs.pipe(theirs.heard, self._rank, host=host)
                files.append(credit)
                self._from[edge.source].credit = credit

    def _outlet_to(
        self, theirs: "Offered", index: int, files: list[FileIO], *, host: str
    ) -> Outlet:
        """Where this rank writes of that edge, which another has made."""
        edge = self._edges[index]
        files.append(memory := theirs.memory(index, host=host))
        if os.fstat(memory.fileno()).st_size != edge.nbytes:
            raise NotReachable("what another rank made is not as large as was planned")
        return Outlet(edge, mapped(memory, edge.nbytes))

    # --- sending

    def place(self, index: int, number: int, position: int, like: Like) -> torch.Tensor | None:
        """Where to make the how-manieth value of a message along this edge, before it is sent;
        nowhere while there is no slot, somebody waits for one, or another one is made."""
        return self._outlet(index).place(number, position, *like)

    def send(self, index: int, number: int, values: Sequence[torch.Tensor]) -> None:
        """Along the edge of this index; what has no slot yet is held until it has one."""
        self._outlet(index).put(number, values)
        self._push(index)

    def _outlet(self, index: int) -> Outlet:
        """With a slot, if one is known to be free."""
        outlet = self._written[index]
        outlet.look()
        if not outlet.free:
            self._hear(outlet.edge.target)
            outlet.look()
        return outlet

    def settle(self) -> None:
        """All that was sent lies in its slot."""
        until = time.monotonic() + self._timeout
        while waited_for := {o.edge.target for o in self._written.values() if o.waiting}:
            self._await(waited_for, until)

    def _push(self, index: int) -> None:
        outlet = self._written[index]
        to = self._to[outlet.edge.target]
        assert to.bell is not None
        while (written := outlet.written()) is not None:
            number, slot, nbytes = written
            self.moved_bytes += nbytes
            try:
                to.bell.write(_BELL.pack(to.sent, index, self._step, number, slot))
            except BrokenPipeError:
                raise self._gone(outlet.edge.target) from None
            to.sent += 1

    def _hear(self, rank: int) -> None:
        """Which slots of that rank are free again."""
        for index, slot in CREDIT.iter_unpack(_read(self._to[rank], CREDIT.size)):
            self._written[index].give_back(slot)

    # --- reading

    def receive(self, index: int, number: int, likes: Sequence[Like]) -> list[torch.Tensor]:
        """The values of one message, once it has come, each of its shape."""
        room, until = self._read[index], time.monotonic() + self._timeout
        key = self._step, index, number
        while key not in self._came:
            self._await({room.edge.source}, until)
        self._until_filled(index, self._came[key], until)
        slot = self._came.pop(key)
        values = room.tensors(slot, likes, self._given_back(index, slot))
        if room.is_full:
            # Whoever sends would wait for what is held here, and this rank for what it sends.
            values = [value.clone() for value in values]
        return values

    def _until_filled(self, index: int, slot: int, until: float) -> None:
        """What rang has written, where a processor wrote it."""

    def _given_back(self, index: int, slot: int) -> GiveBack:
        credit = self._from[self._read[index].edge.source].credit
        assert credit is not None
        return GiveBack(credit, index, slot)

    def _await(self, ranks: Collection[int], until: float) -> None:
        """For a moment, or something that is heard of any rank."""
        heard = self._heard(until)
        if not heard and time.monotonic() >= until:
            raise self._silent(ranks)
        self._listen(heard, ranks)
        self._push_all()

    def _push_all(self) -> None:
        """Messages that have waited for a slot."""
        for index, outlet in self._written.items():
            if outlet.waiting:
                self._push(index)

    def _listen(self, heard: Sequence[tuple[int, int]], ranks: Collection[int]) -> None:
        """To what is said by then; those that are waited for are to be there."""
        for number, _ in heard:
            rank, end = self._ends[number]
            if isinstance(end, From):
                self._answer(rank, end)
            else:
                self._hear(rank)
            if end.is_over:
                self._asked.unregister(number)
                del self._ends[number]
        for rank in ranks:
            if any(end.is_over for end in (self._from.get(rank), self._to.get(rank)) if end):
                raise self._gone(rank)

    def _heard(self, until: float) -> list[tuple[int, int]]:
        heard = self._watched() if self.watches else []
        return heard or self._asked.poll(1000 * max(0.0, until - time.monotonic()))

    def _watched(self) -> list[tuple[int, int]]:
        """What is heard within a moment: a core that sleeps takes some time to wake."""
        end = time.perf_counter() + WATCHED_SECONDS
        while not (heard := self._asked.poll(0)) and time.perf_counter() < end:
            pass
        return heard

    def _answer(self, rank: int, source: "From") -> None:
        for order, index, step, number, slot in _BELL.iter_unpack(_read(source, _BELL.size)):
            assert order == source.rung, f"message {order} of rank {rank} is not {source.rung}"
            source.rung += 1
            if step < self._step:  # of one that was broken off here before it was heard
                self._given_back(index, slot)()
            else:
                self._came[step, index, number] = slot

    def _silent(self, ranks: Collection[int]) -> RankFailed:
        among = [dist.get_global_rank(self._group, r) for r in sorted(ranks)]
        said = ", ".join(map(str, among))
        return RankFailed(
            f"nothing came from rank {said} within {format_seconds(self._timeout)}",
            expected="ranks that all take the same steps",
            remedy="look at what it does, or allow ranks to wait longer",
            rank=among[0],
        )

    def _gone(self, rank: int) -> RankFailed:
        return RankFailed(
            f"rank {dist.get_global_rank(self._group, rank)} is gone, and messages go "
            f"through {self.through}",
            expected="every rank to end its steps",
            remedy="start again from the last checkpoint, with --resume",
        )


class NotReachable(Exception):
    """What another rank made, or is to carry, is not where it can be had."""


@dataclass(frozen=True, kw_only=True)
class Offered:
    """What a rank has made for others, by the numbers of its open files: memory by edge, ends to
    ring at and to give back at by rank. On which cores it may be, and whether its control group has
    one for each rank."""

    host: str = ""
    pid: int = 0
    rooms: Mapping[int, int] = field(default_factory=dict)
    bells: Mapping[int, int] = field(default_factory=dict)
    heard: Mapping[int, int] = field(default_factory=dict)
    is_made: bool = False
    cores: frozenset[int] = frozenset()
    has_cores: bool = False

    @property
    def for_others(self) -> frozenset[int]:
        return frozenset((*self.rooms.values(), *self.bells.values(), *self.heard.values()))

    def memory(self, index: int, *, host: str) -> FileIO:
        """The memory that this rank made for the edge of that index."""
        path = self._path(self.rooms, index, host=host)
        if not str(path.readlink()).startswith("/memfd:"):
            raise NotReachable("what another rank offers as memory is none")
        return FileIO(path, "r+")

    def pipe(self, numbers: Mapping[int, int], rank: int, *, host: str) -> FileIO:
        """The end, for writing, of the pipe that this rank made for that one. Another rank says
        which file it is: a file that is no pipe must not even be opened for writing."""
        path = self._path(numbers, rank, host=host)
        if not path.is_fifo():
            raise NotReachable("what another rank offers as a pipe is none")
        return FileIO(path, "w")

    def _path(self, numbers: Mapping[int, int], key: int, *, host: str) -> Path:
        if self.host != host:
            raise NotReachable("another rank is on another host, or kept apart from this one")
        if key not in numbers:
            raise NotReachable("another rank made nothing for this one")
        return Path(f"/proc/{self.pid}/fd/{numbers[key]}")


O = TypeVar("O", bound=Offered)


@dataclass(slots=True)
class _End:
    """Of a pipe, where it is read; over when nobody holds the other."""

    file: FileIO
    is_over: bool = False


@dataclass(slots=True)
class From(_End):
    """Where a rank rings. ``credit`` is where it hears of slots, ``rung`` how often it has rung."""

    credit: FileIO | None = None
    rung: int = 0


@dataclass(slots=True)
class To(_End):
    """Where a rank says which slots are free; it is rung at its ``bell``, and has been so often."""

    bell: FileIO | None = None
    sent: int = 0


def host() -> str:
    """Where memory can be shared: one kernel, one view of its processes, and one network: what is
    kept apart by that stands for two hosts."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    spaces = Path("/proc/self/ns")
    return " ".join((boot, *(str((spaces / kind).readlink()) for kind in ("pid", "net"))))


def pipe(files: list[FileIO]) -> tuple[FileIO, FileIO]:
    """Both ends, of which this rank is to keep the first, which is read without waiting."""
    read, write = os.pipe()
    os.set_blocking(read, False)
    ends = FileIO(read, "r"), FileIO(write, "w")
    files += ends
    return ends


def _read(end: _End, size: int) -> bytes:
    said = end.file.read(size * _MANY)
    if said == b"":
        end.is_over = True
    return said or b""


def _closed(files: Sequence[FileIO]) -> None:
    for file in files:
        file.close()
