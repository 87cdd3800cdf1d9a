"""Messages between ranks of several hosts, each written once into the reader's memory.

A slot exists twice, at the writer and at the reader, and both are registered with NIXL beforehand:
RDMA copies one to the other without either processor. A proxy process on each rank's host, the
carrier (nixl_proxy.py), drives these transfers. To its rank, the proxy behaves like another rank of
the same host: it sends and receives notifications and returns slots. Over TCP, as in the tests, the
proxy copies the bytes itself. Not for deciding which messages are sent, and when.
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
from steelyard.comm.shared_memory.slots import Outlet, SharedRoom, allocate_shared, map_memory
from steelyard.errors import RankFailed
from steelyard.ir.message_slots import SlotSpec
from steelyard.safe_text import printable

# The time limit for importing NIXL and for all hosts to connect.
_TIMEOUT_SECONDS = 60.0


def is_able() -> bool:
    """Return True if this host can use RDMA: NIXL is installed and there is a device."""
    return any(find_spec(wheel) is not None for wheel in nixl_proxy.WHEELS) and has_devices()


def has_devices() -> bool:
    """Return True if there is an RDMA device that this process may use."""
    verbs = Path("/dev/infiniband").glob("uverbs*")
    return any(os.access(device, os.R_OK | os.W_OK) for device in verbs)


class RdmaTransport(SharedMemoryTransport):
    """The transport between hosts; ``held_bytes`` includes the memory for outgoing messages."""

    expects: ClassVar[str] = "hosts that reach each other by NIXL"
    through: ClassVar[str] = "NIXL transfers to other hosts"

    def __init__(self, edges: Sequence[SlotSpec], *, group: dist.ProcessGroup) -> None:
        super().__init__(edges, group=group)
        self.held_bytes += sum(edge.nbytes for edge in edges if edge.source == self._rank)
        # The proxy shares this rank's core.
        self.polls = False

    def close(self) -> None:
        if hasattr(self, "_carrier"):
            self._carrier.end()
        super().close()

    @property
    def _offer_type(self) -> type[Offered]:
        return _Reached

    def _allocate(self, files: list[FileIO]) -> "_Reached":
        """Allocate the slots and pipes of this rank, and start its proxy process."""
        proxy_ends: list[FileIO] = []
        edges: dict[int, dict[str, Any]] = {}
        for index, edge in enumerate(self._edges):
            if self._rank not in (edge.source, edge.target):
                continue
            files.append(memory := allocate_shared(edge.nbytes))
            if edge.target == self._rank:
                self._rooms[index] = SharedRoom(edge, memory)
            else:
                self._outlets[index] = Outlet(edge, map_memory(memory, edge.nbytes))
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
        for rank in sorted({room.edge.source for room in self._rooms.values()}):
            ring, rings[rank] = _incoming_pipe(files, proxy_ends)
            self._from[rank] = From(ring)
            self._from[rank].credit, given_back[rank] = _outgoing_pipe(files, proxy_ends)
        for rank in sorted({outlet.edge.target for outlet in self._outlets.values()}):
            free, frees[rank] = _incoming_pipe(files, proxy_ends)
            self._to[rank] = To(free)
            self._to[rank].bell, bells[rank] = _outgoing_pipe(files, proxy_ends)
        setup = {
            "rank": self._rank, "address": _own_address(), "edges": edges, "bells": bells,
            "given_back": given_back, "rings": rings, "frees": frees,
        }  # fmt: skip
        numbers = [edge["file"] for edge in edges.values()]
        self._carrier = _ProxyProcess([*numbers, *(end.fileno() for end in proxy_ends)])
        weakref.finalize(self, self._carrier.end)
        for end in proxy_ends:
            end.close()
        return _Reached(host=host(), is_allocated=True, carrier=self._carrier.request(setup))

    def _open(self, offers: Sequence[Offered], files: list[FileIO], *, host: str) -> None:  # noqa: ARG002 - the proxy opens it
        carriers = {
            n: offer.carrier for n, offer in enumerate(offers) if isinstance(offer, _Reached)
        }
        self._carrier.request({rank: carriers[rank] for rank in {*self._from, *self._to}})

    def _ended_error(self, rank: int) -> RankFailed:
        error = super()._ended_error(rank)
        if self._carrier.has_ended and self._carrier.last_error != "nothing":
            error.happened += f"; its NIXL proxy here reported {self._carrier.last_error}"
        return error


@dataclass(frozen=True, kw_only=True)
class _Reached(Offered):
    """A rank's offer, with the connection data of its proxy for the other proxies."""

    carrier: Mapping[str, Any] = field(default_factory=dict)


class _ProxyProcess:
    """The proxy process of this rank, which inherits the file descriptors ``numbers``."""

    def __init__(self, numbers: Sequence[int]) -> None:
        self._stderr: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115
        environ = {"NIXL_LOG_LEVEL": "WARN", **os.environ}
        interface = os.environ.get("GLOO_SOCKET_IFNAME")
        if interface and not has_devices():
            environ.setdefault("UCX_NET_DEVICES", interface)
        self._process = subprocess.Popen(
            [sys.executable, nixl_proxy.__file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            pass_fds=numbers,
            env=environ,
        )

    def request(self, message: Mapping[Any, Any]) -> dict[str, Any]:
        """Send a request and return the answer; raise NotReachable if it failed."""
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        try:
            stdin.write(json.dumps(message).encode() + b"\n")
            stdin.flush()
        except BrokenPipeError:
            raise self._failed("") from None
        poller = select.poll()
        poller.register(stdout, select.POLLIN)
        line = stdout.readline() if poller.poll(1000 * _TIMEOUT_SECONDS) else b""
        answer: dict[str, Any] = json.loads(line) if line else {"failed": ""}
        if "failed" in answer:
            raise self._failed(answer["failed"])
        return answer

    @property
    def has_ended(self) -> bool:
        return self._process.poll() is not None

    @property
    def last_error(self) -> str:
        self._stderr.seek(0)
        lines = self._stderr.read().decode(errors="replace").strip().splitlines()
        return printable((lines or ["nothing"])[-1])

    def _failed(self, reason: str) -> NotReachable:
        return NotReachable(
            f"its NIXL proxy process failed: {printable(reason) or self.last_error}"
        )

    def end(self) -> None:
        self._process.kill()
        self._process.wait()
        for file in (self._process.stdin, self._process.stdout, self._stderr):
            if file is not None:
                with contextlib.suppress(OSError):  # requests that were not sent
                    file.close()


def _incoming_pipe(files: list[FileIO], proxy_ends: list[FileIO]) -> tuple[FileIO, int]:
    """Make a pipe from the proxy to this rank; return its read end and the proxy's descriptor."""
    ends: list[FileIO] = []
    read, write = pipe(ends)
    files.append(read)
    proxy_ends.append(write)
    return read, write.fileno()


def _outgoing_pipe(files: list[FileIO], proxy_ends: list[FileIO]) -> tuple[FileIO, int]:
    """Make a pipe from this rank to the proxy; return its write end and the proxy's descriptor."""
    read, write = os.pipe()
    own_end, proxy_end = FileIO(write, "w"), FileIO(read, "r")
    files.append(own_end)
    proxy_ends.append(proxy_end)
    return own_end, proxy_end.fileno()


def _own_address() -> str:
    """Return the address of the interface over which ranks communicate, or the loopback address if
    none is set.
    """
    return address_of(os.environ.get("GLOO_SOCKET_IFNAME", "")) or "127.0.0.1"
