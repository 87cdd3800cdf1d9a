"""Messages between ranks of several hosts, each written once into the memory of who reads it.

A slot is there twice, where it is written and where it is read, both known to NIXL beforehand: RDMA
carries one over to the other without either processor. A process beside each rank sees to that
(nixl_proxy.py), and is to the rank what another rank of the same host is to it: it is rung, rings,
and gives slots back. Over TCP, where tests have it go, that process moves the bytes itself. Not for
what is sent, nor when.
"""

import contextlib
import json
import os
import select
import subprocess
import sys
import tempfile
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from io import FileIO
from pathlib import Path
from typing import IO, Any, ClassVar

import torch.distributed as dist

from steelyard.comm.network_interfaces import address_of
from steelyard.comm.shared_memory import nixl_proxy
from steelyard.comm.shared_memory.same_host import (
    From,
    NotReachable,
    Offered,
    SharedMemoryTransport,
    To,
    host,
    pipe,
)
from steelyard.comm.shared_memory.slots import Outlet, SharedRoom, mapped, memory_of
from steelyard.errors import RankFailed
from steelyard.ir.message_slots import SlotSpec
from steelyard.safe_text import printable

# To import NIXL, and for all hosts to reach one another.
_SECONDS = 60.0


def is_able() -> bool:
    """Whether this host could: NIXL is installed, and there is a device for RDMA."""
    return any(find_spec(wheel) is not None for wheel in nixl_proxy.WHEELS) and has_devices()


def has_devices() -> bool:
    """Of RDMA, that this process may use."""
    verbs = Path("/dev/infiniband").glob("uverbs*")
    return any(os.access(device, os.R_OK | os.W_OK) for device in verbs)


class RdmaTransport(SharedMemoryTransport):
    """As among ranks of one host; ``held_bytes`` is the room for what goes, too."""

    expects: ClassVar[str] = "hosts that reach one another by NIXL"
    through: ClassVar[str] = "slots that NIXL carries to other hosts"

    def __init__(self, edges: Sequence[SlotSpec], *, group: dist.ProcessGroup) -> None:
        super().__init__(edges, group=group)
        self.held_bytes += sum(edge.nbytes for edge in edges if edge.source == self._rank)
        # The carrier has this rank's core now and again.
        self.watches = False

    def close(self) -> None:
        if hasattr(self, "_carrier"):
            self._carrier.end()
        super().close()

    @property
    def _kind(self) -> type[Offered]:
        return _Reached

    def _made(self, files: list[FileIO]) -> "_Reached":
        """``theirs`` are the ends that the carrier has."""
        theirs: list[FileIO] = []
        edges: dict[int, dict[str, Any]] = {}
        for index, edge in enumerate(self._edges):
            if self._rank not in (edge.source, edge.target):
                continue
            files.append(memory := memory_of(edge.nbytes))
            if edge.target == self._rank:
                self._read[index] = SharedRoom(edge, memory)
            else:
                self._written[index] = Outlet(edge, mapped(memory, edge.nbytes))
            edges[index] = {
                "file": memory.fileno(),
                "nbytes": edge.nbytes,
                "count": edge.count,
                "slot_bytes": edge.slot_bytes,
                "used_bytes": max(1, edge.offsets[-1] + edge.sizes[-1]),
                "source": edge.source,
                "target": edge.target,
            }
        bells: dict[int, int] = {}
        given_back: dict[int, int] = {}
        rings: dict[int, int] = {}
        frees: dict[int, int] = {}
        for rank in sorted({room.edge.source for room in self._read.values()}):
            ring, rings[rank] = _coming(files, theirs)
            self._from[rank] = From(ring)
            self._from[rank].credit, given_back[rank] = _going(files, theirs)
        for rank in sorted({outlet.edge.target for outlet in self._written.values()}):
            free, frees[rank] = _coming(files, theirs)
            self._to[rank] = To(free)
            self._to[rank].bell, bells[rank] = _going(files, theirs)
        setup = {
            "rank": self._rank, "address": _own_address(), "edges": edges, "bells": bells,
            "given_back": given_back, "rings": rings, "frees": frees,
        }  # fmt: skip
        numbers = [edge["file"] for edge in edges.values()]
        self._carrier = _ProxyProcess([*numbers, *(end.fileno() for end in theirs)])
        weakref.finalize(self, self._carrier.end)
        for end in theirs:
            end.close()
        return _Reached(host=host(), is_made=True, carrier=self._carrier.told(setup))

    def _open(self, everyones: Sequence[Offered], files: list[FileIO], *, host: str) -> None:  # noqa: ARG002 - the carrier opens what there is
        carriers = {
            n: each.carrier for n, each in enumerate(everyones) if isinstance(each, _Reached)
        }
        self._carrier.told({rank: carriers[rank] for rank in {*self._from, *self._to}})

    def _gone(self, rank: int) -> RankFailed:
        error = super()._gone(rank)
        if self._carrier.is_gone and self._carrier.complaint != "nothing":
            error.happened += f"; its carrier here said {self._carrier.complaint}"
        return error


