"""Figures of messages and all-reduces through slots in shared memory, measured by one rank.

Not for the exchanges of the backend: see worker.py.
"""

import time
from collections.abc import Callable, Mapping
from functools import partial
from statistics import median

import torch
import torch.distributed as dist

from steelyard.comm.channel import Channel
from steelyard.comm.shared_memory.collectives import SharedMemoryCollectives
from steelyard.comm.shared_memory.remote_host import RdmaTransport
from steelyard.comm.shared_memory.same_host import SharedMemoryTransport
from steelyard.errors import BadInput
from steelyard.ir.message_slots import CollectiveSlots, SlotSpec
from steelyard.measure.links.exchange_sizes import SIZES
from steelyard.measure.links.exchange_timing import ROUNDS, default_device, elapsed, is_on_gpu

MakesSlots = Callable[..., SharedMemoryTransport]


def slot_message_figures(
    slots: MakesSlots, xs: Mapping[str, torch.Tensor], rounds: int
) -> dict[str, float]:
    """Measure messages through shared-memory slots; empty if these ranks have no slots."""
    ends = ((0, 1), (1, 0))
    edges = [
        SlotSpec(source=source, target=target, sizes=(x.nbytes,), count=1, holds_all=True)
        for x in xs.values()
        for source, target in ends
    ]  # fmt: skip
    assert dist.group.WORLD is not None
    try:
        pinned = slots(edges, group=dist.group.WORLD)
    except BadInput:
        return {}
    # Do not poll: this measures the CPU cost, and messages that arrive after a long wait.
    pinned.polls = False
    pinned.begin()
    rank, found = dist.get_rank(), {}
    for number, (name, x) in enumerate(xs.items()):
        found[f"slot {name}"], hand = _slot_round_trip(pinned, 2 * number, x, rounds)
        if name == "small":
            if is_on_gpu():  # excluding the core that waits
                pinned.begin()
                _, hand = _slot_round_trip(pinned, 2 * number, x, rounds, is_awaited=False)
            found["slot hand"] = hand
        if rank > 1:
            found = dict.fromkeys(found, 0.0)
    pinned.settle()
    dist.barrier()
    pinned.close()
    if isinstance(pinned, RdmaTransport):
        x = xs["large"]
        found["slot copy"] = median(elapsed(partial(torch.clone, x)) for _ in range(ROUNDS))
    return found


def _slot_round_trip(
    pinned: SharedMemoryTransport,
    index: int,
    x: torch.Tensor,
    rounds: int,
    *,
    is_awaited: bool = True,
) -> tuple[float, float]:
    """Return half a round trip through slots, and half its CPU seconds on this rank."""
    rank, seconds, begin = dist.get_rank(), [], 0.0
    if rank > 1:
        return 0.0, 0.0
    like = [(x.shape, x.dtype)]
    for turn in range(rounds + 1):
        before = time.perf_counter()
        for is_sending in (rank == 0, rank == 1):
            if is_sending:
                pinned.send(index + rank, turn, [x])
            else:
                pinned.receive(index + 1 - rank, turn, like)
                if is_awaited and is_on_gpu():
                    torch.cuda.synchronize()
        if turn:
            seconds.append(time.perf_counter() - before)
        else:
            begin = time.thread_time()
    return median(seconds) / 2, (time.thread_time() - begin) / rounds / 2


def slot_all_reduce_figures(
    small: torch.Tensor, large: torch.Tensor, calls: int
) -> dict[str, float]:
    """Measure all-reduces through slots; empty if these ranks share no memory.

    The large tensor is exchanged part by part, so that no part is in a cache, as with gradients.
    """
    part = SIZES[default_device().type].middle
    parts = large.split(part // 4)
    assert dist.group.WORLD is not None
    over = Channel.of(dist.group.WORLD, default_device())
    rounds = CollectiveSlots(num_ranks=over.num_ranks, part_bytes=part, sum_bytes=part, count=2)
    try:
        slotted = SharedMemoryCollectives(rounds, over)
    except BadInput:
        return {}
    through, op = slotted.channel, "_c10d_functional.all_reduce_.default"

    def exchange(x: torch.Tensor) -> None:
        through.waiting(through.calls[op](x, "sum", ""))

    for _ in range(2):  # pages are allocated when they are first written
        exchange(parts[0])
    polls = slotted.set_polling(polls=False)
    begin = time.thread_time()
    for _ in range(calls):
        exchange(small)
    cpu_seconds = (time.thread_time() - begin) / calls
    slotted.set_polling(polls=polls)
    found = [elapsed(partial(exchange, small)) for _ in range(calls)]
    part_seconds = [elapsed(partial(exchange, part)) for _ in range(2) for part in parts]
    dist.barrier()
    slotted.close()
    middle = median(part_seconds[len(parts) :])
    return {"slotted small": median(found), "slotted middle": middle, "slotted call": cpu_seconds}
