"""Traffic between hosts with equal numbers of ranks: the bytes that leave the busiest host.

The ranks of a host share its single uplink, and do not need it to communicate with each other. Not
for the speed of links: see hardware/link.py.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise

from steelyard.hardware.link import Link
from steelyard.ir.collective import Collective, Exchange
from steelyard.ir.parallel_layout import DATA, PIPELINE


@dataclass(frozen=True, slots=True, kw_only=True)
class RanksPerHost:
    """The distribution of ranks over hosts.

    Each host has ``each`` consecutive ranks, which are joined by ``near``. ``group`` is the number
    of ranks that shard tensors, if the program was written for one of them; data-parallel peers are
    then that many times further apart.
    """

    num_ranks: int
    each: int
    near: Link
    group: int = 1

    def link_of(self, collective: Collective, between: Link) -> Link:
        """Return the link that determines the device time of a collective."""
        return between if self.leaving(collective) else self.near

    def shared(self, collective: Collective, between: Link) -> Link:
        """Return the link that determines the time of a collective.

        A group with one rank on each host could use all of ``between``, but other groups like it
        exchange at the same time.
        """
        leaving = self.leaving(collective)
        if not leaving:
            return self.near
        rate = min(between.bytes_per_second / leaving, self.near.bytes_per_second)
        return replace(between, bytes_per_second=rate)

    def leaving(self, collective: Collective) -> float:
        """Return how many bytes leave the busiest host for each byte that a rank sends."""
        kind, stride = collective.kind, collective.stride
        is_sum = kind is Exchange.ALL_REDUCE
        if collective.axis == PIPELINE and not is_sum:
            return _stage_traffic(self.each, collective.places, stride)
        if collective.axis == DATA:
            stride *= self.group
        groups = _groups(self.num_ranks, collective.num_ranks, stride, collective.places)
        is_ring = not collective.is_direct and kind is not Exchange.ALL_TO_ALL
        return _exchanged(groups, self.each, is_ring=is_ring)


# The search calls this many times with the same few arguments.
@lru_cache
def _groups(
    num_ranks: int, count: int, stride: int, places: tuple[int, ...]
) -> tuple[tuple[int, ...], ...]:
    """Return all groups of ``count`` ranks at a distance of ``stride``.

    With ``places``, return the ranks at these stages of each pipeline instead; there are as many
    pipelines as ranks in a stage.
    """
    if places:
        return tuple(tuple(first + n * stride for n in places) for first in range(stride))
    firsts = (rank for rank in range(num_ranks) if rank // stride % count == 0)
    return tuple(tuple(first + n * stride for n in range(count)) for first in firsts)


@lru_cache
def _exchanged(groups: Sequence[tuple[int, ...]], each: int, *, is_ring: bool) -> float:
    """Return the traffic that leaves the busiest host, as a multiple of one rank's bytes.

    In a ring, each rank sends everything to the next one; otherwise it sends a part to every other
    rank.
    """
    leaving: Counter[int] = Counter()
    for group in groups:
        for place, rank in enumerate(group):
            to = group[(place + 1) % len(group)]
            others = [to] if is_ring else [other for other in group if other != rank]
            remote = sum(_on_different_hosts(rank, other, each) for other in others)
            # Count in parts, one for each other rank of a group, so that the numbers stay integers.
            leaving[rank // each] += remote
    parts = 1 if is_ring else len(groups[0]) - 1
    return max(leaving.values()) / parts


@lru_cache
def _stage_traffic(each: int, places: tuple[int, ...], stride: int) -> float:
    """Return the traffic from one stage to the next that leaves the busiest host, as a multiple of
    one rank's bytes.
    """
    steps = ((first * stride, second * stride) for first, second in pairwise(places))
    return max(
        max(_sending(range(first, first + stride), second - first, each).values(), default=0)
        for first, second in steps
    )


def _sending(ranks: range, distance: int, each: int) -> Counter[int]:
    return Counter(
        rank // each for rank in ranks if _on_different_hosts(rank, rank + distance, each)
    )


def _on_different_hosts(one: int, other: int, each: int) -> bool:
    return one // each != other // each
