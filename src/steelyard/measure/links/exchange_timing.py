"""Timing of exchanges on the measured device, and of the computation that they slow down.

Tensors are made on torch's default device, which is temporarily the measured device. Not for which
exchanges are timed: see worker.py.
"""

import contextlib
import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

ROUNDS, FEW_ROUNDS = 9, 3
# Longer exchanges tell nothing more about the slowdown that they cause.
LONG_SECONDS = 0.2
MATRIX, MATRIX_ON_GPU = 256, 4096


def on_device(torch_device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Make this the default device, unless it is already: the context slows down each call."""
    return contextlib.nullcontext() if default_device() == torch_device else torch_device


def default_device() -> torch.device:
    return torch.get_default_device()


def is_on_gpu() -> bool:
    return default_device().type == "cuda"


def ones(*shape: int) -> torch.Tensor:
    """Return float32 ones, which take four bytes each, whatever default dtype the training script
    sets.
    """
    return torch.ones(shape, dtype=torch.float32)


def elapsed(work: Callable[[], object], group: dist.ProcessGroup | None = None) -> float:
    dist.barrier(group)
    begin = time.perf_counter()
    work()
    if is_on_gpu():
        torch.cuda.synchronize()
    return time.perf_counter() - begin


def max_over_ranks(seconds: float) -> float:
    """Return the maximum of this value over all ranks."""
    most = torch.tensor(seconds, dtype=torch.float64)
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    return float(most)


def all_reduce_seconds(
    x: torch.Tensor, rounds: int, group: dist.ProcessGroup | None = None
) -> float:
    dist.all_reduce(x, group=group)
    return median(elapsed(lambda: dist.all_reduce(x, group=group), group) for _ in range(rounds))


def send(x: torch.Tensor, other: int, *, is_back: bool = False) -> list[dist.Work]:
    """Send from rank 0 to ``other``, or back with ``is_back``; other ranks do nothing."""
    rank = dist.get_rank()
    if rank not in (0, other):
        return []
    operation = dist.isend if (rank == 0) != is_back else dist.irecv
    works: list[dist.Work] = dist.batch_isend_irecv([dist.P2POp(operation, x, other - rank)])
    return works


def slowdown(
    exchange: Callable[[], Sequence[dist.Work | None]],
    alone: float,
    group: dist.ProcessGroup | None = None,
) -> float:
    """Return the share of an exchange's duration by which it delays concurrent computation."""
    size = MATRIX_ON_GPU if is_on_gpu() else MATRIX
    matrix = ones(size, size)
    product_seconds = median(
        elapsed(lambda: torch.mm(matrix, matrix), group) for _ in range(ROUNDS)
    )
    # Compute for longer than the exchange takes, so that it can be hidden completely.
    count = max(1, round(2 * alone / product_seconds))

    def computing() -> None:
        for _ in range(count):
            torch.mm(matrix, matrix)

    def overlapped() -> None:
        works = exchange()
        computing()
        for work in works:
            assert work is not None
            work.wait()

    shares = []
    for _ in range(ROUNDS):
        before, during, after = (
            elapsed(each, group) for each in (computing, overlapped, computing)
        )
        shares.append((during - (before + after) / 2) / alone)
    return median(shares)
