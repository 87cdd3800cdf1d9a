"""Links between each two hosts, and exchanges within the hosts that are joined best.

Exchanges among all hosts show the slowest link alone. Here the first ranks of each two hosts send
each other messages, disjoint pairs at one time; and where some hosts are clearly better joined than
all are, an exchange among these is timed too. All ranks of the group take part. Not for exchanges
among all ranks: see worker.py.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from statistics import median

import torch
import torch.distributed as dist

from steelyard.measure.links.worker import NEXT_TO_NONE, ExchangeSizes, exchanged_among
from steelyard.predict.rank_subsets import best_joined, better_joined

# Bytes of the messages of a pair: the larger of the last two where the first is quick.
_SMALL, _MIDDLE, _LARGE = 4096, 256 << 10, 1 << 20
_QUICK_SECONDS = 0.1
_ROUNDS, _FEW_ROUNDS = 9, 3
# Each host is timed with all others where they are so few, else with those at growing distances.
_MOST_WITH_ALL = 16


def timed_joins(speeds: Sequence[float], *, each: int, sizes: ExchangeSizes) -> dict[str, float]:
    """Named figures: latency and rate of each pair that was timed, and for each number of hosts
    that are better joined than all, seconds of exchanges among them. The same on every rank.
    ``speeds`` are of the hosts, with ``each`` ranks on one."""
    hosts = len(speeds)
    found = _pair_figures(hosts, each)
    seconds = pair_seconds(found, hosts)
    groups = best_joined(seconds, speeds)
    for number in better_joined(groups, seconds):
        ranks = [host * each + n for host in groups[number] for n in range(each)]
        found |= {name_of(number, what): s for what, s in exchanged_among(ranks, sizes).items()}
    return found


def pair_seconds(found: Mapping[str, float], hosts: int) -> list[list[float]]:
    """The time of a message of 1 MiB between each two hosts. A pair that was not timed is as slow
    as the slower of the two hosts is with its best partner."""
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
    """The rate of each host's link: the one that it has with its best partner, in bytes a second;
    empty where pairs were not timed."""
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
    """Of a figure of the exchanges among so many hosts."""
    return f"{what} among {number} hosts"


def rounds_of_pairs(hosts: int) -> list[list[tuple[int, int]]]:
    """Disjoint pairs, round by round: every two hosts once where they are few, else each host with
    those 1, 2, 4 ... after it."""
    if hosts <= _MOST_WITH_ALL:
        # The circle method: one stays, the others move on by one place each round.
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
    """Latency and rate of messages between this rank and another, which does the same."""
    small = _there_and_back(_SMALL, _ROUNDS, is_first, other)
    nbytes = _MIDDLE
    more = _there_and_back(nbytes, 1, is_first, other)
    # Both have to send the same.
    is_quick = torch.tensor(float(more < _QUICK_SECONDS), device="cpu")
    dist.send(is_quick, other) if is_first else dist.recv(is_quick, other)
    if is_quick:
        nbytes = _LARGE
        more = _there_and_back(nbytes, _FEW_ROUNDS, is_first, other)
    rate = (nbytes - _SMALL) / max(more - small, NEXT_TO_NONE)
    return max(small - _SMALL / rate, NEXT_TO_NONE), rate


def _there_and_back(nbytes: int, rounds: int, is_first: bool, other: int) -> float:
    """Half of it; the first is not counted, as it finds the connection."""
    x = torch.ones(nbytes // 4, dtype=torch.float32, device="cpu")
    seconds = []
    for _ in range(rounds + 1):
        begin = time.perf_counter()
        for is_sending in (is_first, not is_first):
            dist.send(x, other) if is_sending else dist.recv(x, other)
        seconds.append(time.perf_counter() - begin)
    return median(seconds[1:]) / 2
