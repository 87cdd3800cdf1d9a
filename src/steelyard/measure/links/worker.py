"""Measurements by one rank of a group: collectives, messages, their CPU cost, and compute speed.

Run as a command, this module joins other ranks that a parent process has started, each on its share
of the cores or on its own GPU. Tensors are made on torch's default device, which is temporarily the
measured device. Not for the exchanges of a step, which are torch operators. Not for starting ranks
or for fitting their figures: see probe.py.
"""

import contextlib
import json
import math
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from statistics import fmean, median
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from steelyard.comm.backends import backend_for
from steelyard.comm.channel import Channel
from steelyard.comm.devices import CPU
from steelyard.comm.gloo.thread_scheduling import take_turns
from steelyard.comm.json_gather import gathered
from steelyard.comm.shared_memory.collectives import SharedMemoryCollectives
from steelyard.comm.shared_memory.remote_host import RdmaTransport
from steelyard.comm.shared_memory.same_host import SharedMemoryTransport
from steelyard.comm.shared_memory.transport import shared_memory_transport
from steelyard.errors import BadInput
from steelyard.hardware.cluster import Link
from steelyard.hardware.host_os import are_cores_alike, cores_of, quota_cores
from steelyard.ir.collective import GLOO, Exchange
from steelyard.ir.message_slots import CollectiveSlots, SlotSpec
from steelyard.measure.operators.timer import Clock


class ExchangeSizes(NamedTuple):
    """Byte sizes of exchanges: negligible, large enough to show a rate, and larger than caches."""

    small: int
    middle: int
    large: int


SIZES = {
    "cpu": ExchangeSizes(4096, 1 << 20, 16 << 20),
    "cuda": ExchangeSizes(4096, 16 << 20, 128 << 20),
}


def sizes_of(torch_device: torch.device, hosts: int) -> ExchangeSizes:
    """Return the sizes for CPUs if there are several hosts: those for GPUs would take minutes."""
    return SIZES["cpu" if hosts > 1 else torch_device.type]


# On a shared machine, several ranks per core have taken more than two minutes.
SECONDS = 600
DOUBT = 0.15
# The cache stores only values above zero.
ALMOST_ZERO = 1e-12
_ROUNDS, _FEW_ROUNDS = 9, 3
# Longer exchanges tell nothing more about the slowdown that they cause.
_LONG_SECONDS = 0.2
# Exchanges of this duration are dominated by the rate, not by the latency.
_SHORT_SECONDS = 0.02
_MATRIX, _MATRIX_ON_GPU = 256, 4096
# As in a step, most of the time goes into matrix products, and some into passes over memory.
_COMPUTING_SECONDS, _WINDOWS, _PRODUCTS, _SWEEPS = 4.0, 3, 64, 6
# For arrival skew: the seconds of computing between two exchanges, and the number of exchanges.
_SKEW_ROUNDS = {"short": (0.004, 60), "long": (0.04, 24)}
# Waits that are longer than this quantile are caused by other load on the machine.
_USUAL_WAITS = 0.9
_MakesSlots = Callable[..., SharedMemoryTransport]


def main(folder: str, num_ranks: int, rank: int, device: str) -> None:
    cores = cores_of(rank, num_ranks)
    os.sched_setaffinity(0, cores)
    torch.set_num_threads(len(cores))
    torch_device = CPU
    if device == "cuda":
        torch_device = torch.device("cuda", rank % torch.cuda.device_count())
        torch.cuda.set_device(torch_device)
    dist.init_process_group(
        backend_for(torch_device, ranks=num_ranks),
        init_method=f"file://{folder}/rendezvous",
        rank=rank,
        world_size=num_ranks,
        timeout=timedelta(seconds=SECONDS),
    )
    (Path(folder) / f"{rank}.json").write_text(
        json.dumps(figures_of_this_rank(torch_device=torch_device))
    )
    dist.barrier()
    dist.destroy_process_group()


