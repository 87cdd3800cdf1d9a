"""Messages through memory that two ranks share: their values, their memory, and refusals.

Not for checking the results: the tests do that.
"""

from __future__ import annotations

import errno
import gc
import json
import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from steelyard.errors import BadInput, RankFailed
from steelyard.ir.message_slots import SlotSpec
from steelyard.comm.shared_memory import same_host as pinned
from steelyard.comm.shared_memory.same_host import SharedMemoryTransport
from steelyard.comm.shared_memory.transport import shared_memory_transport
from steelyard.comm.shared_memory.slots import Like
from steelyard.measure.operators.memory import meter_once
from steelyard.trades import shared_memory_transfer  # noqa: F401 - a message names it

MESSAGES = 40


def made(edges: Sequence[SlotSpec]) -> SharedMemoryTransport:
    """Make the transport among all ranks, on the default device of tensors."""
    if here().type == "cpu":
        return SharedMemoryTransport(edges, group=_everyone())
    return shared_memory_transport(edges, group=_everyone(), device=here())


def here() -> torch.device:
    where = torch.get_default_device()
    return where if where.type == "cpu" else torch.device("cuda", torch.cuda.current_device())


def edge(source: int, *sizes: int, slots: int = 2, holds_all: bool = False) -> SlotSpec:
    return SlotSpec(source=source, target=1 - source, sizes=sizes, count=slots, holds_all=holds_all)


def _of_all_kinds(number: int) -> list[torch.Tensor]:
    drawn = torch.Generator().manual_seed(number)
    x = torch.randn(5, 7, generator=drawn, device="cpu").to(torch.get_default_device())
    return [
        x.t(), x.bfloat16(), x > 0, torch.empty(3, 0), x.double().sum(), (100 * x).to(torch.int64)
    ]  # fmt: skip


def exchanged(rank: int) -> dict[str, Any]:
    """Send more messages than there are slots before any is read, read the last one first, and
    keep two. Return the messages that arrived changed, and the files left open."""
    own = _of_all_kinds(0)
    likes = [(x.shape, x.dtype) for x in own]
    edges = [edge(source, *(x.nbytes for x in own)) for source in (0, 1)]
    made(edges).close()  # files that libraries open for themselves stay open
    gc.collect()
    begun = open_files()
    slots = made(edges)
    kept, wrong = [], []
    for step in range(3):
        slots.begin()
        numbers = [MESSAGES * step + n for n in range(MESSAGES)]
        for number in numbers:
            slots.send(rank, number, _of_all_kinds(number))
        for number in numbers:
            came = slots.receive(1 - rank, number, likes)
            sent = _of_all_kinds(number)
            wrong += [number for a, b in zip(came, sent, strict=True) if not torch.equal(a, b)]
            if number % MESSAGES in (0, 1):
                kept.append((number, came))
        slots.settle()
    changed = [n for n, came in kept if not all(map(torch.equal, came, _of_all_kinds(n)))]
    dist.barrier()
    slots.close()
    moved, held = slots.moved_bytes, slots.held_bytes
    del slots, kept, came
    gc.collect()
    return {
        "wrong": wrong,
        "changed": changed,
        "moved": moved == 3 * MESSAGES * sum(x.nbytes for x in own),
        "held": held == sum(e.nbytes for e in edges if e.target == rank),
        "left open": sorted(open_files() - begun),
    }


def kept_away(rank: int) -> dict[str, Any]:
    """Return the bytes that a step allocates for messages, which should be none."""
    x = torch.randn(1 << 16)
    slots = made([edge(0, x.nbytes), edge(1, x.nbytes)])
    like = [(x.shape, x.dtype)]

    def step() -> None:
        slots.begin()
        for number in range(8):
            slots.send(rank, number, [x])
            slots.receive(1 - rank, number, like)
        slots.settle()

    step()
    metered = meter_once(step, device=here())
    dist.barrier()
    return {"peak": metered.peak_bytes, "left": metered.left_bytes}


def made_there(rank: int) -> dict[str, Any]:
    """Send messages of two values, one of which rank 0 computes in its slot.

    Return what arrived, whether anything was copied, and when no slot was free.
    """
    sizes = (64, 4)
    slots = made([edge(0, *sizes)])
    likes = [((16,), torch.float32), ((1,), torch.int32)]
    places: dict[str, bool] = {}

    def number_of(place: torch.Tensor | None, number: int) -> torch.Tensor:
        return torch.full((16,), float(number), out=place)

    def send(number: int, value: torch.Tensor) -> None:
        slots.send(0, number, [value, torch.tensor([number], dtype=torch.int32)])

    def sent() -> None:
        place = slots.place(0, 0, 0, likes[0])
        places["at first"] = place is not None
        places["of another message"] = slots.place(0, 1, 0, likes[0]) is not None
        with mock.patch.object(torch.Tensor, "copy_", side_effect=AssertionError):
            slots.send(0, 0, [number_of(place, 0), torch.empty(0, dtype=torch.int32)])
        place = slots.place(0, 1, 0, likes[0])  # this takes the last slot
        send(2, number_of(None, 2))  # this message overtakes the first, and no slot is left for it
        places["of its second value"] = slots.place(0, 1, 1, likes[1]) is not None
        send(1, number_of(place, 1))
        send(3, number_of(slots.place(0, 3, 0, likes[0]), 3))
        slots.settle()

    slots.begin()
    came = []
    if rank == 0:
        sent()
    else:
        came = [
            [x.tolist() for x in slots.receive(0, n, [likes[0], ((min(n, 1),), torch.int32)])]
            for n in range(4)
        ]
    dist.barrier()
    slots.begin()
    if rank == 0:  # a message is abandoned while two are computed
        slots.place(0, 0, 0, likes[0])
        slots.begin()
        until = time.monotonic() + 10
        while len(slots._outlets[0].free) < 2 and time.monotonic() < until:
            slots._read_credits(1)  # credits from another host arrive after a moment
            slots._outlets[0].refresh_free()  # and so do those from a GPU
        places["after one that was given up"] = len(slots._outlets[0].free) == 2
    dist.barrier()
    expected = [[[float(n)] * 16, [n] if n else []] for n in range(4)]
    return {"places": places, "came": rank == 0 or came == expected}


