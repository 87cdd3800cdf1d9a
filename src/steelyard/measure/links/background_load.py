"""Background load during the measurement of operators, similar to that of other ranks in a run.

Ranks share caches and memory bandwidth, so an operator takes longer if other ranks are at work.
While something is measured, one process for each other rank therefore repeats the operators of the
step on that rank's share of the cores. These processes are controlled over anonymous socket pairs,
which no other process can access. Hosts may also share a machine without knowing it, so
``OTHER_HOSTS`` makes hosts that wait for a plan work too. Not for measuring: see
measure/operators/benchmark.py.
"""

import contextlib
import os
import select
import socket
import struct
import subprocess
import sys
import tempfile
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from typing import IO, Any, NamedTuple

import torch
import torch.distributed as dist

from steelyard.errors import RunFailed
from steelyard.hardware.cluster import Device
from steelyard.hardware.host_os import cores_of
from steelyard.ir.graph import Graph
from steelyard.measure.links.json_graph import from_json, to_json
from steelyard.measure.malloc import is_kept, keep_freed_memory
from steelyard.measure.operators.benchmark import BackgroundWork, make_load

# The time limit for a process to start, to prepare the arguments of operators, and to call each
# operator once.
_SECONDS = 120.0
# A process that is idle for this long ends: memory is needed for training.
_PATIENCE_SECONDS = 15.0
_LENGTH, _PIECE = struct.Struct("<Q"), 1 << 20
_IDLE = (
    "ranks were measured while the other ranks were idle, because their load does not fit in memory"
)
_ALONE = "operators were measured while the other hosts were idle"
# Puts the other hosts to work, if some of them wait for the measurements of this host.
OTHER_HOSTS: ContextVar[BackgroundWork | None] = ContextVar("other hosts", default=None)
# Makes all hosts that have met measure the links between them, from the given device.
ALL_HOSTS: ContextVar[Callable[[torch.device], None] | None] = ContextVar("hosts", default=None)


class _Work(NamedTuple):
    graphs: tuple[Graph, ...]
    device: Device
    sharers: int
    keeps_freed: bool


class _JsonSocket:
    """One end of a socket pair that carries JSON values, each prefixed with its length."""

    def __init__(self, end: socket.socket) -> None:
        self._end = end
        self.closed = False

    def send(self, value: Any) -> None:
        encoded = to_json(value).encode()
        self._end.sendall(_LENGTH.pack(len(encoded)) + encoded)

    def poll(self, seconds: float = 0.0) -> bool:
        """True if a value can be read or the other end is closed."""
        if self.closed:
            raise OSError("this end of the connection is closed")
        poller = select.poll()
        poller.register(self._end, select.POLLIN)
        return bool(poller.poll(1000 * seconds))

    def recv(self) -> Any:
        (length,) = _LENGTH.unpack(self._read(_LENGTH.size))
        return from_json(self._read(length))

    def close(self) -> None:
        self.closed = True
        self._end.close()

    def _read(self, size: int) -> bytes:
        found = bytearray()
        while len(found) < size:
            part = self._end.recv(min(size - len(found), _PIECE))
            if not part:
                raise EOFError("the other end of the connection is closed")
            found += part
        return bytes(found)


class BackgroundLoad:
    """The load of the other ranks of this machine, or of all ranks of the other ``hosts``.

    A single rank has no such load. If this process itself is one of several ranks, no processes are
    started, because the other ranks measure at the same time.
    """

    def __init__(self, num_ranks: int, device: Device, *, hosts: int = 1) -> None:
        self.num_ranks, self._device = num_ranks, device
        # Measurements without load from other hosts are cached as those of a single host.
        self.hosts = hosts if OTHER_HOSTS.get() is not None or _is_a_rank() else 1
        self.notes: tuple[str, ...] = (_ALONE,) if hosts > self.hosts else ()
        self._processes: dict[int, _LoadProcess] = {}
        self._work: _Work | None = None

    def is_given(self, graphs: Sequence[Graph]) -> None:
        """Set the graphs whose operators are the load; only the first call has an effect."""
        if self._work is None:
            self._work = _Work(
                graphs=tuple(graphs),
                device=self._device,
                sharers=self.num_ranks,
                keeps_freed=is_kept(),
            )

    @contextlib.contextmanager
    def at_work(self) -> Iterator[None]:
        if self.hosts > 1:
            work_on_hosts = OTHER_HOSTS.get() or contextlib.nullcontext
            with work_on_hosts():
                yield
            return
        if self.num_ranks == 1 or _is_a_rank():
            yield
            return
        assert self._work is not None, "the load has no operators"
        try:
            self._begin(self._work)
            yield
            for process in self._processes.values():
                process.check()
        finally:
            for process in self._processes.values():
                process.tell(False)

    def dismiss(self) -> None:
        """End the processes; they are started again when the load is needed."""
        for process in self._processes.values():
            process.end()
        self._processes.clear()

    def _begin(self, work: _Work) -> None:
        waiting = list(range(1, self.num_ranks))
        while waiting:
            new = [n for n in waiting if n not in self._processes or self._processes[n].has_ended]
            self._processes |= {rank: _LoadProcess(rank, work.sharers) for rank in new}
            for rank in new:
                self._processes[rank].tell(work)
            for rank in waiting:
                self._processes[rank].tell(True)
            # An idle process may have ended by itself just now; it is started again.
            waiting = [rank for rank in waiting if not self._processes[rank].has_begun()]
        if any(process.is_idle for process in self._processes.values()):
            self.notes = (_IDLE,)


