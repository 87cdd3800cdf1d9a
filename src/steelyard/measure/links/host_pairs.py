"""Measures links between pairs of hosts, and collectives among the best-connected hosts.

A collective among all hosts shows only the slowest link. Here the first ranks of two hosts send
each other messages, with disjoint pairs at the same time. If some hosts are clearly better
connected than all hosts together, a collective among them is timed too. All ranks of the group take
part. Not for collectives among all ranks: see worker.py.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from statistics import median

import torch
import torch.distributed as dist

from steelyard.comm.devices import CPU
from steelyard.measure.links.exchange_sizes import ExchangeSizes
from steelyard.measure.links.exchange_timing import (
    FEW_ROUNDS,
    LONG_SECONDS,
    ROUNDS,
    all_reduce_seconds,
    elapsed,
    ones,
    slowdown,
)
from steelyard.measure.links.link_figures import ALMOST_ZERO
from steelyard.predict.rank_subsets import best_joined, better_joined

# Message sizes for a pair; the last one is used only if the one before it is fast.
_SMALL, _MIDDLE, _LARGE = 4096, 256 << 10, 1 << 20
_QUICK_SECONDS = 0.1
# Up to this many hosts, every pair is timed. With more, each host is timed with those at growing
# distances.
_MOST_WITH_ALL = 16


def measure_host_links(
    speeds: Sequence[float], *, each: int, sizes: ExchangeSizes
) -> dict[str, float]:
    """Return figures of host pairs and of the best-connected subsets, the same on every rank.

    The figures are the latency and rate of each timed pair, and the seconds of all-reduces for each
    number of hosts whose best subset is better connected than all hosts. ``speeds`` are those of
    the hosts, which have ``each`` ranks.
    """
    hosts = len(speeds)
    found = _pair_figures(hosts, each)
    seconds = pair_seconds(found, hosts)
    groups = best_joined(seconds, speeds)
    for number in better_joined(groups, seconds):
        ranks = [host * each + n for host in groups[number] for n in range(each)]
        found |= {name_of(number, what): s for what, s in _all_reduce_figures(ranks, sizes).items()}
    return found


def pair_seconds(found: Mapping[str, float], hosts: int) -> list[list[float]]:
    """Return the seconds of a message of 1 MiB between every two hosts.

    A pair that was not timed gets the slower of the two hosts' best times.
    """
    timed = {
        (i, j): found[latency_of(i, j)] + _LARGE / found[rate_of(i, j)]
        for i in range(hosts)
        for j in range(i + 1, hosts)
        if rate_of(i, j) in found
    }
    best = [
        min((s for pair, s in timed.items() if host in pair), default=0.0) for host in range(hosts)
    ]
    matrix = [
        [max(best[i], best[j]) if i != j else 0.0 for j in range(hosts)] for i in range(hosts)
    ]
    for (i, j), seconds in timed.items():
        matrix[i][j] = matrix[j][i] = seconds
    return matrix


def host_rates(found: Mapping[str, float], hosts: int) -> list[float]:
    """Return the link rate of each host in bytes per second: the rate with its best partner.

    The list is empty if pairs were not timed.
    """
    rates = [
        max((found[rate_of(*pair)] for pair in _pairs_with(host, hosts) if rate_of(*pair) in found),
            default=0.0)
        for host in range(hosts)
    ]  # fmt: skip
    return rates if all(rates) else []


def _pairs_with(host: int, hosts: int) -> Iterator[tuple[int, int]]:
    return ((min(host, o), max(host, o)) for o in range(hosts) if o != host)


def latency_of(host: int, other: int) -> str:
    return f"latency between hosts {host} and {other}"


def rate_of(host: int, other: int) -> str:
    return f"rate between hosts {host} and {other}"


def name_of(number: int, what: str) -> str:
    """Return the cache key of a figure for collectives among ``number`` hosts."""
    return f"{what} among {number} hosts"


def rounds_of_pairs(hosts: int) -> list[list[tuple[int, int]]]:
    """Return rounds of disjoint pairs.

    With few hosts, each pair occurs once; with many, each host is paired with those 1, 2, 4 ...
    after it.
    """
    if hosts <= _MOST_WITH_ALL:
        # The circle method: one host stays in place, and the others move on by one place each
        # round.
        seats: list[int | None] = [*range(hosts), *([None] if hosts % 2 else [])]
        rounds = []
        for _ in range(len(seats) - 1):
            across = zip(seats[: len(seats) // 2], reversed(seats[len(seats) // 2 :]))
            rounds.append([
                (min(a, b), max(a, b)) for a, b in across if a is not None and b is not None
            ])  # fmt: skip
            seats = [seats[0], seats[-1], *seats[1:-1]]
        return rounds
    found: list[list[tuple[int, int]]] = []
    distance = 1
    while distance < hosts:
        left = [(n, n + distance) for n in range(hosts - distance)]
        while left:
            taken: set[int] = set()
            chosen = []
            for pair in left:
                if taken.isdisjoint(pair):
                    taken |= {*pair}
                    chosen.append(pair)
            left = [pair for pair in left if pair not in chosen]
            found.append(chosen)
        distance *= 2
    return found


def _all_reduce_figures(ranks: Sequence[int], sizes: ExchangeSizes) -> dict[str, float]:
    """Return all-reduce figures of some ranks of the group, as the maximum over these ranks.

    The figures are the seconds of all-reduces of a small, a medium and a large tensor, the slowdown
    of concurrent computation, and the minimum seconds of the first two. From the last ones, a later
    run detects a changed link. All ranks of the group call this and get the same result.
    """
    names = (*sizes._fields, "disturbs", *(f"least {name}" for name in sizes._fields[:2]))
    group = dist.new_group([*ranks])
    figures = torch.zeros(len(names), dtype=torch.float64, device=CPU)
    if dist.get_rank() in ranks:
        small, middle, large = (ones(nbytes // 4) for nbytes in sizes)
        found = {"small": all_reduce_seconds(small, 3 * ROUNDS, group)}
        found["middle"] = all_reduce_seconds(middle, FEW_ROUNDS, group)
        found["large"] = all_reduce_seconds(large, FEW_ROUNDS, group)
        # All ranks of the subset must choose the same tensor.
        slowest = torch.tensor(found["large"], dtype=torch.float64, device=CPU)
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX, group=group)
        x, alone = (large, "large") if slowest <= LONG_SECONDS else (middle, "middle")
        found["disturbs"] = slowdown(
            lambda: [dist.all_reduce(x, group=group, async_op=True)], found[alone], group
        )
        for name, tensor, rounds in (
            ("small", small, 3 * ROUNDS),
            ("middle", middle, FEW_ROUNDS),
        ):
            exchange = partial(dist.all_reduce, tensor, group=group)
            found[f"least {name}"] = min(elapsed(exchange, group) for _ in range(rounds))
        figures.copy_(torch.tensor([found[name] for name in names], dtype=torch.float64))
        dist.destroy_process_group(group)
    dist.all_reduce(figures, op=dist.ReduceOp.MAX)
    return dict(zip(names, map(float, figures), strict=True))


def _pair_figures(hosts: int, each: int) -> dict[str, float]:
    rank = dist.get_rank()
    figures = torch.zeros((hosts, hosts, 2), dtype=torch.float64, device="cpu")
    for pairs in rounds_of_pairs(hosts):
        dist.barrier()
        for i, j in pairs:
            if rank in (i * each, j * each):
                latency, rate = _timed(rank == i * each, (i + j) * each - rank)
                if rank == i * each:
                    figures[i, j] = torch.tensor([latency, rate], dtype=torch.float64)
    dist.all_reduce(figures)
    found: dict[str, float] = {}
    for i, j in (pair for pairs in rounds_of_pairs(hosts) for pair in pairs):
        latency, rate = map(float, figures[i, j])
        found |= {latency_of(i, j): latency, rate_of(i, j): rate}
    return found


def _timed(is_first: bool, other: int) -> tuple[float, float]:
    """Return latency and rate of messages between this rank and another that runs the same code."""
    small = _one_way_seconds(_SMALL, ROUNDS, is_first, other)
    nbytes = _MIDDLE
    larger = _one_way_seconds(nbytes, 1, is_first, other)
    # Both ranks must use the same size.
    is_quick = torch.tensor(float(larger < _QUICK_SECONDS), device="cpu")
    dist.send(is_quick, other) if is_first else dist.recv(is_quick, other)
    if is_quick:
        nbytes = _LARGE
        larger = _one_way_seconds(nbytes, FEW_ROUNDS, is_first, other)
    rate = (nbytes - _SMALL) / max(larger - small, ALMOST_ZERO)
    return max(small - _SMALL / rate, ALMOST_ZERO), rate


def _one_way_seconds(nbytes: int, rounds: int, is_first: bool, other: int) -> float:
    """Return half a round trip, as a median; the first trip only opens the connection."""
    x = torch.ones(nbytes // 4, dtype=torch.float32, device="cpu")
    seconds = []
    for _ in range(rounds + 1):
        begin = time.perf_counter()
        for is_sending in (is_first, not is_first):
            dist.send(x, other) if is_sending else dist.recv(x, other)
        seconds.append(time.perf_counter() - begin)
    return median(seconds[1:]) / 2
