"""Exchanges through shared memory, compared with torch's own.

Not for checking the results: the tests do that.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from steelyard.comm.json_gather import gathered
from steelyard.ir.message_slots import CollectiveSlots
from steelyard.comm.channel import Channel
from steelyard.comm.shared_memory.collectives import SharedMemoryCollectives
from steelyard.measure.operators.memory import meter_once
from steelyard.operators import all_gather, operator_named
from tests.system.dist.slots import here, open_files

REDUCE = "_c10d_functional.all_reduce.default"
_IN_PLACE = "_c10d_functional.all_reduce_.default"
SCATTER = "_c10d_functional.reduce_scatter_tensor.default"
EACH_TO_EACH = "_c10d_functional.all_to_all_single.default"
GATHER = "steelyard.all_gather"


def _rounds(ranks: int, nbytes: int, count: int) -> CollectiveSlots:
    return CollectiveSlots(num_ranks=ranks, part_bytes=nbytes, sum_bytes=nbytes, count=count)


def channel() -> Channel:
    assert dist.group.WORLD is not None
    return Channel.of(dist.group.WORLD, here())


def values(ranks: int, seed: int) -> list[tuple[str, torch.Tensor, tuple[Any, ...]]]:
    """Yield some calls of each kind of exchange, with their inputs and other arguments."""
    drawn = torch.Generator().manual_seed(seed)
    group = channel().group

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=drawn, device="cpu").to(here())

    even = (1,) * ranks
    return [
        (_IN_PLACE, random(1001), ("sum", group)),
        (REDUCE, random(3, 5), ("sum", group)),
        (SCATTER, random(2 * ranks, 7), ("sum", ranks, group)),
        (GATHER, random(3, 4).bfloat16(), (ranks, group)),
        (REDUCE, random().double(), ("sum", group)),
        (EACH_TO_EACH, (100 * random(ranks, 33)).to(torch.uint8), (even, even, group)),
        (_IN_PLACE, random(ranks - 1), ("sum", group)),
        (_IN_PLACE, random(64, 16).bfloat16(), ("sum", group)),
    ]


def by_torch(op: str) -> Callable[..., torch.Tensor]:
    return all_gather if op == GATHER else operator_named(op)


def as_torchs(rank: int) -> dict[str, Any]:
    """Issue several exchanges at the same time and wait for them in another order, several times.

    Return the largest differences, and the files left open.
    """
    begun = open_files()
    over = channel()
    ranks = over.num_ranks
    each = [x for _, x, _ in values(ranks, rank)]
    slotted = SharedMemoryCollectives(_rounds(ranks, 1 << 14, 2 * len(each)), over)
    through, worst, bitwise, are_alike = slotted.channel, 0.0, True, True
    for step in range(4):
        slotted.begin()
        seed = ranks * step + rank
        expected = [
            over.waiting(by_torch(op)(x, *rest)).clone() for op, x, rest in values(ranks, seed)
        ]
        issued = [through.calls[op](x, *rest) for op, x, rest in values(ranks, seed)]
        for place in [*range(1, len(issued), 2), *range(0, len(issued), 2)]:
            came, known = through.waiting(issued[place]).double(), expected[place].double()
            bitwise = bitwise and torch.equal(came, known)
            worst = max(worst, float((came - known).abs().max() / known.abs().max()))
        summed = [x for x, (op, *_) in zip(issued, values(ranks, 0)) if op in (REDUCE, _IN_PLACE)]
        told = gathered([float(x.double().sum()) for x in summed], list[float])
        are_alike = are_alike and all(sums == told[0] for sums in told)
    dist.barrier()
    moved, waited = over.waiting.moved_bytes, over.waiting.seconds
    slotted.close()
    del slotted, through, issued
    gc.collect()
    left = sorted(open_files() - begun)
    return {
        "bitwise": bitwise, "off": worst, "alike": are_alike, "moved": moved, "waits": waited > 0,
        "left": left,
    }  # fmt: skip


def kept_away(rank: int) -> int:
    """Return the bytes that an in-place sum allocates."""
    over = channel()
    x = torch.full((1 << 16,), float(rank))
    slotted = SharedMemoryCollectives(_rounds(over.num_ranks, x.nbytes, 4), over)
    through = slotted.channel

    def step() -> None:
        slotted.begin()
        for _ in range(8):
            through.waiting(through.calls[_IN_PLACE](x, "sum", ""))

    step()
    metered = meter_once(step, device=here())
    dist.barrier()
    slotted.close()
    return metered.peak_bytes


def unlike(rank: int) -> list[int]:
    """Let ranks request different numbers of slots; all get the largest number."""
    over = channel()
    slotted = SharedMemoryCollectives(_rounds(over.num_ranks, 4096 * (1 + rank), 2 * (1 + rank)), over)
    through, x = slotted.channel, torch.ones(4096 * over.num_ranks // 4)
    issued = [through.calls[_IN_PLACE](x.clone(), "sum", "") for _ in range(over.num_ranks)]
    sums = [through.waiting(each) for each in reversed(issued)]
    dist.barrier()
    slotted.close()
    return [int(x.sum()) // x.numel() for x in sums]