def _is_a_rank() -> bool:
    world = os.environ.get("WORLD_SIZE", "")
    return dist.is_initialized() or (world.isdecimal() and int(world) > 1)


class _LoadProcess:
    """A process that works on request, and ends if it gets no request for some time."""

    def __init__(self, rank: int, num_ranks: int) -> None:
        self.is_idle = False
        parent_end, child_end = socket.socketpair()
        self._socket = _JsonSocket(parent_end)
        self._stderr_file: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115
        with child_end:
            self._process = subprocess.Popen(
                [sys.executable, "-m", __name__, str(child_end.fileno()), str(_PATIENCE_SECONDS)],
                stdout=subprocess.DEVNULL,
                stderr=self._stderr_file,
                pass_fds=[child_end.fileno()],
            )
        os.sched_setaffinity(self._process.pid, cores_of(rank, num_ranks))
        self.end = weakref.finalize(self, _end, self._process, self._socket, self._stderr_file)

    @property
    def has_ended(self) -> bool:
        return self._process.poll() is not None

    def tell(self, request: "_Work | bool") -> None:
        """Send the work; afterwards, send True to start working or False to pause."""
        with contextlib.suppress(OSError):  # the process has ended, which has_begun reports
            self._socket.send(request)

    def has_begun(self) -> bool:
        """Wait until it works; return False if it ended as idle before it received work."""
        try:
            if not self._socket.poll(_SECONDS):
                raise TimeoutError(f"no answer within {_SECONDS:.0f} s")
            self.is_idle = not self._socket.recv()
        except (OSError, EOFError) as error:
            if isinstance(error, TimeoutError):
                self._process.kill()
            if self._process.wait() == 0:
                return False
            raise self._failure(str(error)) from None
        return True

    def check(self) -> None:
        """Raise RunFailed if the process has ended."""
        if self.has_ended:
            raise self._failure("")

    def _failure(self, why: str) -> RunFailed:
        self._stderr_file.seek(0)
        lines = self._stderr_file.read().decode(errors="replace").strip().splitlines()
        last_line = (lines or [why or f"no message, exit code {self._process.returncode}"])[-1]
        return RunFailed(
            f"no rank could be measured under load: a load process reported {last_line[:120]}",
            expected="a load process for each other rank of this machine",
            remedy="free memory, or plan for fewer ranks",
        )


def _end(
    process: "subprocess.Popen[bytes]", connection: _JsonSocket, stderr_file: IO[bytes]
) -> None:
    process.kill()
    process.wait()
    connection.close()
    stderr_file.close()


def main(connection: _JsonSocket, patience: float) -> None:
    """Read the work from ``connection``, then work and pause on request."""
    work = _Work(*connection.recv())
    if work.keeps_freed:
        keep_freed_memory()
    torch.set_num_threads(work.device.threads)
    run_load = make_load(work.graphs, work.device, sharers=work.sharers)
    while connection.poll(patience):
        if connection.recv():
            connection.send(run_load is not None)
            if run_load is not None:
                run_load(connection.poll)


if __name__ == "__main__":
    with contextlib.suppress(EOFError, ConnectionError):  # the measuring process has ended
        main(_JsonSocket(socket.socket(fileno=int(sys.argv[1]))), float(sys.argv[2]))