def figures_of_this_rank(*, hosts: int = 1, torch_device: torch.device = CPU) -> dict[str, float]:
    """Return the figures of this rank; all ranks of the group measure at the same time.

    With several hosts, NIXL writes the slots if it is available and each host has one rank; GPUs of
    different hosts have no slots. Cores of different hosts are never assumed to be equal.
    """
    take_turns()  # as in a step
    with torch.no_grad(), _on_device(torch_device):
        each = dist.get_world_size() // hosts
        product_seconds = _cpu_product_seconds
        if hosts > 1:
            # The load that neighbours cause varies from one second to the next, so this uses the
            # minimum.
            product_seconds = partial(_host_product_seconds, each)
        slots: _MakesSlots | None = (
            SharedMemoryTransport if hosts == 1 else shared_memory_transport if each == 1 else None
        )
        if _is_on_gpu():
            product_seconds = _gpu_product_seconds
            slots = partial(shared_memory_transport, device=torch_device) if hosts == 1 else None
        compute_times = [product_seconds()]
        # Messages are measured over the slowest link.
        receiver, sizes = (each if hosts > 1 else 1), sizes_of(torch_device, hosts)
        figures = _figures(sizes, slots=slots, receiver=receiver)
        if hosts > 1 and each > 1:
            figures |= _figures_within_host(each)
        compute_times += [product_seconds() for _ in range(_WINDOWS - 1)]
        figures["product"] = median(compute_times)
        if not _is_on_gpu():
            figures |= _arrival_skew()
    return figures


def _arrival_skew() -> dict[str, float]:
    """Measure the wait at an exchange after short and after long computing, and the durations of
    both.

    All ranks compute the same. The fastest exchange is taken as one without any wait.
    """
    matrix, word = _ones(_MATRIX, _MATRIX), _ones(1)
    product_seconds = _max_over_ranks(
        median(_elapsed(lambda: torch.mm(matrix, matrix)) for _ in range(_ROUNDS))
    )
    figures = {}
    for name, (seconds, rounds) in _SKEW_ROUNDS.items():
        products = max(1, round(seconds / product_seconds))
        computed, waited = [], []
        dist.barrier()
        for _ in range(rounds):
            begin = time.perf_counter()
            for _ in range(products):
                torch.mm(matrix, matrix)
            arrived = time.perf_counter()
            dist.all_reduce(word)
            computed.append(arrived - begin)
            waited.append(time.perf_counter() - arrived)
        usual_waits = sorted(waited)[: round(_USUAL_WAITS * rounds)]
        figures[f"skew {name}"] = fmean(usual_waits) - usual_waits[0]
        figures[f"skew {name} after"] = median(computed)
    return figures


