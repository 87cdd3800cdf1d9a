"""Runs steps of several sides in the same ranks, one of each in turn, and times them.

Not for comparing the times.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

import torch
import torch.distributed as dist
from torch import Tensor


def in_turn(
    sides: Mapping[str, Callable[[], Tensor]], turns: int, *, warm_up: int = 0
) -> dict[str, list[float]]:
    """Run the sides in turns and return the time of each step on the slower rank.

    Another side begins in each turn.
    """
    seconds: dict[str, list[float]] = {side: [] for side in sides}
    names = list(sides)
    for turn in range(warm_up + turns):
        for place in range(len(names)):
            side = names[(place + turn) % len(names)]
            dist.barrier()
            begin = time.perf_counter()
            sides[side]()
            took = torch.tensor(time.perf_counter() - begin)
            dist.all_reduce(took, op=dist.ReduceOp.MAX)
            if turn >= warm_up:
                seconds[side].append(float(took))
    return seconds
