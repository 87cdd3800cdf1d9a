"""What a rank does to be measured: how long the ranks of its group take to exchange something, what
that takes of its core, and how fast it computes.

As a command it joins ranks that somebody started, each on its part of the cores, or on its GPU.
Tensors are made where torch makes them by default, which is there meanwhile. Not for exchanging
in a step: the operators of torch do that. Not for starting ranks, nor for what their figures come
to: see probe.py.
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
from steelyard.comm.shared_memory.transport import pinned_among
from steelyard.errors import BadInput
from steelyard.hardware.cluster import Link
from steelyard.hardware.host_os import are_cores_alike, cores_of, quota_cores
from steelyard.ir.collective import GLOO, Exchange
from steelyard.ir.message_slots import CollectiveSlots, SlotSpec
from steelyard.measure.operators.timer import Clock


class ExchangeSizes(NamedTuple):
    """Of what is exchanged: nothing to speak of; enough to show a rate; more than caches hold."""

    small: int
    middle: int
    large: int


SIZES = {
    "cpu": ExchangeSizes(4096, 1 << 20, 16 << 20),
    "cuda": ExchangeSizes(4096, 16 << 20, 128 << 20),
}


def sizes_of(home: torch.device, hosts: int) -> ExchangeSizes:
    """What lies on GPUs goes over a network, too, where large sizes would take minutes."""
    return SIZES["cpu" if hosts > 1 else home.type]


# Several ranks of a core, on a machine that others share, have taken more than two minutes.
SECONDS = 600
DOUBT = 0.15
# What is remembered is above zero.
NEXT_TO_NONE = 1e-12
_ROUNDS, _FEW_ROUNDS = 9, 3
# What takes longer does not show more of how it disturbs.
_LONG_SECONDS = 0.2
# And what takes so long shows a rate, beside what small messages take.
_SHORT_SECONDS = 0.02
_MATRIX, _MATRIX_ON_GPU = 256, 4096
# As in a step, most of the time goes into products, and some into passes over memory.
_COMPUTING_SECONDS, _WINDOWS, _PRODUCTS, _SWEEPS = 4.0, 3, 64, 6
# Ranks compute for so long between two exchanges to see how far apart they arrive, so many times.
_SKEWED = {"short": (0.004, 60), "long": (0.04, 24)}
# The rarest waits are somebody else's work on this machine.
_USUAL_WAITS = 0.9
_MakesSlots = Callable[..., SharedMemoryTransport]


def main(folder: str, num_ranks: int, rank: int, device: str) -> None:
    cores = cores_of(rank, num_ranks)
    os.sched_setaffinity(0, cores)
    torch.set_num_threads(len(cores))
    home = CPU
    if device == "cuda":
        home = torch.device("cuda", rank % torch.cuda.device_count())
        torch.cuda.set_device(home)
    dist.init_process_group(
        backend_for(home, ranks=num_ranks),
        init_method=f"file://{folder}/rendezvous",
        rank=rank,
        world_size=num_ranks,
        timeout=timedelta(seconds=SECONDS),
    )
    (Path(folder) / f"{rank}.json").write_text(json.dumps(figures_of_this_rank(home=home)))
    dist.barrier()
    dist.destroy_process_group()


def figures_of_this_rank(*, hosts: int = 1, home: torch.device = CPU) -> dict[str, float]:
    """What this rank of the group measures, while all others of it do; on several hosts slots are
    written by NIXL, where it is and each has one rank, and between their GPUs there are none; and
    nobody says of their cores that they are alike."""
    take_turns()  # as in a step
    with torch.no_grad(), _at(home):
        each = dist.get_world_size() // hosts
        product_seconds = _product_seconds
        if hosts > 1:
            # What neighbours do of a few seconds is another figure some seconds later.
            product_seconds = partial(_product_seconds_of_host, each)
        slots: _MakesSlots | None = (
            SharedMemoryTransport if hosts == 1 else pinned_among if each == 1 else None
        )
        if _is_on_gpu():
            product_seconds = _product_seconds_of_gpu
            slots = partial(pinned_among, device=home) if hosts == 1 else None
        products = [product_seconds()]
        # Messages are measured where the slowest are.
        other, sizes = (each if hosts > 1 else 1), sizes_of(home, hosts)
        figures = _figures(sizes, slots=slots, other=other)
        if hosts > 1 and each > 1:
            figures |= _among_neighbours(each)
        products += [product_seconds() for _ in range(_WINDOWS - 1)]
        figures["product"] = median(products)
        if not _is_on_gpu():
            figures |= _arrival_skew()
    return figures


def _arrival_skew() -> dict[str, float]:
    """Measures the wait at an exchange after a short and a long time of computing, and these times.

    All ranks compute the same. The quickest exchange counts as no wait."""
    matrix, word = _ones(_MATRIX, _MATRIX), _ones(1)
    one = _slowest(median(_took(lambda: torch.mm(matrix, matrix)) for _ in range(_ROUNDS)))
    figures = {}
    for name, (seconds, rounds) in _SKEWED.items():
        products = max(1, round(seconds / one))
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
        usual = sorted(waited)[: round(_USUAL_WAITS * rounds)]
        figures[f"skew {name}"] = fmean(usual) - usual[0]
        figures[f"skew {name} after"] = median(computed)
    return figures


def _among_neighbours(each: int) -> dict[str, float]:
    """What exchanges of the ranks of a host take, while those of other hosts do the same; each
    host begins by itself, as a word to another one may take longer than all that is measured."""
    own = None
    for first in range(0, dist.get_world_size(), each):
        group = dist.new_group(list(range(first, first + each)))
        own = group if first <= dist.get_rank() < first + each else own
    small, middle, large = (_ones(nbytes // 4) for nbytes in SIZES[_here().type])
    often = 3 * _ROUNDS
    timed = ("small", small, often), ("middle", middle, often), ("large", large, _ROUNDS)
    found = {f"near {name}": _seconds(x, rounds, group=own) for name, x, rounds in timed}
    found["near disturbs"] = _disturbs(
        lambda: [dist.all_reduce(large, group=own, async_op=True)], found["near large"], own
    )
    dist.destroy_process_group(own)
    return found


def exchanged_among(ranks: Sequence[int], sizes: ExchangeSizes) -> dict[str, float]:
    """Seconds of all-reduces of a small, a middle and a large tensor among these ranks of the
    group, how much one disturbs what is computed meanwhile, and the least seconds of the first two,
    by which it is seen later whether the link has become another. Of the slowest rank each, and the
    same on all ranks of the group, which all call this."""
    names = (*sizes._fields, "disturbs", *(f"least {name}" for name in sizes._fields[:2]))
    group = dist.new_group([*ranks])
    figures = torch.zeros(len(names), dtype=torch.float64, device=CPU)
    if dist.get_rank() in ranks:
        small, middle, large = (_ones(nbytes // 4) for nbytes in sizes)
        found = {"small": _seconds(small, 3 * _ROUNDS, group)}
        found["middle"] = _seconds(middle, _FEW_ROUNDS, group)
        found["large"] = _seconds(large, _FEW_ROUNDS, group)
        # All ranks of these have to do the same.
        slowest = torch.tensor(found["large"], dtype=torch.float64, device=CPU)
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX, group=group)
        x, alone = (large, "large") if slowest <= _LONG_SECONDS else (middle, "middle")
        found["disturbs"] = _disturbs(
            lambda: [dist.all_reduce(x, group=group, async_op=True)], found[alone], group
        )
        for name, tensor, rounds in (
            ("small", small, 3 * _ROUNDS),
            ("middle", middle, _FEW_ROUNDS),
        ):
            exchange = partial(dist.all_reduce, tensor, group=group)
            found[f"least {name}"] = min(_took(exchange, group) for _ in range(rounds))
        figures.copy_(torch.tensor([found[name] for name in names], dtype=torch.float64))
        dist.destroy_process_group(group)
    dist.all_reduce(figures, op=dist.ReduceOp.MAX)
    return dict(zip(names, map(float, figures), strict=True))


def _figures(sizes: ExchangeSizes, *, slots: _MakesSlots | None, other: int) -> dict[str, float]:
    """``other`` is the rank to which the first hands something."""
    small, middle, large = (_ones(nbytes // 4) for nbytes in sizes)
    begin, calls = time.thread_time(), 3 * _ROUNDS
    seconds = {"small": _seconds(small, calls)}
    seconds["call"] = (time.thread_time() - begin) / calls
    if _is_on_gpu():  # who waits for one has a core at work
        seconds["call"] = median(_issued(small) for _ in range(calls))
    seconds["middle"] = _seconds(middle, calls)
    # Ranks do the same only where they are told the same.
    is_long = {"middle": _slowest(seconds["middle"]) > _LONG_SECONDS}
    few = _FEW_ROUNDS if is_long["middle"] else calls
    seconds["large"] = _seconds(large, min(few, _ROUNDS))
    is_long["large"] = _slowest(seconds["large"]) > _LONG_SECONDS
    seconds |= _handed("small", small, calls, other) | _handed("middle", middle, few, other)
    in_slots = _handed_in_slots(slots, {"small": small, "large": middle}, calls) if slots else {}
    seconds |= in_slots
    if in_slots:
        seconds |= _exchanged_in_slots(small, large, calls)
    long = "middle" if is_long["large"] else "large"
    x, alone = {"middle": middle, "large": large}[long], seconds[long]
    seconds["disturbs"] = _disturbs(lambda: [dist.all_reduce(x, async_op=True)], alone)
    if dist.get_rank() in (0, other):
        alone = seconds["hop middle"] * x.nbytes / middle.nbytes
    slowed = _disturbs(lambda: _hand(x.cpu(), other), alone)
    return {**seconds, "hand disturbs": slowed if dist.get_rank() in (0, other) else 0.0}


def _ones(*shape: int) -> torch.Tensor:
    """Four bytes each, whatever format the training script makes tensors in."""
    return torch.ones(shape, dtype=torch.float32)


def _at(home: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Each call takes longer within what says so: where it is so anyway, nothing does."""
    return contextlib.nullcontext() if _here() == home else home


