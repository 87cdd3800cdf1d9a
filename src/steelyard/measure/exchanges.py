"""How long ranks on this machine take to exchange something, what that takes of their cores, and
how fast each of them computes.

Starts the ranks, each on its part of the cores, and lets them all-reduce. Not for exchanging in a
step: the operators of torch do that. Ranks that stand elsewhere than here are started by whoever
put them there, with this module as their command, and ``fitted`` makes figures of what they say.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist

from steelyard.core.cluster import Link
from steelyard.core.collective import GLOO, THROUGH_SLOTS, Exchange
from steelyard.core.errors import BadInput, RunFailed
from steelyard.core.machine import are_cores_alike, cores_of, quota_cores
from steelyard.core.pinned import Edge, Rounds
from steelyard.exchange.channel import Channel
from steelyard.exchange.pinned import Pinned
from steelyard.exchange.slotted import Slotted
from steelyard.exchange.turns import take_turns
from steelyard.measure.cache import CostCache

_SMALL_BYTES, _MIDDLE_BYTES, _LARGE_BYTES = 4096, 1 << 20, 16 << 20
# Several ranks of a core, on a machine that others share, have taken more than two minutes.
_ROUNDS, _FEW_ROUNDS, _SECONDS = 9, 3, 600
# What takes longer does not show more of how it disturbs.
_LONG_SECONDS = 0.2
_MATRIX = 256
_DOUBT = 0.15
_FIGURES = ("latency", "rate", "call", "disturbs")
# Of messages from one rank to the next.
_HANDED = ("hop", "hand", "hand rate", "hand disturbs")
# Of messages through slots in memory that ranks share.
_SLOTS = ("slot hop", "slot rate", "slot hand")
# Of what all exchange so.
_SLOTTED = ("slotted call", "slotted hop", "slotted rate")
# What is remembered is above zero.
_NEXT_TO_NONE = 1e-12
# As in a step, most of the time goes into products, and some into passes over memory.
_COMPUTING_SECONDS, _WINDOWS, _PRODUCTS, _SWEEPS = 4.0, 3, 64, 6
# Ranks on equal cores differ by as much, by what else the machine does.
_ALIKE_SHARE = 0.15


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Of the ranks of this machine: what joins them where all exchange something, and where one
    hands something to another, and both through memory that they share, where they can; and how
    fast each computes beside the fastest, no speeds where they do not differ by more than the
    doubt."""

    link: Link
    handing: Link
    speeds: tuple[float, ...]
    slots: Link | None
    slotted: Link | None


def measured_ranks(num_ranks: int, *, cache: CostCache | None = None) -> Measured:
    """So many ranks of gloo on this machine; measured once and remembered."""
    context = context_of(num_ranks)
    found = cache.read_rates(context) if cache else {}
    speeds_of = map(_speed_of, range(num_ranks))
    if not found.keys() >= {*_FIGURES, *_HANDED, *_SLOTS, *_SLOTTED, *speeds_of}:
        found = fitted(_said(num_ranks))
        if cache:
            # Another process may have been first.
            found = {**found, **cache.read_rates(context)}
            cache.write_rates(context, found)
    link = Link(
        kind="loopback",
        latency_seconds=found["latency"],
        bytes_per_second=found["rate"],
        doubt=_DOUBT,
        call_seconds=found["call"],
        disturbs=found["disturbs"],
    )
    handing = replace(
        link,
        latency_seconds=found["hop"],
        bytes_per_second=found["hand rate"],
        call_seconds=found["hand"],
        disturbs=found["hand disturbs"],
    )
    speeds = tuple(found[_speed_of(rank)] for rank in range(num_ranks))
    slots = Link(
        kind="memory that ranks share",
        latency_seconds=found["slot hop"],
        bytes_per_second=found["slot rate"],
        doubt=_DOUBT,
        call_seconds=found["slot hand"],
        # Who sends a message writes it itself.
        disturbs=1.0,
    )
    slotted = replace(
        slots,
        latency_seconds=found["slotted hop"],
        bytes_per_second=found["slotted rate"],
        call_seconds=found["slotted call"],
    )
    return Measured(
        link=link,
        handing=handing,
        speeds=speeds if min(speeds) < 1 else (),
        slots=slots if slots.bytes_per_second > _NEXT_TO_NONE else None,
        slotted=slotted if slotted.bytes_per_second > _NEXT_TO_NONE else None,
    )


def _speed_of(rank: int) -> str:
    return f"speed of rank {rank}"


