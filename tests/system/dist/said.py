"""The bytes that the kernel counts for an exchange, compared with the predicted bytes.

See told.py.
"""

from __future__ import annotations

import fcntl
import socket
import struct
import termios
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from steelyard.ir.collective import GLOO, Exchange
from steelyard.comm.tcp_counters import SentBytesCounter, connections, detach_sockets
from steelyard.comm.gloo.direct_collectives import DirectCollectives
from steelyard.run.launch.coordination import InGroup
from tests.system.dist.slotted import EACH_TO_EACH, GATHER, SCATTER, channel

_TIMES = 5
# Sizes in elements of float32: a loss, a bias, a bucket, and a tensor that is sent in more than two
# pieces.
SIZES = (1, 2, 96, 60_000, 6_000_000)


def exchanges(rank: int) -> list[dict[str, Any]]:
    count, found = dist.get_world_size(), []
    for kind, (exchange, share) in _calls(count).items():
        for size in SIZES:
            numel = -(-size // share) * share
            given = torch.ones(numel)
            whole = given.nbytes * (count if kind is Exchange.ALL_GATHER else 1)
            said = GLOO.collective(kind, axis="", num_ranks=count, nbytes=whole)
            found.append({
                "name": f"{kind} of {numel}",
                "counted": _counted(exchange, given),
                "sent": said.sent_bytes,
                "said": said.wire_bytes,
            })  # fmt: skip
    return found


def messages(rank: int) -> dict[str, float]:
    """Send three messages at the same time from the first rank to the second."""

    def send(given: Tensor) -> None:
        way = dist.irecv if rank else dist.isend
        ops = [dist.P2POp(way, given.clone(), 1 - rank, tag=tag) for tag in range(3)]
        for work in dist.batch_isend_irecv(ops):
            work.wait()

    return {str(size): _counted(send, torch.ones(size)) for size in SIZES}


def asked(rank: int) -> dict[str, float]:
    coordinator = InGroup()
    counted = _counted(lambda _: coordinator.stopping(""), torch.ones(1))
    return {"counted": counted, "said": coordinator.asked_bytes / (1 + _TIMES)}


def _counted(exchange: Callable[[Tensor], object], given: Tensor) -> float:
    """Return the mean bytes of one exchange; connections are opened on first use."""
    exchange(given)
    dist.barrier()
    wire = SentBytesCounter()
    wire.look()
    before = wire.sent_bytes
    for _ in range(_TIMES):
        exchange(given)
    _await_sent()
    counted = wire.sent_bytes
    dist.barrier()  # no rank starts the next exchange before all have finished this one
    return (counted - before) / _TIMES


def _await_sent() -> None:
    """Wait until the kernel has sent what it accepted, as far as the receiver has room."""
    lent = connections()
    while any(_waiting_bytes(connection) for connection in lent):
        time.sleep(0.001)
    detach_sockets(lent)


def _waiting_bytes(connection: socket.socket) -> int:
    """Return the bytes that the other rank has not acknowledged yet."""
    (waiting,) = struct.unpack("i", fcntl.ioctl(connection, termios.TIOCOUTQ, bytes(4)))
    return int(waiting)


def _calls(count: int) -> dict[Exchange, tuple[Callable[[Tensor], object], int]]:
    through = DirectCollectives(channel()).channel
    calls, wait = through.calls, through.waiting
    return {
        Exchange.ALL_REDUCE: (dist.all_reduce, 1),
        Exchange.ALL_GATHER: (lambda x: wait(calls[GATHER](x, count, "")), 1),
        Exchange.REDUCE_SCATTER: (lambda x: wait(calls[SCATTER](x, "sum", count, "")), count),
        Exchange.ALL_TO_ALL: (lambda x: wait(calls[EACH_TO_EACH](x, [], [], "")), count),
    }  # fmt: skip


def words(rank: int) -> list[str]:
    """Broadcast a text from the default rank, and from each of two ranks."""
    coordinator, own = InGroup(), f"rank {rank} \0 says: ± 1"
    return [coordinator.words(own), *(coordinator.words(own, of=of) for of in (0, 1)), coordinator.words("")]
