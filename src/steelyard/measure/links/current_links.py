"""Current figures of links, measured within a moment while a run or a meeting goes on.

Not for the full measurement of a link: see worker.py.
"""

import time
from dataclasses import replace
from functools import partial

import torch
import torch.distributed as dist

from steelyard.comm.devices import CPU
from steelyard.hardware.cluster import Link
from steelyard.ir.collective import GLOO, Exchange
from steelyard.measure.links.exchange_sizes import SIZES, sizes_of
from steelyard.measure.links.exchange_timing import (
    FEW_ROUNDS,
    LONG_SECONDS,
    ROUNDS,
    all_reduce_seconds,
    elapsed,
    max_over_ranks,
    on_device,
    ones,
    send,
)
from steelyard.measure.links.link_figures import ALMOST_ZERO, DOUBT

# An exchange that takes this much longer than the smallest one shows the rate of the link.
_SHORT_SECONDS = 0.02


def measured_now(before: Link, *, hosts: int = 1, torch_device: torch.device = CPU) -> Link:
    """Return the current link of this group, measured between two steps of a run.

    All ranks call this together and get the same result. The CPU cost of an exchange is taken from
    ``before``. The measurement takes some tenths of a second on any link, because the size grows
    only until the exchange takes long enough.
    """
    num_ranks, sizes = dist.get_world_size(), sizes_of(torch_device, hosts)
    with torch.no_grad(), on_device(torch_device):
        least = max_over_ranks(all_reduce_seconds(ones(sizes.small // 4), FEW_ROUNDS))
        nbytes, larger_seconds = sizes.small, least
        while nbytes < sizes.middle and larger_seconds - least < _SHORT_SECONDS:
            nbytes = min(sizes.middle, 16 * nbytes)
            larger_seconds = max_over_ranks(all_reduce_seconds(ones(nbytes // 4), 1))
        if larger_seconds < LONG_SECONDS:
            larger_seconds = max_over_ranks(all_reduce_seconds(ones(nbytes // 4), FEW_ROUNDS))
    small_cost, large_cost = (
        GLOO.collective(Exchange.ALL_REDUCE, axis="", num_ranks=num_ranks, nbytes=size)
        for size in (sizes.small, nbytes)
    )
    rate = (large_cost.sent_bytes - small_cost.sent_bytes) / max(
        larger_seconds - least, ALMOST_ZERO
    )
    latency = max((least - small_cost.sent_bytes / rate) / small_cost.hops, ALMOST_ZERO)
    return replace(before, latency_seconds=latency, bytes_per_second=rate, doubt=DOUBT)


def rates_now(*, hosts: int) -> tuple[float, ...]:
    """Return the bytes per second between the first host and every other one, measured in turn.

    All ranks call this together between two steps of a run and get the same result.
    """
    each, small = dist.get_world_size() // hosts, SIZES["cpu"].small
    rates = []
    with torch.no_grad(), on_device(CPU):
        for host in range(1, hosts):
            nbytes, larger_seconds = small, max_over_ranks(_message_seconds(small, host * each))
            least = larger_seconds
            while nbytes < SIZES["cpu"].middle and larger_seconds - least < _SHORT_SECONDS:
                nbytes = min(SIZES["cpu"].middle, 16 * nbytes)
                larger_seconds = max_over_ranks(_message_seconds(nbytes, host * each))
            rates.append((nbytes - small) / max(larger_seconds - least, ALMOST_ZERO))
    return tuple(rates)


def _message_seconds(nbytes: int, other: int) -> float:
    """Return half a round trip between rank 0 and another; zero on other ranks."""
    x, begin = ones(nbytes // 4), time.perf_counter()
    for is_back in (False, True):
        for work in send(x, other, is_back=is_back):
            work.wait()
    return (time.perf_counter() - begin) / 2 if dist.get_rank() in (0, other) else 0.0


def probe_link(torch_device: torch.device = CPU) -> tuple[float, float]:
    """Return the minimum seconds of a small and a larger all-reduce over all hosts.

    The result is the same on all ranks. It quickly shows whether a link has changed.
    """
    with torch.no_grad(), on_device(torch_device):
        best, sizes = [], sizes_of(torch_device, 2)[:2]
        for nbytes, rounds in zip(sizes, (3 * ROUNDS, FEW_ROUNDS), strict=True):
            x = ones(nbytes // 4)
            dist.all_reduce(x)
            best.append(min(elapsed(partial(dist.all_reduce, x)) for _ in range(rounds)))
        timed = torch.tensor(best, dtype=torch.float64)
        dist.all_reduce(timed, op=dist.ReduceOp.MAX)
    small, middle = map(float, timed)
    return small, middle
