"""Seconds of fixed work on a rank's cores or GPU, from which the speeds of ranks follow.

Not for exchanges between ranks: see exchange_timing.py.
"""

import math
import os
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from steelyard.comm.devices import CPU
from steelyard.comm.json_gather import gathered
from steelyard.hardware.host_os import are_cores_alike, quota_cores
from steelyard.measure.links.exchange_sizes import SIZES
from steelyard.measure.links.exchange_timing import (
    MATRIX,
    MATRIX_ON_GPU,
    default_device,
    on_device,
    ones,
)
from steelyard.measure.operators.timer import Clock

# As in a step, most of the time goes into matrix products, and some into passes over memory.
_COMPUTING_SECONDS, _PRODUCTS, _SWEEPS = 4.0, 64, 6


def quick_product_seconds(each: int) -> float:
    """Return the seconds of fixed work on this rank's cores, sampled for one second."""
    with on_device(CPU):
        return host_product_seconds(each, _COMPUTING_SECONDS / 4)


def host_product_seconds(each: int, computing_seconds: float = 0.0) -> float:
    """Return the seconds of fixed work on this rank's cores: the minimum of runs in some time.

    The result is scaled up if the quota that all ranks of the host share allows fewer cores than
    they have.
    """
    dist.barrier()
    end = time.perf_counter() + (computing_seconds or _COMPUTING_SECONDS)
    least = math.inf
    matrix, large = ones(MATRIX, MATRIX), ones(SIZES["cpu"].large // 4)
    while time.perf_counter() < end or least == math.inf:
        begin = time.perf_counter()
        _compute(matrix, large)
        least = min(least, time.perf_counter() - begin)
    return least * max(1.0, each * len(os.sched_getaffinity(0)) / quota_cores())


def cpu_product_seconds() -> float:
    """Return the CPU seconds of fixed work that all ranks do at the same time.

    The result is scaled up if the quota of this rank's control group allows fewer cores than it
    has. CPU time excludes short preemptions by other processes, which would differ the next time.
    For the same reason this is the minimum of several runs. Equal cores without a quota are not
    timed at all: while the hyperthread sibling of a core is busy, the core looks like half a core.
    With a quota, other processes use the remaining cores and their caches. Steps then take longer
    than the minimum, and the median depends on the momentary load, so the lower quartile is used.
    """
    cores = len(os.sched_getaffinity(0))
    withheld, alike = max(1.0, cores / quota_cores()), are_cores_alike()
    most = torch.tensor(withheld)
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    if alike and most == 1:
        return withheld
    matrix, large = ones(MATRIX, MATRIX), ones(SIZES["cpu"].large // 4)
    dist.barrier()
    end = time.perf_counter() + _COMPUTING_SECONDS
    found: list[float] = []
    while time.perf_counter() < end or not found:
        begin = time.process_time()
        _compute(matrix, large)
        found.append(time.process_time() - begin)
    return sorted(found)[len(found) // 4 if withheld > 1 else 0] * withheld


def gpu_product_seconds() -> float:
    """Return the minimum seconds of a product if the GPUs are of different kinds, otherwise 1."""
    names = gathered(torch.cuda.get_device_name(default_device()), str)
    if len(set(names)) == 1:
        return 1.0
    matrix, clock = ones(MATRIX_ON_GPU, MATRIX_ON_GPU), Clock(default_device())
    dist.barrier()
    return min(clock.seconds(lambda: torch.mm(matrix, matrix)) for _ in range(_PRODUCTS))


def work_until(is_over: Callable[[], bool]) -> None:
    """Run matrix products and passes over memory on all cores of this process until stopped."""
    matrix, large = ones(MATRIX, MATRIX), ones(SIZES["cpu"].large // 4)
    while not is_over():
        _compute(matrix, large)


def _compute(matrix: torch.Tensor, large: torch.Tensor) -> None:
    for _ in range(_PRODUCTS):
        torch.mm(matrix, matrix)
    for _ in range(_SWEEPS):
        large.mul_(1.0)