def _figures_within_host(each: int) -> dict[str, float]:
    """Measure all-reduces within this host, while the other hosts do the same.

    Hosts do not synchronize for this, because a message to another host may take longer than the
    whole measurement.
    """
    host_group = None
    for first in range(0, dist.get_world_size(), each):
        group = dist.new_group(list(range(first, first + each)))
        host_group = group if first <= dist.get_rank() < first + each else host_group
    small, middle, large = (_ones(nbytes // 4) for nbytes in SIZES[_default_device().type])
    many_rounds = 3 * _ROUNDS
    timed = (
        ("small", small, many_rounds),
        ("middle", middle, many_rounds),
        ("large", large, _ROUNDS),
    )
    found = {
        f"near {name}": _all_reduce_seconds(x, rounds, group=host_group)
        for name, x, rounds in timed
    }
    found["near disturbs"] = _slowdown(
        lambda: [dist.all_reduce(large, group=host_group, async_op=True)],
        found["near large"],
        host_group,
    )
    dist.destroy_process_group(host_group)
    return found


def all_reduce_figures(ranks: Sequence[int], sizes: ExchangeSizes) -> dict[str, float]:
    """Return all-reduce figures of some ranks of the group, as the maximum over these ranks.

    The figures are the seconds of all-reduces of a small, a medium and a large tensor, the slowdown
    of concurrent computation, and the minimum seconds of the first two. From the last ones, a later
    run detects a changed link. All ranks of the group call this and get the same result.
    """
    names = (*sizes._fields, "disturbs", *(f"least {name}" for name in sizes._fields[:2]))
    group = dist.new_group([*ranks])
    figures = torch.zeros(len(names), dtype=torch.float64, device=CPU)
    if dist.get_rank() in ranks:
        small, middle, large = (_ones(nbytes // 4) for nbytes in sizes)
        found = {"small": _all_reduce_seconds(small, 3 * _ROUNDS, group)}
        found["middle"] = _all_reduce_seconds(middle, _FEW_ROUNDS, group)
        found["large"] = _all_reduce_seconds(large, _FEW_ROUNDS, group)
        # All ranks of the subset must choose the same tensor.
        slowest = torch.tensor(found["large"], dtype=torch.float64, device=CPU)
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX, group=group)
        x, alone = (large, "large") if slowest <= _LONG_SECONDS else (middle, "middle")
        found["disturbs"] = _slowdown(
            lambda: [dist.all_reduce(x, group=group, async_op=True)], found[alone], group
        )
        for name, tensor, rounds in (
            ("small", small, 3 * _ROUNDS),
            ("middle", middle, _FEW_ROUNDS),
        ):
            exchange = partial(dist.all_reduce, tensor, group=group)
            found[f"least {name}"] = min(_elapsed(exchange, group) for _ in range(rounds))
        figures.copy_(torch.tensor([found[name] for name in names], dtype=torch.float64))
        dist.destroy_process_group(group)
    dist.all_reduce(figures, op=dist.ReduceOp.MAX)
    return dict(zip(names, map(float, figures), strict=True))


def _figures(sizes: ExchangeSizes, *, slots: _MakesSlots | None, receiver: int) -> dict[str, float]:
    """Measure the exchanges of all ranks; rank 0 sends messages to ``receiver``."""
    small, middle, large = (_ones(nbytes // 4) for nbytes in sizes)
    begin, calls = time.thread_time(), 3 * _ROUNDS
    seconds = {"small": _all_reduce_seconds(small, calls)}
    seconds["call"] = (time.thread_time() - begin) / calls
    if _is_on_gpu():  # waiting for a GPU occupies a core
        seconds["call"] = median(_issue_seconds(small) for _ in range(calls))
    seconds["middle"] = _all_reduce_seconds(middle, calls)
    # All ranks must make the same choice, so the slowest one decides.
    is_long = {"middle": _max_over_ranks(seconds["middle"]) > _LONG_SECONDS}
    few = _FEW_ROUNDS if is_long["middle"] else calls
    seconds["large"] = _all_reduce_seconds(large, min(few, _ROUNDS))
    is_long["large"] = _max_over_ranks(seconds["large"]) > _LONG_SECONDS
    seconds |= _message_figures("small", small, calls, receiver) | _message_figures(
        "middle", middle, few, receiver
    )
    in_slots = (
        _slot_message_figures(slots, {"small": small, "large": middle}, calls) if slots else {}
    )
    seconds |= in_slots
    if in_slots:
        seconds |= _slot_all_reduce_figures(small, large, calls)
    long = "middle" if is_long["large"] else "large"
    x, alone = {"middle": middle, "large": large}[long], seconds[long]
    seconds["disturbs"] = _slowdown(lambda: [dist.all_reduce(x, async_op=True)], alone)
    if dist.get_rank() in (0, receiver):
        alone = seconds["hop middle"] * x.nbytes / middle.nbytes
    slowed = _slowdown(lambda: _send(x.cpu(), receiver), alone)
    return {**seconds, "hand disturbs": slowed if dist.get_rank() in (0, receiver) else 0.0}


def _ones(*shape: int) -> torch.Tensor:
    """Return float32 ones, which take four bytes each, whatever default dtype the training script
    sets.
    """
    return torch.ones(shape, dtype=torch.float32)


def _on_device(torch_device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Make this the default device, unless it is already: the context slows down each call."""
    return contextlib.nullcontext() if _default_device() == torch_device else torch_device


def _default_device() -> torch.device:
    return torch.get_default_device()


def _is_on_gpu() -> bool:
    return _default_device().type == "cuda"


def _issue_seconds(x: torch.Tensor) -> float:
    """Return the seconds that issuing an all-reduce takes before this rank can continue."""
    begin = time.perf_counter()
    work = dist.all_reduce(x, async_op=True)
    seconds = time.perf_counter() - begin
    assert work is not None
    work.wait()
    torch.cuda.synchronize()
    return seconds


def _max_over_ranks(seconds: float) -> float:
    """Return the maximum of this value over all ranks."""
    most = torch.tensor(seconds, dtype=torch.float64)
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    return float(most)


def measured_now(before: Link, *, hosts: int = 1, torch_device: torch.device = CPU) -> Link:
    """Return the current link of this group, measured between two steps of a run.

    All ranks call this together and get the same result. The CPU cost of an exchange is taken from
    ``before``. The measurement takes some tenths of a second on any link, because the size grows
    only until the exchange takes long enough.
    """
    num_ranks, sizes = dist.get_world_size(), sizes_of(torch_device, hosts)
    with torch.no_grad(), _on_device(torch_device):
        least = _max_over_ranks(_all_reduce_seconds(_ones(sizes.small // 4), _FEW_ROUNDS))
        nbytes, larger_seconds = sizes.small, least
        while nbytes < sizes.middle and larger_seconds < _SHORT_SECONDS:
            nbytes = min(sizes.middle, 16 * nbytes)
            larger_seconds = _max_over_ranks(_all_reduce_seconds(_ones(nbytes // 4), 1))
        if larger_seconds < _LONG_SECONDS:
            larger_seconds = _max_over_ranks(_all_reduce_seconds(_ones(nbytes // 4), _FEW_ROUNDS))
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
    with torch.no_grad(), _on_device(CPU):
        for host in range(1, hosts):
            nbytes, larger_seconds = small, _max_over_ranks(_message_seconds(small, host * each))
            least = larger_seconds
            while nbytes < SIZES["cpu"].middle and larger_seconds < _SHORT_SECONDS:
                nbytes = min(SIZES["cpu"].middle, 16 * nbytes)
                larger_seconds = _max_over_ranks(_message_seconds(nbytes, host * each))
            rates.append((nbytes - small) / max(larger_seconds - least, ALMOST_ZERO))
    return tuple(rates)


def _message_seconds(nbytes: int, other: int) -> float:
    """Return half a round trip between rank 0 and another; zero on other ranks."""
    x, begin = _ones(nbytes // 4), time.perf_counter()
    for is_back in (False, True):
        for work in _send(x, other, is_back=is_back):
            work.wait()
    return (time.perf_counter() - begin) / 2 if dist.get_rank() in (0, other) else 0.0


def probe_link(torch_device: torch.device = CPU) -> tuple[float, float]:
    """Return the minimum seconds of a small and a larger all-reduce over all hosts.

    The result is the same on all ranks. It quickly shows whether a link has changed.
    """
    with torch.no_grad(), _on_device(torch_device):
        best, sizes = [], sizes_of(torch_device, 2)[:2]
        for nbytes, rounds in zip(sizes, (3 * _ROUNDS, _FEW_ROUNDS), strict=True):
            x = _ones(nbytes // 4)
            dist.all_reduce(x)
            best.append(min(_elapsed(partial(dist.all_reduce, x)) for _ in range(rounds)))
        timed = torch.tensor(best, dtype=torch.float64)
        dist.all_reduce(timed, op=dist.ReduceOp.MAX)
    small, middle = map(float, timed)
    return small, middle


def quick_product_seconds(each: int) -> float:
    """Return the seconds of fixed work on this rank's cores, sampled for one second."""
    with _on_device(CPU):
        return _host_product_seconds(each, _COMPUTING_SECONDS / 4)


def _host_product_seconds(each: int, computing_seconds: float = 0.0) -> float:
    """Return the seconds of fixed work on this rank's cores: the minimum of runs in some time.

    The result is scaled up if the quota that all ranks of the host share allows fewer cores than
    they have.
    """
    dist.barrier()
    end = time.perf_counter() + (computing_seconds or _COMPUTING_SECONDS)
    least = math.inf
    matrix, large = _ones(_MATRIX, _MATRIX), _ones(SIZES["cpu"].large // 4)
    while time.perf_counter() < end or least == math.inf:
        begin = time.perf_counter()
        _compute(matrix, large)
        least = min(least, time.perf_counter() - begin)
    return least * max(1.0, each * len(os.sched_getaffinity(0)) / quota_cores())


def work_until(is_over: Callable[[], bool]) -> None:
    """Run the products and memory passes of a step on all cores of this process until stopped."""
    matrix, large = _ones(_MATRIX, _MATRIX), _ones(SIZES["cpu"].large // 4)
    while not is_over():
        _compute(matrix, large)


def _compute(matrix: torch.Tensor, large: torch.Tensor) -> None:
    for _ in range(_PRODUCTS):
        torch.mm(matrix, matrix)
    for _ in range(_SWEEPS):
        large.mul_(1.0)


def _gpu_product_seconds() -> float:
    """Return the minimum seconds of a product if the GPUs are of different kinds, otherwise 1."""
    names = gathered(torch.cuda.get_device_name(_default_device()), str)
    if len(set(names)) == 1:
        return 1.0
    matrix, clock = _ones(_MATRIX_ON_GPU, _MATRIX_ON_GPU), Clock(_default_device())
    dist.barrier()
    return min(clock.seconds(lambda: torch.mm(matrix, matrix)) for _ in range(_PRODUCTS))


def _cpu_product_seconds() -> float:
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
    matrix, large = _ones(_MATRIX, _MATRIX), _ones(SIZES["cpu"].large // 4)
    dist.barrier()
    end = time.perf_counter() + _COMPUTING_SECONDS
    found: list[float] = []
    while time.perf_counter() < end or not found:
        begin = time.process_time()
        _compute(matrix, large)
        found.append(time.process_time() - begin)
    return sorted(found)[len(found) // 4 if withheld > 1 else 0] * withheld


def _all_reduce_seconds(
    x: torch.Tensor, rounds: int, group: dist.ProcessGroup | None = None
) -> float:
    dist.all_reduce(x, group=group)
    return median(_elapsed(lambda: dist.all_reduce(x, group=group), group) for _ in range(rounds))


def _message_figures(name: str, x: torch.Tensor, rounds: int, other: int) -> dict[str, float]:
    """Measure messages from rank 0 to another rank, as between pipeline stages: half a round trip.

    For small messages, the result includes the CPU seconds of a rank.
    """
    seconds, begin = [], 0.0
    for turn in range(rounds + 1):
        before = time.perf_counter()
        for is_back in (False, True):
            host_copy = x.cpu()  # GPU messages go through host memory
            for work in _send(host_copy, other, is_back=is_back):
                work.wait()
            if _is_on_gpu():
                x.copy_(host_copy)
                torch.cuda.synchronize()
        if turn:  # the first trip opens the connection
            seconds.append(time.perf_counter() - before)
        else:
            begin = time.thread_time()
    found = {f"hop {name}": median(seconds) / 2}
    if name == "small":
        found["hand"] = (time.thread_time() - begin) / rounds / 2
    return found if dist.get_rank() in (0, other) else dict.fromkeys(found, 0.0)


def _send(x: torch.Tensor, other: int, *, is_back: bool = False) -> list[dist.Work]:
    """Send from rank 0 to ``other``, or back with ``is_back``; other ranks do nothing."""
    rank = dist.get_rank()
    if rank not in (0, other):
        return []
    operation = dist.isend if (rank == 0) != is_back else dist.irecv
    works: list[dist.Work] = dist.batch_isend_irecv([dist.P2POp(operation, x, other - rank)])
    return works


def _slot_message_figures(
    slots: _MakesSlots, xs: Mapping[str, torch.Tensor], rounds: int
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
            if _is_on_gpu():  # without the core that waits
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
        found["slot copy"] = median(_elapsed(partial(torch.clone, x)) for _ in range(_ROUNDS))
    return found


def _slot_all_reduce_figures(
    small: torch.Tensor, large: torch.Tensor, calls: int
) -> dict[str, float]:
    """Measure all-reduces through slots; empty if these ranks share no memory.

    The large tensor is exchanged part by part, so that no part is in a cache, as with gradients.
    """
    part = SIZES[_default_device().type].middle
    parts = large.split(part // 4)
    assert dist.group.WORLD is not None
    over = Channel.of(dist.group.WORLD, _default_device())
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
    found = [_elapsed(partial(exchange, small)) for _ in range(calls)]
    part_seconds = [_elapsed(partial(exchange, part)) for _ in range(2) for part in parts]
    dist.barrier()
    slotted.close()
    middle = median(part_seconds[len(parts) :])
    return {"slotted small": median(found), "slotted middle": middle, "slotted call": cpu_seconds}


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
                if is_awaited and _is_on_gpu():
                    torch.cuda.synchronize()
        if turn:
            seconds.append(time.perf_counter() - before)
        else:
            begin = time.thread_time()
    return median(seconds) / 2, (time.thread_time() - begin) / rounds / 2


def _slowdown(
    exchange: Callable[[], Sequence[dist.Work | None]],
    alone: float,
    group: dist.ProcessGroup | None = None,
) -> float:
    """Return the share of an exchange's duration by which it delays concurrent computation."""
    size = _MATRIX_ON_GPU if _is_on_gpu() else _MATRIX
    matrix = _ones(size, size)
    product_seconds = median(
        _elapsed(lambda: torch.mm(matrix, matrix), group) for _ in range(_ROUNDS)
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
    for _ in range(_ROUNDS):
        before, during, after = (
            _elapsed(each, group) for each in (computing, overlapped, computing)
        )
        shares.append((during - (before + after) / 2) / alone)
    return median(shares)


def _elapsed(work: Callable[[], object], group: dist.ProcessGroup | None = None) -> float:
    dist.barrier(group)
    begin = time.perf_counter()
    work()
    if _is_on_gpu():
        torch.cuda.synchronize()
    return time.perf_counter() - begin


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