def context_of(num_ranks: int) -> str:
    """Under which the figures of so many ranks are remembered."""
    cores = len(cores_of(0, 1))
    said = f"{num_ranks} ranks of gloo in turn, messages apart, slots watched, on {cores} cores"
    return f"{said}, torch {torch.__version__}"


def fitted(said: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """A line through the times of a small and two large exchanges, as a ring sends them, and one
    through those of messages from one rank to the next; of what each rank said, the slowest
    counts."""
    num_ranks, speeds = len(said), _speeds(said)
    timed = {name: max(one[name] for one in said) for name in said[0]}
    small, middle, large = (
        GLOO.collective(Exchange.ALL_REDUCE, axis="", num_ranks=num_ranks, nbytes=nbytes)
        for nbytes in (_SMALL_BYTES, _MIDDLE_BYTES, _LARGE_BYTES)
    )
    seconds = timed["large"] - timed["middle"]
    rate = (large.sent_bytes - middle.sent_bytes) / max(seconds, _NEXT_TO_NONE)
    latency = (timed["small"] - small.sent_bytes / rate) / small.hops
    return {
        "latency": max(latency, _NEXT_TO_NONE),
        "rate": rate,
        "call": max(timed["call"] / small.hops, _NEXT_TO_NONE),
        "disturbs": _slowing("disturbs", said, speeds),
        **_handed_on(timed),
        "hand disturbs": _slowing("hand disturbs", said, speeds),
        **_through_slots(timed),
        **_exchanged_through_slots(timed, num_ranks),
        **{_speed_of(rank): speed for rank, speed in enumerate(speeds)},
    }


def _slowing(what: str, said: Sequence[Mapping[str, float]], speeds: Sequence[float]) -> float:
    """What is taken of a slow rank is priced by its speed again."""
    most = max(one[what] * speed for one, speed in zip(said, speeds, strict=True))
    return min(1.0, max(most, _NEXT_TO_NONE))


def _handed_on(timed: Mapping[str, float]) -> dict[str, float]:
    seconds = max(timed["hop middle"] - timed["hop small"], _NEXT_TO_NONE)
    rate = (_MIDDLE_BYTES - _SMALL_BYTES) / seconds
    return {
        "hop": max(timed["hop small"] - _SMALL_BYTES / rate, _NEXT_TO_NONE),
        "hand": max(timed["hand"], _NEXT_TO_NONE),
        "hand rate": rate,
    }


def _through_slots(timed: Mapping[str, float]) -> dict[str, float]:
    """Next to none of anything where there is no memory to share. What two ranks' cores do for a
    message is not on its way."""
    if "slot small" not in timed:
        return dict.fromkeys(_SLOTS, _NEXT_TO_NONE)
    seconds = max(timed["slot large"] - timed["slot small"], _NEXT_TO_NONE)
    return {
        "slot hop": max(timed["slot small"] - 2 * timed["slot hand"], _NEXT_TO_NONE),
        "slot rate": (_MIDDLE_BYTES - _SMALL_BYTES) / seconds,
        "slot hand": max(timed["slot hand"], _NEXT_TO_NONE),
    }


def _exchanged_through_slots(timed: Mapping[str, float], num_ranks: int) -> dict[str, float]:
    if "slotted small" not in timed:
        return dict.fromkeys(_SLOTTED, _NEXT_TO_NONE)
    small, middle = (
        THROUGH_SLOTS.collective(Exchange.ALL_REDUCE, axis="", num_ranks=num_ranks, nbytes=nbytes)
        for nbytes in (_SMALL_BYTES, _MIDDLE_BYTES)
    )
    seconds = max(timed["slotted middle"] - timed["slotted small"], _NEXT_TO_NONE)
    call = timed["slotted call"] / small.hops
    return {
        "slotted call": max(call, _NEXT_TO_NONE),
        "slotted hop": max(timed["slotted small"] / small.hops - call, _NEXT_TO_NONE),
        "slotted rate": (middle.sent_bytes - small.sent_bytes) / seconds,
    }


def _speeds(said: Sequence[Mapping[str, float]]) -> list[float]:
    """Those within the doubt of the fastest are taken to be as fast."""
    least = min(one["product"] for one in said)
    speeds = [least / one["product"] for one in said]
    return [1.0 if speed > 1 - _ALIKE_SHARE else speed for speed in speeds]


def _said(num_ranks: int) -> list[dict[str, float]]:
    """What each rank of this machine measured."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "steelyard.measure.exchanges", folder, str(num_ranks)]
        ranks = [
            subprocess.Popen(
                [*command, str(rank)],
                # Nothing listens beyond this machine.
                env={**os.environ, "GLOO_SOCKET_IFNAME": "lo"},
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank in range(num_ranks)
        ]
        try:
            failures = [rank.communicate(timeout=_SECONDS)[1] for rank in ranks]
        except subprocess.TimeoutExpired:
            raise RunFailed(
                f"{num_ranks} ranks could not be measured within {_SECONDS} s",
                expected="ranks on this machine that each come to compute for a while",
                remedy="stop what else runs here, or plan for fewer ranks",
            ) from None
        finally:
            for rank in ranks:
                rank.kill()
                rank.wait()
        failed = [n for n, rank in enumerate(ranks) if rank.returncode]
        if failed:
            said = (failures[failed[0]].strip().splitlines() or ["nothing was said"])[-1]
            raise RunFailed(
                f"{num_ranks} ranks could not be measured: rank {failed[0]} says {said[:120]}",
                expected="ranks on this machine that reach one another over its loopback",
                remedy="try: python -m torch.distributed.run --standalone --nproc-per-node 2",
            )
        return [
            json.loads((Path(folder) / f"{rank}.json").read_text()) for rank in range(num_ranks)
        ]


def main(folder: str, num_ranks: int, rank: int) -> None:
    cores = cores_of(rank, num_ranks)
    os.sched_setaffinity(0, cores)
    torch.set_num_threads(len(cores))
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/rendezvous",
        rank=rank,
        world_size=num_ranks,
        timeout=timedelta(seconds=_SECONDS),
    )
    take_turns()  # as in a step
    with torch.no_grad():
        # What neighbours do of a few seconds is another figure some seconds later.
        products = [_product_seconds()]
        figures = _figures()
        products += [_product_seconds() for _ in range(_WINDOWS - 1)]
        figures["product"] = median(products)
    (Path(folder) / f"{rank}.json").write_text(json.dumps(figures))
    dist.barrier()
    dist.destroy_process_group()


def _figures() -> dict[str, float]:
    small, middle, large = (
        torch.ones(nbytes // 4) for nbytes in (_SMALL_BYTES, _MIDDLE_BYTES, _LARGE_BYTES)
    )
    begin, calls = time.thread_time(), 3 * _ROUNDS
    seconds = {"small": _seconds(small, calls)}
    seconds["call"] = (time.thread_time() - begin) / calls
    seconds |= {"middle": _seconds(middle, calls), "large": _seconds(large, _ROUNDS)}
    # Ranks do the same only where they are told the same.
    is_long = {name: _slowest(seconds[name]) > _LONG_SECONDS for name in ("middle", "large")}
    few = _FEW_ROUNDS if is_long["middle"] else calls
    seconds |= _handed("small", small, calls) | _handed("middle", middle, few)
    seconds |= _handed_in_slots({"small": small, "large": middle}, calls)
    seconds |= _exchanged_in_slots(small, large, calls)
    long = "middle" if is_long["large"] else "large"
    x, alone = {"middle": middle, "large": large}[long], seconds[long]
    seconds["disturbs"] = _disturbs(lambda: [dist.all_reduce(x, async_op=True)], alone)
    if dist.get_rank() < 2:
        alone = seconds["hop middle"] * x.nbytes / middle.nbytes
    slowed = _disturbs(lambda: _hand(x), alone)
    return {**seconds, "hand disturbs": slowed if dist.get_rank() < 2 else 0.0}


def _slowest(seconds: float) -> float:
    """Of what each rank took."""
    most = torch.tensor(seconds, dtype=torch.float64)
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    return float(most)


def measured_now(before: Link) -> Link:
    """What joins the ranks of this group, which all come together in the middle of a run; what an
    exchange takes of a core is as ``before``. The same on each of them."""
    num_ranks = dist.get_world_size()
    with torch.no_grad():
        small, middle = (torch.ones(nbytes // 4) for nbytes in (_SMALL_BYTES, _MIDDLE_BYTES))
        timed = torch.tensor(
            [_seconds(small, _ROUNDS), _seconds(middle, _FEW_ROUNDS)], dtype=torch.float64
        )
        dist.all_reduce(timed, op=dist.ReduceOp.MAX)
    least, more = map(float, timed)
    sizes = (_SMALL_BYTES, _MIDDLE_BYTES)
    one, other = (
        GLOO.collective(Exchange.ALL_REDUCE, axis="", num_ranks=num_ranks, nbytes=nbytes)
        for nbytes in sizes
    )
    rate = (other.sent_bytes - one.sent_bytes) / max(more - least, _NEXT_TO_NONE)
    latency = max((least - one.sent_bytes / rate) / one.hops, _NEXT_TO_NONE)
    return replace(before, latency_seconds=latency, bytes_per_second=rate, doubt=_DOUBT)


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
    matrix, large = torch.ones(_MATRIX, _MATRIX), torch.ones(_LARGE_BYTES // 4)
    dist.barrier()
    end = time.perf_counter() + _COMPUTING_SECONDS
    found: list[float] = []
    while time.perf_counter() < end or not found:
        begin = time.process_time()
        for _ in range(_PRODUCTS):
            torch.mm(matrix, matrix)
        for _ in range(_SWEEPS):
            large.mul_(1.0)
        found.append(time.process_time() - begin)
    return sorted(found)[len(found) // 4 if withheld > 1 else 0] * withheld


def _seconds(x: torch.Tensor, rounds: int) -> float:
    dist.all_reduce(x)
    return median(_took(lambda: dist.all_reduce(x)) for _ in range(rounds))


def _handed(name: str, x: torch.Tensor, rounds: int) -> dict[str, float]:
    """What a message takes from the first rank to the second, as stages hand theirs on, and what of
    a small one is the time of their cores; half of there and back."""
    seconds, begin = [], 0.0
    for turn in range(rounds + 1):
        before = time.perf_counter()
        for is_back in (False, True):
            for work in _hand(x, is_back=is_back):
                work.wait()
        if turn:  # the first finds the connection
            seconds.append(time.perf_counter() - before)
        else:
            begin = time.thread_time()
    found = {f"hop {name}": median(seconds) / 2}
    if name == "small":
        found["hand"] = (time.thread_time() - begin) / rounds / 2
    return found if dist.get_rank() < 2 else dict.fromkeys(found, 0.0)


def _hand(x: torch.Tensor, *, is_back: bool = False) -> list[dist.Work]:
    """From the first rank to the second, or back; nothing of others."""
    rank = dist.get_rank()
    if rank > 1:
        return []
    way = dist.isend if rank == int(is_back) else dist.irecv
    works: list[dist.Work] = dist.batch_isend_irecv([dist.P2POp(way, x, 1 - rank)])
    return works


def _handed_in_slots(xs: Mapping[str, torch.Tensor], rounds: int) -> dict[str, float]:
    """The same through slots; nothing where these ranks share no memory."""
    ends = ((0, 1), (1, 0))
    edges = [
        Edge(source=source, target=target, sizes=(x.nbytes,), count=1, holds_all=True)
        for x in xs.values()
        for source, target in ends
    ]  # fmt: skip
    assert dist.group.WORLD is not None
    try:
        pinned = Pinned(edges, group=dist.group.WORLD)
    except BadInput:
        return {}
    # What it takes of a core, and as after a long wait.
    pinned.watches = False
    pinned.begin()
    rank, found = dist.get_rank(), {}
    for number, (name, x) in enumerate(xs.items()):
        found[f"slot {name}"], hand = _there_and_back(pinned, 2 * number, x, rounds)
        if name == "small":
            found["slot hand"] = hand
        if rank > 1:
            found = dict.fromkeys(found, 0.0)
    pinned.settle()
    dist.barrier()
    pinned.close()
    return found


def _exchanged_in_slots(small: torch.Tensor, large: torch.Tensor, calls: int) -> dict[str, float]:
    """All-reduces through slots; nothing where these ranks share no memory. One after another part
    of what is large, as gradients are that no cache holds any more."""
    parts = large.split(_MIDDLE_BYTES // 4)
    assert dist.group.WORLD is not None
    over = Channel.of(dist.group.WORLD)
    rounds = Rounds(
        num_ranks=over.num_ranks, part_bytes=_MIDDLE_BYTES, sum_bytes=_MIDDLE_BYTES, count=2
    )
    try:
        slotted = Slotted(rounds, over)
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
    pinned: Pinned, index: int, x: torch.Tensor, rounds: int
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
        if turn:
            seconds.append(time.perf_counter() - before)
        else:
            begin = time.thread_time()
    return median(seconds) / 2, (time.thread_time() - begin) / rounds / 2


def _disturbs(exchange: Callable[[], Sequence[dist.Work | None]], alone: float) -> float:
    """By what share of the time that it takes an exchange slows what runs beside it."""
    matrix = torch.ones(_MATRIX, _MATRIX)
    one = median(_took(lambda: torch.mm(matrix, matrix)) for _ in range(_ROUNDS))
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
        before, during, after = _took(computing), _took(beside), _took(computing)
        shares.append((during - (before + after) / 2) / alone)
    return median(shares)


def _took(work: Callable[[], object]) -> float:
    dist.barrier()
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