def _here() -> torch.device:
    return torch.get_default_device()


def _is_on_gpu() -> bool:
    return _here().type == "cuda"


def _issued(x: torch.Tensor) -> float:
    """Until an exchange is on its way, and this rank goes on."""
    begin = time.perf_counter()
    work = dist.all_reduce(x, async_op=True)
    seconds = time.perf_counter() - begin
    assert work is not None
    work.wait()
    torch.cuda.synchronize()
    return seconds


def _slowest(seconds: float) -> float:
    """Of what each rank took."""
    most = torch.tensor(seconds, dtype=torch.float64)
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    return float(most)


def measured_now(before: Link, *, hosts: int = 1, home: torch.device = CPU) -> Link:
    """The link that joins the ranks of this group, which all come together between two steps of a
    run; what an exchange takes of a core is as ``before``. The same on each of them. It takes some
    tenths of a second on any link: what is exchanged grows until that takes long enough to count.
    """
    num_ranks, sizes = dist.get_world_size(), sizes_of(home, hosts)
    with torch.no_grad(), _at(home):
        least = _slowest(_seconds(_ones(sizes.small // 4), _FEW_ROUNDS))
        nbytes, more = sizes.small, least
        while nbytes < sizes.middle and more < _SHORT_SECONDS:
            nbytes = min(sizes.middle, 16 * nbytes)
            more = _slowest(_seconds(_ones(nbytes // 4), 1))
        if more < _LONG_SECONDS:
            more = _slowest(_seconds(_ones(nbytes // 4), _FEW_ROUNDS))
    one, other = (
        GLOO.collective(Exchange.ALL_REDUCE, axis="", num_ranks=num_ranks, nbytes=size)
        for size in (sizes.small, nbytes)
    )
    rate = (other.sent_bytes - one.sent_bytes) / max(more - least, NEXT_TO_NONE)
    latency = max((least - one.sent_bytes / rate) / one.hops, NEXT_TO_NONE)
    return replace(before, latency_seconds=latency, bytes_per_second=rate, doubt=DOUBT)


def rates_now(*, hosts: int) -> tuple[float, ...]:
    """The bytes a second that each further host exchanges with the first, one after the other; the
    same on each rank, all of which come together for it between two steps of a run."""
    each, small = dist.get_world_size() // hosts, SIZES["cpu"].small
    found = []
    with torch.no_grad(), _at(CPU):
        for host in range(1, hosts):
            nbytes, more = small, _slowest(_there_and_back_once(small, host * each))
            least = more
            while nbytes < SIZES["cpu"].middle and more < _SHORT_SECONDS:
                nbytes = min(SIZES["cpu"].middle, 16 * nbytes)
                more = _slowest(_there_and_back_once(nbytes, host * each))
            found.append((nbytes - small) / max(more - least, NEXT_TO_NONE))
    return tuple(found)


def _there_and_back_once(nbytes: int, other: int) -> float:
    """Half of it, between the first rank and another; nothing of others."""
    x, begin = _ones(nbytes // 4), time.perf_counter()
    for is_back in (False, True):
        for work in _hand(x, other, is_back=is_back):
            work.wait()
    return (time.perf_counter() - begin) / 2 if dist.get_rank() in (0, other) else 0.0


def probe_link(home: torch.device = CPU) -> tuple[float, float]:
    """What a small and a larger exchange of all ranks, on several hosts, take at best, the same on
    each of them: so it is seen in a moment whether a link has become another."""
    with torch.no_grad(), _at(home):
        best, sizes = [], sizes_of(home, 2)[:2]
        for nbytes, rounds in zip(sizes, (3 * _ROUNDS, _FEW_ROUNDS), strict=True):
            x = _ones(nbytes // 4)
            dist.all_reduce(x)
            best.append(min(_took(partial(dist.all_reduce, x)) for _ in range(rounds)))
        timed = torch.tensor(best, dtype=torch.float64)
        dist.all_reduce(timed, op=dist.ReduceOp.MAX)
    small, middle = map(float, timed)
    return small, middle


def quick_product_seconds(each: int) -> float:
    """The time of some work on a rank's cores of a host, looked at for a second."""
    with _at(CPU):
        return _product_seconds_of_host(each, _COMPUTING_SECONDS / 4)


def _product_seconds_of_host(each: int, computing_seconds: float = 0.0) -> float:
    """The time of some work on a rank's cores of a host, of which all have a quota together: the
    least, of a while."""
    dist.barrier()
    end = time.perf_counter() + (computing_seconds or _COMPUTING_SECONDS)
    least = math.inf
    matrix, large = _ones(_MATRIX, _MATRIX), _ones(SIZES["cpu"].large // 4)
    while time.perf_counter() < end or least == math.inf:
        begin = time.perf_counter()
        _work(matrix, large)
        least = min(least, time.perf_counter() - begin)
    return least * max(1.0, each * len(os.sched_getaffinity(0)) / quota_cores())


def work_until(is_over: Callable[[], bool]) -> None:
    """As in a step, on all of this process's cores."""
    matrix, large = _ones(_MATRIX, _MATRIX), _ones(SIZES["cpu"].large // 4)
    while not is_over():
        _work(matrix, large)


def _work(matrix: torch.Tensor, large: torch.Tensor) -> None:
    for _ in range(_PRODUCTS):
        torch.mm(matrix, matrix)
    for _ in range(_SWEEPS):
        large.mul_(1.0)


def _product_seconds_of_gpu() -> float:
    """The least, of a while, where they are of several kinds."""
    names = gathered(torch.cuda.get_device_name(_here()), str)
    if len(set(names)) == 1:
        return 1.0
    matrix, clock = _ones(_MATRIX_ON_GPU, _MATRIX_ON_GPU), Clock(_here())
    dist.barrier()
    return min(clock.seconds(lambda: torch.mm(matrix, matrix)) for _ in range(_PRODUCTS))


def _product_seconds() -> float:
    """The processor's time of some work, while all ranks do it; more, where the quota of this
    rank's control group is less than its cores. What others take of a core for a moment is not
    counted: it would be another figure the next time. For the same reason the least of a few, and
    no figure at all of cores that the kernel says are alike, of which none is withheld: one whose
    other half is busy seems to be half a core for as long as that lasts. One that is withheld is
    somebody else's meanwhile, and its caches too: there the least is not what steps take, and the
    usual is of what else goes on just then, so that a quarter of the way is taken."""
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
        _work(matrix, large)
        found.append(time.process_time() - begin)
    return sorted(found)[len(found) // 4 if withheld > 1 else 0] * withheld


def _seconds(x: torch.Tensor, rounds: int, group: dist.ProcessGroup | None = None) -> float:
    dist.all_reduce(x, group=group)
    return median(_took(lambda: dist.all_reduce(x, group=group), group) for _ in range(rounds))


def _handed(name: str, x: torch.Tensor, rounds: int, other: int) -> dict[str, float]:
    """What a message takes from the first rank to another, as stages hand theirs on, and what of a
    small one is the time of their cores; half of there and back."""
    seconds, begin = [], 0.0
    for turn in range(rounds + 1):
        before = time.perf_counter()
        for is_back in (False, True):
            near = x.cpu()  # as messages of a GPU go
            for work in _hand(near, other, is_back=is_back):
                work.wait()
            if _is_on_gpu():
                x.copy_(near)
                torch.cuda.synchronize()
        if turn:  # the first finds the connection
            seconds.append(time.perf_counter() - before)
        else:
            begin = time.thread_time()
    found = {f"hop {name}": median(seconds) / 2}
    if name == "small":
        found["hand"] = (time.thread_time() - begin) / rounds / 2
    return found if dist.get_rank() in (0, other) else dict.fromkeys(found, 0.0)


def _hand(x: torch.Tensor, other: int, *, is_back: bool = False) -> list[dist.Work]:
    """From the first rank to that one, or back; nothing of others."""
    rank = dist.get_rank()
    if rank not in (0, other):
        return []
    way = dist.isend if (rank == 0) != is_back else dist.irecv
    works: list[dist.Work] = dist.batch_isend_irecv([dist.P2POp(way, x, other - rank)])
    return works


def _handed_in_slots(
    slots: _MakesSlots, xs: Mapping[str, torch.Tensor], rounds: int
) -> dict[str, float]:
    """The same through slots; nothing where these ranks have none."""
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
    # What it takes of a core, and as after a long wait.
    pinned.watches = False
    pinned.begin()
    rank, found = dist.get_rank(), {}
    for number, (name, x) in enumerate(xs.items()):
        found[f"slot {name}"], hand = _there_and_back(pinned, 2 * number, x, rounds)
        if name == "small":
            if _is_on_gpu():  # without what waits for it
                pinned.begin()
                _, hand = _there_and_back(pinned, 2 * number, x, rounds, is_awaited=False)
            found["slot hand"] = hand
        if rank > 1:
            found = dict.fromkeys(found, 0.0)
    pinned.settle()
    dist.barrier()
    pinned.close()
    if isinstance(pinned, RdmaTransport):
        x = xs["large"]
        found["slot copy"] = median(_took(partial(torch.clone, x)) for _ in range(_ROUNDS))
    return found


def _exchanged_in_slots(small: torch.Tensor, large: torch.Tensor, calls: int) -> dict[str, float]:
    """All-reduces through slots; nothing where these ranks share no memory. One after another part
    of what is large, as gradients are that no cache holds any more."""
    part = SIZES[_here().type].middle
    parts = large.split(part // 4)
    assert dist.group.WORLD is not None
    over = Channel.of(dist.group.WORLD, _here())
    rounds = CollectiveSlots(num_ranks=over.num_ranks, part_bytes=part, sum_bytes=part, count=2)
    try:
        slotted = SharedMemoryCollectives(rounds, over)
    except BadInput:
        return {}
    through, op = slotted.channel, "_c10d_functional.all_reduce_.default"

    def exchange(x: torch.Tensor) -> None:
        through.waiting(through.calls[op](x, "sum", ""))

    for _ in range(2):  # memory is there from when it is first written
        exchange(parts[0])
    watches = slotted.watching(watches=False)
    begin = time.thread_time()
    for _ in range(calls):
        exchange(small)
    own = (time.thread_time() - begin) / calls
    slotted.watching(watches=watches)
    found = [_took(partial(exchange, small)) for _ in range(calls)]
    exchanged = [_took(partial(exchange, part)) for _ in range(2) for part in parts]
    dist.barrier()
    slotted.close()
    middle = median(exchanged[len(parts) :])
    return {"slotted small": median(found), "slotted middle": middle, "slotted call": own}


def _there_and_back(
    pinned: SharedMemoryTransport,
    index: int,
    x: torch.Tensor,
    rounds: int,
    *,
    is_awaited: bool = True,
) -> tuple[float, float]:
    """Half of what that takes, and half of what it takes of this rank's core."""
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


def _disturbs(
    exchange: Callable[[], Sequence[dist.Work | None]],
    alone: float,
    group: dist.ProcessGroup | None = None,
) -> float:
    """By what share of the time that it takes an exchange slows what runs beside it."""
    size = _MATRIX_ON_GPU if _is_on_gpu() else _MATRIX
    matrix = _ones(size, size)
    one = median(_took(lambda: torch.mm(matrix, matrix), group) for _ in range(_ROUNDS))
    # Longer than the exchange, so that it is hidden where it can be.
    count = max(1, round(2 * alone / one))

    def computing() -> None:
        for _ in range(count):
            torch.mm(matrix, matrix)

    def beside() -> None:
        under_way = exchange()
        computing()
        for work in under_way:
            assert work is not None
            work.wait()

    shares = []
    for _ in range(_ROUNDS):
        before, during, after = (_took(each, group) for each in (computing, beside, computing))
        shares.append((during - (before + after) / 2) / alone)
    return median(shares)


def _took(work: Callable[[], object], group: dist.ProcessGroup | None = None) -> float:
    dist.barrier(group)
    begin = time.perf_counter()
    work()
    if _is_on_gpu():
        torch.cuda.synchronize()
    return time.perf_counter() - begin


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
