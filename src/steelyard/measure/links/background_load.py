"""Others at work while something is measured here, as the other ranks of this machine will be.

Ranks share caches and the way to memory: beside others an operator takes longer than alone. So
there are as many processes as there are other ranks, each on its part of the cores, and each goes
through the operators of the step over and over, for as long as somebody here measures. They are
told so over pairs of sockets without a name, where nobody else can speak. Hosts may share a machine
too, unseen: those that wait for a plan are called to work by whoever knows them. Not for measuring:
see measure/operators/benchmark.py.
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
from steelyard.measure.operators.benchmark import Beside, busy_with

# To start, to make what operators read, and to call each once.
_SECONDS = 120.0
# Who has had nothing to do for so long ends: memory is for training.
_PATIENCE_SECONDS = 15.0
_LENGTH, _PIECE = struct.Struct("<Q"), 1 << 20
_IDLE = "ranks were measured beside ranks that had nothing to do: what they would do is too large"
_ALONE = "operators were measured while the other hosts had nothing to do"
# How other hosts come to work, where some wait for what is found here.
OTHER_HOSTS: ContextVar[Beside | None] = ContextVar("other hosts", default=None)
# How all that met come to measure what joins them, where a step lies like one here.
ALL_HOSTS: ContextVar[Callable[[torch.device], None] | None] = ContextVar("hosts", default=None)


class _Work(NamedTuple):
    graphs: tuple[Graph, ...]
    device: Device
    sharers: int
    keeps: bool


class _Line:
    """One end of a pair of sockets, over which JSON goes, each value with its length before it."""

    def __init__(self, end: socket.socket) -> None:
        self._end = end
        self.closed = False

    def send(self, what: Any) -> None:
        said = to_json(what).encode()
        self._end.sendall(_LENGTH.pack(len(said)) + said)

    def poll(self, seconds: float = 0.0) -> bool:
        """Something is to be read, or the other end is gone."""
        if self.closed:
            raise OSError("this end is closed")
        asked = select.poll()
        asked.register(self._end, select.POLLIN)
        return bool(asked.poll(1000 * seconds))

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
                raise EOFError("the other end is gone")
            found += part
        return bytes(found)


class BackgroundLoad:
    """The others of so many ranks here, or of as many on each of several ``hosts``. There are none
    beside a single rank, nor where this process is one of several itself: the others measure when
    it does."""

    def __init__(self, num_ranks: int, device: Device, *, hosts: int = 1) -> None:
        self.num_ranks, self._device = num_ranks, device
        # What is measured with nobody to call is another figure.
        self.hosts = hosts if OTHER_HOSTS.get() is not None or _is_a_rank() else 1
        self.notes: tuple[str, ...] = (_ALONE,) if hosts > self.hosts else ()
        self._others: dict[int, _Other] = {}
        self._work: _Work | None = None

    def is_given(self, graphs: Sequence[Graph]) -> None:
        """What to work on; the first that it is given."""
        if self._work is None:
            self._work = _Work(
                graphs=tuple(graphs),
                device=self._device,
                sharers=self.num_ranks,
                keeps=is_kept(),
            )

    @contextlib.contextmanager
    def at_work(self) -> Iterator[None]:
        if self.hosts > 1:
            called = OTHER_HOSTS.get() or contextlib.nullcontext
            with called():
                yield
            return
        if self.num_ranks == 1 or _is_a_rank():
            yield
            return
        assert self._work is not None, "nothing to work on"
        try:
            self._begin(self._work)
            yield
            for other in self._others.values():
                other.check()
        finally:
            for other in self._others.values():
                other.tell(False)

    def dismiss(self) -> None:
        """Until they are needed again."""
        for other in self._others.values():
            other.end()
        self._others.clear()

    def _begin(self, work: _Work) -> None:
        waited_for = list(range(1, self.num_ranks))
        while waited_for:
            new = [n for n in waited_for if n not in self._others or self._others[n].is_gone]
            self._others |= {rank: _Other(rank, work.sharers) for rank in new}
            for rank in new:
                self._others[rank].tell(work)
            for rank in waited_for:
                self._others[rank].tell(True)
            # One that had nothing to do may have gone at that moment.
            waited_for = [rank for rank in waited_for if not self._others[rank].has_begun()]
        if any(other.is_idle for other in self._others.values()):
            self.notes = (_IDLE,)


def _is_a_rank() -> bool:
    world = os.environ.get("WORLD_SIZE", "")
    return dist.is_initialized() or (world.isdecimal() and int(world) > 1)


class _Other:
    """A process that works while it is told to, and ends when nobody tells it any more."""

    def __init__(self, rank: int, num_ranks: int) -> None:
        self.is_idle = False
        own, theirs = socket.socketpair()
        self._line = _Line(own)
        self._complaints: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", __name__, str(theirs.fileno()), str(_PATIENCE_SECONDS)],
                stdout=subprocess.DEVNULL,
                stderr=self._complaints,
                pass_fds=[theirs.fileno()],
            )
        os.sched_setaffinity(self._process.pid, cores_of(rank, num_ranks))
        self.end = weakref.finalize(self, _end, self._process, self._line, self._complaints)

    @property
    def is_gone(self) -> bool:
        return self._process.poll() is not None

    def tell(self, what: "_Work | bool") -> None:
        """What to work on; and then when to work, and when to rest."""
        with contextlib.suppress(OSError):  # it is gone, which is seen where it is waited for
            self._line.send(what)

    def has_begun(self) -> bool:
        """Once it has; False if it went for want of work before it was told of some."""
        try:
            if not self._line.poll(_SECONDS):
                raise TimeoutError(f"nothing within {_SECONDS:.0f} s")
            self.is_idle = not self._line.recv()
        except (OSError, EOFError) as error:
            if isinstance(error, TimeoutError):
                self._process.kill()
            if self._process.wait() == 0:
                return False
            raise self._failure(str(error)) from None
        return True

    def check(self) -> None:
        """It is at work still."""
        if self.is_gone:
            raise self._failure("")

    def _failure(self, why: str) -> RunFailed:
        self._complaints.seek(0)
        lines = self._complaints.read().decode(errors="replace").strip().splitlines()
        said = (lines or [why or f"nothing, and ended with {self._process.returncode}"])[-1]
        return RunFailed(
            f"no rank could be measured beside others: one of them says {said[:120]}",
            expected="a process for each rank of this machine, at work while one measures",
            remedy="free memory, or plan for fewer ranks",
        )


def _end(process: "subprocess.Popen[bytes]", line: _Line, complaints: IO[bytes]) -> None:
    process.kill()
    process.wait()
    line.close()
    complaints.close()


def main(line: _Line, patience: float) -> None:
    """Told by ``line`` what to work on, when to, and when to rest."""
    work = _Work(*line.recv())
    if work.keeps:
        keep_freed_memory()
    torch.set_num_threads(work.device.threads)
    carry_out = busy_with(work.graphs, work.device, sharers=work.sharers)
    while line.poll(patience):
        if line.recv():
            line.send(carry_out is not None)
            if carry_out is not None:
                carry_out(line.poll)


if __name__ == "__main__":
    with contextlib.suppress(EOFError, ConnectionError):  # whoever measured is gone
        main(_Line(socket.socket(fileno=int(sys.argv[1]))), float(sys.argv[2]))