def broken_off(rank: int) -> list[bool]:
    """Give up a step that leaves messages behind; the next step ignores them, even if nobody was
    notified of them."""
    return [_broken_off(rank, is_heard=heard) for heard in (True, False)]


def _broken_off(rank: int, *, is_heard: bool) -> bool:
    slots = made([edge(0, 4, slots=3), edge(1, 4, slots=3)])
    like = [((1,), torch.int32)]
    slots.begin()
    for number in range(3):
        slots.send(rank, number, [torch.tensor([7], dtype=torch.int32)])
    if is_heard:
        slots.receive(1 - rank, 0, like)
    dist.barrier()
    slots.begin()
    found = []
    for number in range(6):
        slots.send(rank, number, [torch.tensor([number], dtype=torch.int32)])
        found.append(int(slots.receive(1 - rank, number, like)[0]))
    slots.settle()
    dist.barrier()
    return found == [*range(6)]


def refused(rank: int) -> dict[str, str]:
    """Simulate a fault on rank 1 alone; both ranks report it."""
    none_left = OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))
    faults = {
        "another host": mock.patch.object(pinned, "host", lambda: "elsewhere"),
        "no memory": mock.patch.object(os, "posix_fallocate", side_effect=none_left),
        "not seen": mock.patch.object(os, "getpid", lambda: 2**22 + 5),
    }
    return said_of(faults, rank)


def said_of(faults: Mapping[str, Any], rank: int) -> dict[str, str]:
    """Return, for each fault of rank 1, why slots were refused, and which files stayed open."""
    edges, said = [edge(0, 64), edge(1, 64)], {}
    for name, fault in faults.items():
        begun = open_files()
        if rank == 1:
            fault.start()
        try:
            SharedMemoryTransport(edges, group=_everyone())
            said[name] = "nothing"
        except BadInput as error:
            said[name] = str(error)
        if rank == 1:
            fault.stop()
        gc.collect()
        said[name] += f" {sorted(open_files() - begun) or ''}"
    return said


def silent(rank: int) -> str:
    """Let rank 1 run without sending anything."""
    group = dist.new_group([0, 1], timeout=timedelta(seconds=1))
    slots = SharedMemoryTransport([edge(1, 64), edge(0, 64)], group=group)
    slots.begin()
    said = ""
    if rank == 0:
        try:
            slots.receive(0, 0, [((16,), torch.float32)])
        except RankFailed as error:
            said = str(error)
    dist.barrier()
    return said


def killed(rank: int) -> dict[str, str]:
    """Let rank 1 die while it writes into a slot."""
    slots = made([edge(1, 1 << 16), edge(0, 64)])
    slots.begin()
    if rank == 1:
        with mock.patch.object(torch.Tensor, "copy_", side_effect=_die):
            slots.send(0, 0, [torch.ones(1 << 14)])
    return said_by_whom_it_left(slots, [((1 << 14,), torch.float32)])


def said_by_whom_it_left(slots: SharedMemoryTransport, likes: Sequence[Like]) -> dict[str, str]:
    """Return rank 0's errors when it reads from rank 1, which has ended, and when it sends to
    it."""
    attempts = {
        "reading": lambda: slots.receive(0, 0, likes),
        "sending": lambda: _send_more_than_slots(slots),
    }
    said = {}
    for name, attempt in attempts.items():
        try:
            attempt()
        except RankFailed as error:
            said[name] = str(error)
    return said


def _send_more_than_slots(slots: SharedMemoryTransport) -> None:
    for number in range(3):
        slots.send(1, number, [torch.ones(16)])
    slots.settle()


def _die(*_: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _everyone() -> dist.ProcessGroup:
    group = dist.group.WORLD
    assert group is not None
    return group


def open_files() -> set[str]:
    """Return the open memory files and pipes, which are all that slots consist of."""
    found = set()
    for number in Path("/proc/self/fd").iterdir():
        try:
            name = str(number.readlink())
        except OSError:
            continue
        if name.startswith(("/memfd:", "pipe:")):
            found.add(name)
    return found


def main(folder: str, rank: int, device: str = "cpu") -> None:
    torch.set_default_device(device)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2,
        timeout=timedelta(seconds=60),
    )  # fmt: skip
    print(json.dumps(killed(rank)))
    sys.stdout.flush()
    os._exit(0)  # skip the shutdown, because the other ranks are gone


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), *sys.argv[3:])
