"""Offload memory: a file that tensors are written to and read from while the device computes.

Transfers are throttled to the declared rate and bypass the page cache; otherwise the file would be
as fast as main memory. The file never has a name, so it disappears however the process ends. The
program determines which tensors are transferred, and when.
"""

import ctypes
import mmap
import os
import queue
import threading
import time
import weakref
from collections.abc import Sequence
from concurrent.futures import CancelledError, Future, wait
from itertools import accumulate
from pathlib import Path

import torch

from steelyard.errors import BadInput, RunFailed
from steelyard.hardware.cluster import OFFLOAD_PIECE_BYTES, OffloadMemory, offload_room
from steelyard.hardware.host_os import filesystem_of
from steelyard.units import format_bytes, format_seconds

# A transfer counts as stalled if a piece takes this many times the declared time, and at least this
# long.
_PATIENCE, _LEAST_PATIENCE_SECONDS = 20.0, 60.0
_IN_MEMORY = frozenset({"tmpfs", "ramfs", "devtmpfs", "hugetlbfs"})


class OffloadFile:
    """Space in one file, and a transfer thread for each direction. ``waited_seconds`` is the total
    time that the device has waited for transfers; ``moved_bytes`` is the total of both directions.
    """

    def __init__(self, offload_memory: OffloadMemory) -> None:
        self.offload_memory = offload_memory
        self.waited_seconds = 0.0
        self.moved_bytes = 0
        self._file = _open(offload_memory)
        self._size = self._permanent_bytes = 0
        self._out = _Lane(os.dup(self._file), offload_memory.bytes_per_second, name="offload out")
        self._in = _Lane(os.dup(self._file), offload_memory.bytes_per_second, name="offload in")
        self._close = weakref.finalize(self, _close_all, self._file, self._out, self._in)

    def close(self) -> None:
        self._close()

    @property
    def busy_seconds(self) -> float:
        """Total transfer time of both directions."""
        return self._out.busy_seconds + self._in.busy_seconds

    def shared(self, sizes: Sequence[int]) -> list[int]:
        """Return offsets of space for the values of one program. Programs that run at other times
        may get the same space.
        """
        rounded = [offload_room(size) for size in sizes]
        total = self._permanent_bytes + sum(rounded)
        if total > self.offload_memory.size_bytes:
            raise BadInput(
                f"the plan offloads {format_bytes(total)} to {self.offload_memory.folder}, which "
                f"may hold {format_bytes(self.offload_memory.size_bytes)}",
                expected="offload memory of the size that the plan was made for",
                remedy="allow a larger size, or plan again",
            )
        if total > self._size:
            self._reserve(total)
        return list(accumulate(rounded[:-1], initial=self._permanent_bytes))

    def reserve_permanent(self, sizes: Sequence[int]) -> list[int]:
        """Return offsets of space that is never given to anything else. Call this before
        ``shared``."""
        offsets = self.shared(sizes) if sizes else []
        self._permanent_bytes += sum(map(offload_room, sizes))
        return offsets

    def mapped(self, offset: int, nbytes: int) -> torch.Tensor:
        """Return the bytes at ``offset`` as a memory-mapped tensor, whose pages the system may
        evict."""
        pages = mmap.mmap(self._file, offload_room(nbytes), offset=offset)
        return torch.frombuffer(pages, dtype=torch.uint8, count=nbytes)

    def _reserve(self, total: int) -> None:
        try:
            os.posix_fallocate(self._file, 0, total)
        except OSError as error:
            raise _unusable(
                self.offload_memory, f"cannot hold {format_bytes(total)}", error
            ) from error
        self._size = total

    def send(self, offset: int, x: torch.Tensor) -> "Future[None]":
        self.moved_bytes += x.nbytes
        return self._out.start(offset, x, is_write=True)

    def fetch(self, offset: int, x: torch.Tensor) -> "Future[None]":
        self.moved_bytes += x.nbytes
        return self._in.start(offset, x, is_write=False)

    def await_sent(self, transfer: "Future[None]") -> None:
        self._wait(transfer, self._out)

    def await_fetched(self, transfer: "Future[None]") -> None:
        self._wait(transfer, self._in)

    def _wait(self, transfer: "Future[None]", lane: "_Lane") -> None:
        """Wait for a transfer, however many are queued before it. Raise RunFailed if no piece of
        any transfer completes for too long.
        """
        begin = time.perf_counter()
        declared = OFFLOAD_PIECE_BYTES / self.offload_memory.bytes_per_second
        patience = max(_LEAST_PATIENCE_SECONDS, _PATIENCE * declared)
        while not transfer.done():
            wait((transfer,), timeout=patience)
            stalled_seconds = time.perf_counter() - lane.progressed
            if not transfer.done() and stalled_seconds >= patience:
                raise RunFailed(
                    f"offload memory in {self.offload_memory.folder} stalls: "
                    f"{format_bytes(OFFLOAD_PIECE_BYTES)} were not transferred within "
                    f"{format_seconds(stalled_seconds)}",
                    expected=f"~{format_seconds(declared)}, at the declared rate",
                    remedy="use another folder for offload memory, or plan without it",
                )
        self.waited_seconds += time.perf_counter() - begin
        error = transfer.exception()
        if isinstance(error, OSError):
            raise RunFailed(
                f"offload memory in {self.offload_memory.folder} failed: {error.strerror or error}",
                expected="a disk that reads and writes without errors",
                remedy="use another folder for offload memory, or plan without it",
            ) from error
        if error is not None:
            raise error


