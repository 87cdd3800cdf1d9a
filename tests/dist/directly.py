"""Gathers and all-to-alls that each rank sends straight to each other one, beside torch's own.

Not the judgement: that is the tests'.
"""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from steelyard.exchange.directly import Directly
from tests.dist.slotted import EACH_TO_EACH, GATHER, SCATTER, by_torch, channel, values


def as_torchs(rank: int) -> dict[str, Any]:
    """All under way at one time, waited for in another order than that of their issue, some times
    over; sums among them go on by torch."""
    over = channel()
    directly = Directly(over)
    through, alike, held = directly.channel, [], []
    for step in range(4):
        directly.begin()
        asked = [one for one in values(over.num_ranks, 4 * step + rank) if one[0] in through.calls]
        summed = over.waiting(by_torch(_REDUCE)(torch.ones(3), "sum", over.group))
        expected = [over.waiting(by_torch(op)(x, *rest)).clone() for op, x, rest in asked]
        issued = [through.calls[op](x, *rest) for op, x, rest in asked]
        again = by_torch(_REDUCE)(torch.ones(3), "sum", over.group)
        for place in [*range(1, len(issued), 2), *range(0, len(issued), 2)]:
            came = through.waiting(issued[place])
            # Of more than two, a sum depends on who is added first.
            near = torch.equal if over.num_ranks == 2 else torch.allclose
            alike.append(near(came, expected[place]))
        alike.append(torch.equal(through.waiting(again), summed))
        held.append(directly.held_bytes)
    return {"alike": alike, "ops": len(asked), "waits": over.waiting.seconds > 0, "held": held}


_REDUCE = "_c10d_functional.all_reduce.default"


def asked_first(rank: int) -> list[list[str]]:
    """In which order a rank asks and sends, of each kind."""
    calls: list[str] = []
    own = {"irecv": dist.irecv, "isend": dist.isend}

    def noted(name: str) -> Any:
        def call(*given: Any, **named: Any) -> Any:
            calls.append(name)
            return own[name](*given, **named)

        return call

    over, found = channel(), []
    through, ranks = Directly(over).channel, over.num_ranks
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
    """A step that all give up after they have sent; what the next gathers is its own."""
    over = channel()
    directly = Directly(over)
    gather, wait = directly.channel.calls[GATHER], directly.channel.waiting
    directly.begin()
    for _ in range(3):
        gather(torch.full((1000,), -1.0), over.num_ranks, "")
    directly.begin()
    return [float(x) for x in wait(gather(torch.tensor([float(rank)]), over.num_ranks, ""))]
