"""Ranks that use a memory file in place of a GPU, to test the communication between their hosts.

Its work is done a moment after it was launched, as on a GPU. Not for the GPU itself: see
test_gpus.py.
"""

from __future__ import annotations

import json
import mmap
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from io import FileIO
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist

from steelyard.comm.json_gather import gathered
from steelyard.errors import BadInput
from steelyard.comm.shared_memory import transport as shared_memory_transport
from steelyard.comm.shared_memory.gpu_memory import Event
from tests.system.dist import slots

BEHIND_SECONDS = 0.002


class StoodIn:
    """An event is the time, in a file that both ranks map, at which its work is done."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.name = device, f"GPU of {os.getpid()}"
        self._files: list[FileIO] = []

    def reaches(self, name: str) -> bool:
        return name.startswith("GPU of ")

    def memory(self, nbytes: int) -> torch.Tensor:
        return self._mapped(self._file(nbytes))

    def views(self, memory: torch.Tensor, group: dist.ProcessGroup) -> list[torch.Tensor]:
        own = os.getpid(), self._files[0].fileno(), memory.nbytes
        everyones = gathered(own, tuple[int, int, int], group=group)
        assert {nbytes for *_, nbytes in everyones} == {memory.nbytes}, "they are not even"
        opened = [FileIO(f"/proc/{pid}/fd/{number}", "r+") for pid, number, _ in everyones]
        self._files += opened
        return [self._mapped(file) for file in opened]

    def lent(self, owner: object, address: int, nbytes: int) -> torch.Tensor:
        class Lent:
            __array_interface__ = {
                "shape": (nbytes,), "typestr": "|u1", "data": (address, False), "version": 3
            }  # fmt: skip

        lent = Lent()
        lent.owner = owner  # type: ignore[attr-defined]
        return torch.from_numpy(np.asarray(lent))

    def event(self) -> tuple[Event, str]:
        file = self._file(8)
        return _Moment(self._mapped(file)), f"{os.getpid()} {file.fileno()}"

    def opened(self, handle: str) -> Event:
        pid, number = handle.split()
        self._files.append(file := FileIO(f"/proc/{pid}/fd/{number}", "r+"))
        return _Moment(self._mapped(file))

    def _file(self, nbytes: int) -> FileIO:
        file = FileIO(os.memfd_create("stood in"), "r+")
        os.ftruncate(file.fileno(), nbytes)
        self._files.append(file)
        return file

    def _mapped(self, file: FileIO) -> torch.Tensor:
        nbytes = os.fstat(file.fileno()).st_size
        return torch.frombuffer(mmap.mmap(file.fileno(), nbytes), dtype=torch.uint8)


class _Moment:
    def __init__(self, memory: torch.Tensor) -> None:
        self._over = memory.view(torch.float64)

    def record(self) -> None:
        self._over.fill_(time.monotonic() + BEHIND_SECONDS)

    def query(self) -> bool:
        return time.monotonic() >= float(self._over)


@contextmanager
def _standing_in() -> Iterator[None]:
    """Pretend that a device is a GPU, while its tensors are ordinary ones."""
    with (
        mock.patch.object(shared_memory_transport, "Gpu", StoodIn),
        mock.patch.object(slots, "here", lambda: torch.device("cuda", 0)),
    ):
        yield


def every(rank: int) -> dict[str, Any]:
    with _standing_in():
        return {
            "exchanged": slots.exchanged(rank),
            "made there": slots.made_there(rank),
            "broken off": slots.broken_off(rank),
            "apart": _apart(rank),
            "refused": _refused(rank),
        }


def _apart(rank: int) -> list[bool]:
    """Check that a message is not read before it is written, and a slot not written before it
    was read. With a single slot, the message is copied and the slot is returned too early for
    this check."""
    own = slots.made([slots.edge(0, 4, slots=2)])
    own.begin()
    like = [((1,), torch.int32)]
    if rank == 0:
        times = [time.monotonic()]
        for number in range(3):
            own.send(0, number, [torch.tensor([number], dtype=torch.int32)])
        own.settle()
    else:
        first = own.receive(0, 0, like)
        times = [time.monotonic()]
        del first  # from here on the storage may be written again
        for number in (1, 2):
            assert own.receive(0, number, like)[0].tolist() == [number]
    times.append(time.monotonic())
    (sent, settled), (came, _) = gathered(times, list[float])
    own.close()
    return [came - sent >= BEHIND_SECONDS, settled - came >= BEHIND_SECONDS]


def _refused(rank: int) -> dict[str, str]:
    """Simulate a fault on rank 1 alone; both ranks report it."""
    faults = {
        "no memory": mock.patch.object(StoodIn, "memory", side_effect=RuntimeError("full\nby 2")),
        "out of reach": mock.patch.object(StoodIn, "reaches", lambda *_: False),
    }
    said = {}
    for name, fault in faults.items():
        if rank == 1:
            fault.start()
        try:
            slots.made([slots.edge(0, 64), slots.edge(1, 64)])
            said[name] = "nothing"
        except BadInput as error:
            said[name] = str(error)
        if rank == 1:
            fault.stop()
    return said


def main(folder: str, rank: int) -> None:
    """End rank 1 after it has notified the reader of work that its GPU has not done yet."""
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2,
        timeout=timedelta(seconds=60),
    )  # fmt: skip
    with _standing_in():
        own = slots.made([slots.edge(1, 4), slots.edge(0, 64)])
        own.begin()
        if rank == 1:
            with mock.patch.object(_Moment, "record", _never):
                own.send(0, 0, [torch.ones(1)])
            os.kill(os.getpid(), signal.SIGKILL)
        print(json.dumps(slots.said_by_whom_it_left(own, [((1,), torch.float32)])))
        sys.stdout.flush()
        os._exit(0)


def _never(moment: _Moment) -> None:
    moment._over.fill_(float("inf"))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