_Job = tuple["Future[None]", int, list[torch.Tensor], bool]


class _Lane:
    """One direction: a thread that transfers one tensor after another, no faster than the
    declared rate.

    The thread has a file descriptor of its own and closes it itself. If another thread closed it
    during a transfer, its number could belong to another file when the next piece is due. The
    thread is a daemon, so a disk that never answers does not keep the process from ending.
    """

    def __init__(self, file: int, bytes_per_second: float, *, name: str) -> None:
        self._file = file
        self._rate = bytes_per_second
        # Aligned to pages, as O_DIRECT requires.
        self._buffer = mmap.mmap(-1, OFFLOAD_PIECE_BYTES)
        self._view = memoryview(self._buffer)
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self._buffer))
        self.busy_seconds = 0.0
        self.progressed = time.perf_counter()
        self._process = os.getpid()
        self._is_stopped = threading.Event()
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        threading.Thread(target=self._serve, name=name, daemon=True).start()

    def start(self, offset: int, x: torch.Tensor, *, is_write: bool) -> "Future[None]":
        if os.getpid() != self._process:
            raise RunFailed(
                "offload memory was opened before this process was forked, so its threads do not "
                "run here",
                expected="steps in the process in which the plan was applied",
                remedy="apply the plan here: plan.apply(model)",
            )
        if self._is_stopped.is_set():
            raise RunFailed(
                "offload memory was closed, but a step needs it",
                expected="offload memory that is open during steps",
                remedy="apply the plan again: plan.apply(model)",
            )
        transfer: Future[None] = Future()
        # The thread pops the tensor from this list before it completes the future, so that it no
        # longer has a reference to the tensor at that time.
        self._jobs.put((transfer, offset, [x], is_write))
        return transfer

    def stop(self) -> None:
        self._is_stopped.set()
        self._jobs.put(None)

    def _serve(self) -> None:
        while (job := self._jobs.get()) is not None:
            transfer, offset, holder, is_write = job
            del job
            try:
                self._move(offset, holder, is_write)
            except Exception as error:  # noqa: BLE001 - raised by the waiting thread
                transfer.set_exception(error)
            else:
                transfer.set_result(None)
        os.close(self._file)

    def _move(self, offset: int, holder: list[torch.Tensor], is_write: bool) -> None:
        x = holder.pop()
        address, nbytes = x.data_ptr(), x.nbytes
        begin = self.progressed = time.perf_counter()
        for done in range(0, nbytes, OFFLOAD_PIECE_BYTES):
            if self._is_stopped.is_set():
                raise CancelledError
            size = min(OFFLOAD_PIECE_BYTES, nbytes - done)
            pages = self._view[: offload_room(size)]
            if is_write:
                ctypes.memmove(self._address, address + done, size)
                _check_complete(os.pwrite(self._file, pages, offset + done), len(pages))
            else:
                _check_complete(os.preadv(self._file, [pages], offset + done), len(pages))
                ctypes.memmove(address + done, self._address, size)
            ahead_seconds = begin + (done + size) / self._rate - time.perf_counter()
            if ahead_seconds > 0:
                self._is_stopped.wait(ahead_seconds)
            self.progressed = time.perf_counter()
        self.busy_seconds += time.perf_counter() - begin


def _check_complete(transferred: int, wanted: int) -> None:
    if transferred != wanted:
        raise OSError(f"transferred {transferred} of {wanted} bytes")


def _open(offload_memory: OffloadMemory) -> int:
    folder = Path(offload_memory.folder)
    if not folder.is_dir():
        raise BadInput(
            f"the folder {offload_memory.folder} for offload memory does not exist",
            expected="a folder on a disk with free space",
            remedy="create it, or use another folder",
        )
    kind = filesystem_of(folder)
    if kind in _IN_MEMORY:
        raise BadInput(
            f"{offload_memory.folder} is on {kind}, which is main memory, not a disk",
            expected="a folder on a disk",
            remedy="use another folder",
        )
    try:
        # O_TMPFILE: the file has no name, so nothing is left behind, however this process ends.
        return os.open(folder, os.O_TMPFILE | os.O_RDWR | os.O_DIRECT, 0o600)
    except OSError as error:
        raise _unusable(offload_memory, "cannot be used", error) from error


def _unusable(offload_memory: OffloadMemory, problem: str, error: OSError) -> BadInput:
    return BadInput(
        f"the offload memory in {offload_memory.folder} {problem}: {error.strerror}",
        expected="a writable folder on a disk with free space that supports O_TMPFILE and O_DIRECT",
        remedy="use another folder, or plan without offload memory",
    )


def _close_all(file: int, *lanes: _Lane) -> None:
    for lane in lanes:
        lane.stop()
    os.close(file)
