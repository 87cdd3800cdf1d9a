"""A rank of one of several hosts with several ranks each: the bytes that leave its host during
simultaneous exchanges of groups. python -m tests.system.dist.spread RANK RANKS EACH ADDRESS
FILE. Not for checking the results: the tests do that."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

from benchmarks.hosts import DEVICE
from steelyard.ir.collective import GLOO, Collective, Exchange
from steelyard.ir.parallel_layout import DATA
from steelyard.comm.gloo.direct_collectives import all_to_all_into, reduce_scatter_rows, all_gather_into

TIMES, NBYTES = 4, 3 << 18


def cases(ranks: int) -> list[Collective]:
    """Yield every kind of exchange, among all groups of ranks of each size and distance."""
    divisors = [n for n in range(1, ranks + 1) if ranks % n == 0]
    return [
        GLOO.collective(kind, axis=DATA, num_ranks=count, nbytes=NBYTES, stride=stride)
        for stride in divisors
        for count in divisors[1:]
        if ranks % (count * stride) == 0
        for kind in _EXCHANGES
    ]


def _all_reduce(x: torch.Tensor, group: dist.ProcessGroup) -> None:
    dist.all_reduce(x, group=group)


def _gathered(x: torch.Tensor, group: dist.ProcessGroup) -> None:
    all_gather_into(x, x[group.rank()].clone(), group)


def _scattered(x: torch.Tensor, group: dist.ProcessGroup) -> None:
    reduce_scatter_rows(x, group)


def _all_to_all(x: torch.Tensor, group: dist.ProcessGroup) -> None:
    all_to_all_into(torch.empty_like(x), x, group)


_EXCHANGES: dict[Exchange, Callable[[torch.Tensor, dist.ProcessGroup], None]] = {
    Exchange.ALL_REDUCE: _all_reduce,
    Exchange.ALL_GATHER: _gathered,
    Exchange.REDUCE_SCATTER: _scattered,
    Exchange.ALL_TO_ALL: _all_to_all,
}


def _left_by_all() -> int:
    """Return the bytes that this host has sent, while nobody sends anything."""
    dist.barrier()
    left = _left()
    dist.barrier()
    return left


def _left() -> int:
    lines = Path("/proc/net/dev").read_text().splitlines()
    (own,) = (line.split() for line in lines if line.strip().startswith(f"{DEVICE}:"))
    return int(own[9])


def main(rank: int, ranks: int, each: int, address: str, file: str) -> None:
    dist.init_process_group(
        "gloo", init_method=f"tcp://{address}:29571", rank=rank, world_size=ranks
    )
    found = []
    for one in cases(ranks):
        group = _group_of(rank, ranks, one)
        x = torch.ones(one.num_ranks, NBYTES // 4 // one.num_ranks)
        _EXCHANGES[one.kind](x, group)  # the first exchange connects the ranks
        before, begin = _left_by_all(), time.perf_counter()
        for _ in range(TIMES):
            _EXCHANGES[one.kind](x, group)
        dist.barrier()
        seconds = (time.perf_counter() - begin) / TIMES
        found.append((_left_by_all() - before, seconds))
    if rank % each == 0:
        Path(file).write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def _group_of(rank: int, ranks: int, one: Collective) -> dist.ProcessGroup:
    count, stride = one.num_ranks, one.stride
    firsts = [n for n in range(ranks) if n // stride % count == 0]
    members = [list(range(first, first + count * stride, stride)) for first in firsts]
    made = [dist.new_group(group) for group in members]
    return next(group for group, of in zip(made, members, strict=True) if rank in of)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4], sys.argv[5])