@dataclass(frozen=True, kw_only=True)
class _Reached(Offered):
    """What a rank's carrier says of itself to those of others."""

    carrier: Mapping[str, Any] = field(default_factory=dict)


class _ProxyProcess:
    """The process beside this rank, which holds the files of these ``numbers`` too."""

    def __init__(self, numbers: Sequence[int]) -> None:
        self._complaints: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115
        environ = {"NIXL_LOG_LEVEL": "WARN", **os.environ}
        interface = os.environ.get("GLOO_SOCKET_IFNAME")
        if interface and not has_devices():
            environ.setdefault("UCX_NET_DEVICES", interface)
        self._process = subprocess.Popen(
            [sys.executable, nixl_proxy.__file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._complaints,
            pass_fds=numbers,
            env=environ,
        )

    def told(self, what: Mapping[Any, Any]) -> dict[str, Any]:
        """What it answers; an error is what was in its way."""
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        try:
            stdin.write(json.dumps(what).encode() + b"\n")
            stdin.flush()
        except BrokenPipeError:
            raise self._failure("") from None
        asked = select.poll()
        asked.register(stdout, select.POLLIN)
        line = stdout.readline() if asked.poll(1000 * _SECONDS) else b""
        answer: dict[str, Any] = json.loads(line) if line else {"failed": ""}
        if "failed" in answer:
            raise self._failure(answer["failed"])
        return answer

    @property
    def is_gone(self) -> bool:
        return self._process.poll() is not None

    @property
    def complaint(self) -> str:
        self._complaints.seek(0)
        lines = self._complaints.read().decode(errors="replace").strip().splitlines()
        return printable((lines or ["nothing"])[-1])

    def _failure(self, said: str) -> NotReachable:
        return NotReachable(f"its carrier says {printable(said) or self.complaint}")

    def end(self) -> None:
        self._process.kill()
        self._process.wait()
        for file in (self._process.stdin, self._process.stdout, self._complaints):
            if file is not None:
                with contextlib.suppress(OSError):  # what it was not told any more
                    file.close()


def _coming(files: list[FileIO], theirs: list[FileIO]) -> tuple[FileIO, int]:
    """What this rank reads, and the number of the end at which the carrier writes."""
    made: list[FileIO] = []
    read, write = pipe(made)
    files.append(read)
    theirs.append(write)
    return read, write.fileno()


def _going(files: list[FileIO], theirs: list[FileIO]) -> tuple[FileIO, int]:
    """What this rank writes, and the number of the end at which the carrier reads."""
    read, write = os.pipe()
    ours, its = FileIO(write, "w"), FileIO(read, "r")
    files.append(ours)
    theirs.append(its)
    return ours, its.fileno()


def _own_address() -> str:
    """On the interface that ranks speak over; the loopback's where none was named."""
    return address_of(os.environ.get("GLOO_SOCKET_IFNAME", "")) or "127.0.0.1"
