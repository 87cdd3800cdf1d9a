"""Gathers and all-to-alls as direct messages, compared with torch's own.

Not for checking the results: the tests do that.
"""

from __future__ import annotations

import random
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from steelyard.comm.gloo.direct_collectives import DirectCollectives
from tests.system.dist.slotted import EACH_TO_EACH, GATHER, REDUCE, SCATTER, by_torch, channel, values


def as_torchs(rank: int) -> dict[str, Any]:
    """Issue several exchanges at the same time and wait for them in another order, several times.

    Sums among them still use torch.
    """
    over = channel()
    directly = DirectCollectives(over)
    through, alike, held = directly.channel, [], []
    for step in range(4):
        directly.begin()
        asked = [one for one in values(over.num_ranks, 4 * step + rank) if one[0] in through.calls]
        summed = over.waiting(by_torch(REDUCE)(torch.ones(3), "sum", over.group))
        expected = [over.waiting(by_torch(op)(x, *rest)).clone() for op, x, rest in asked]
        issued = [through.calls[op](x, *rest) for op, x, rest in asked]
        again = by_torch(REDUCE)(torch.ones(3), "sum", over.group)
        for place in [*range(1, len(issued), 2), *range(0, len(issued), 2)]:
            came = through.waiting(issued[place])
            # With more than two ranks, a sum depends on the order of its terms.
            near = torch.equal if over.num_ranks == 2 else torch.allclose
            alike.append(near(came, expected[place]))
        alike.append(torch.equal(through.waiting(again), summed))
        held.append(directly.held_bytes)
    return {"alike": alike, "ops": len(asked), "waits": over.waiting.seconds > 0, "held": held}


def many(rank: int) -> dict[str, int]:
    """Issue ten thousand exchanges of all kinds over two carriers of one group in turn.

    Twelve are in flight at a time, among torch's sums. Each rank waits in its own order, and
    nothing else keeps the sent tensors alive.
    """
    over = channel()
    ranks, own, alike = over.num_ranks, random.Random(rank), random.Random(99)
    carriers = [DirectCollectives(over), DirectCollectives(over)]
    done = wrong = 0
    while done < 10_000:
        directly = carriers[done % 24 == 0]
        calls, wait = directly.channel.calls, directly.channel.waiting
        directly.begin()
        issued = []
        for _ in range(12):
            kind, size = alike.choice((GATHER, SCATTER, EACH_TO_EACH, REDUCE)), alike.choice(_SIZES)
            base = float(alike.randrange(1000))
            given, rest, known = _made(kind, size, base, rank, ranks)
            call = by_torch(kind) if kind == REDUCE else calls[kind]
            issued.append((call(given, *rest), known))
            del given
        own.shuffle(issued)
        for sent, known in issued:
            wrong += not torch.equal(wait(sent), known)
        done += len(issued)
    return {"done": done, "wrong": wrong}


_SIZES = (1, 3, 128, 5000, 70_000)


def _made(
    kind: str, size: int, base: float, rank: int, ranks: int
) -> tuple[torch.Tensor, tuple[Any, ...], torch.Tensor]:
    """Return the input of this rank, the other arguments of the call, and the expected result."""
    summed = torch.full((size,), ranks * base + sum(range(ranks)))
    if kind == REDUCE:
        return torch.full((size,), base + rank), ("sum", channel().group), summed
    if kind == SCATTER:
        return torch.full((ranks * size,), base + rank), ("sum", ranks, ""), summed
    if kind == GATHER:
        whole = torch.arange(float(ranks)).repeat_interleave(size) + base
        return torch.full((size,), base + rank), (ranks, ""), whole
    given = (torch.arange(float(ranks)) * 1e4 + base + rank).repeat_interleave(size)
    came = (torch.arange(float(ranks)) + base + 1e4 * rank).repeat_interleave(size)
    return given.view(ranks, size), ((), (), ""), came.view(ranks, size)


def otherwise_laid_out(rank: int) -> list[bool]:
    """Return the tensor with another layout, column by column, as some kernels return it."""
    over = channel()
    through, found = DirectCollectives(over).channel, []
    group, even = over.group, (1,) * over.num_ranks
    for op, rest in ((GATHER, (over.num_ranks, group)), (EACH_TO_EACH, (even, even, group)),
                     (SCATTER, ("sum", over.num_ranks, group))):
        x = torch.arange(float(5 * over.num_ranks)).view(5, over.num_ranks).t() + rank
        came = through.waiting(through.calls[op](x, *rest))
        found.append(torch.equal(came, over.waiting(by_torch(op)(x.contiguous(), *rest))))
    return found


def asked_first(rank: int) -> list[list[str]]:
    """Return the order in which a rank posts receives and sends, for each kind."""
    calls: list[str] = []
    own = {"irecv": dist.irecv, "isend": dist.isend}

    def noted(name: str) -> Any:
        def call(*given: Any, **named: Any) -> Any:
            calls.append(name)
            return own[name](*given, **named)

        return call

    over, found = channel(), []
    through, ranks = DirectCollectives(over).channel, over.num_ranks
    kinds = [
        (GATHER, torch.ones(2), (ranks, "")),
        (EACH_TO_EACH, torch.ones(ranks), ((), (), "")),
        (SCATTER, torch.ones(ranks), ("sum", ranks, "")),
    ]
    for op, x, rest in kinds:
        with mock.patch.multiple(dist, **{name: noted(name) for name in own}):
            through.waiting(through.calls[op](x, *rest))
        found.append(calls.copy())
        calls.clear()
    return found


def broken_off(rank: int) -> list[float]:
    """Give up a step on all ranks after different numbers of messages.

    The next step gathers only its own values, also with another program over the same group.
    """
    over = channel()
    directly = DirectCollectives(over)
    gather, wait = directly.channel.calls[GATHER], directly.channel.waiting
    directly.begin()
    # The ranks reach different steps.
    for _ in range(3 + rank):
        gather(torch.full((1 << 20,), -1.0), over.num_ranks, "")
    directly.begin()
    other = DirectCollectives(over)
    other.begin()
    directly.begin()
    return [float(x) for x in wait(gather(torch.tensor([float(rank)]), over.num_ranks, ""))]
