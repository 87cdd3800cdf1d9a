"""Ranks of several hosts, as many on each: what leaves the busiest of these while all exchange.

Each host has one way out, which all of its ranks share; among themselves they need none of it. Not
for how fast the ways are: see hardware/link.py.
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
    """Ranks of a host are neighbours, ``each`` of them; ``near`` is what joins these. Of programs
    that know of one rank where ``group`` of them share tensors, those that share the batch are so
    many times as far apart."""

    num_ranks: int
    each: int
    near: Link
    group: int = 1

    def link_of(self, collective: Collective, between: Link) -> Link:
        """What it takes of a device is said of this."""
        return between if self.leaving(collective) else self.near

    def shared(self, collective: Collective, between: Link) -> Link:
        """And how long it takes of this: one rank of each host alone would have all of ``between``,
        but other groups of ranks like this one exchange at the same time."""
        leaving = self.leaving(collective)
        if not leaving:
            return self.near
        rate = min(between.bytes_per_second / leaving, self.near.bytes_per_second)
        return replace(between, bytes_per_second=rate)

    def leaving(self, collective: Collective) -> float:
        """The bytes that leave the busiest host, for each that a rank sends."""
        kind, stride = collective.kind, collective.stride
        is_sum = kind is Exchange.ALL_REDUCE
        if collective.axis == PIPELINE and not is_sum:
            return _handed_on(self.each, collective.places, stride)
        if collective.axis == DATA:
            stride *= self.group
        groups = _groups(self.num_ranks, collective.num_ranks, stride, collective.places)
        is_ring = not collective.is_direct and kind is not Exchange.ALL_TO_ALL
        return _exchanged(groups, self.each, is_ring=is_ring)


# The search asks for the same few over and over.
@lru_cache
def _groups(
    num_ranks: int, count: int, stride: int, places: tuple[int, ...]
) -> tuple[tuple[int, ...], ...]:
    """Every ``stride``-th of as many neighbours; or those at these places, of as many pipelines as
    a stage has ranks."""
    if places:
        return tuple(tuple(first + n * stride for n in places) for first in range(stride))
    firsts = (rank for rank in range(num_ranks) if rank // stride % count == 0)
    return tuple(tuple(first + n * stride for n in range(count)) for first in firsts)


@lru_cache
def _exchanged(groups: Sequence[tuple[int, ...]], each: int, *, is_ring: bool) -> float:
    """Around a ring each sends all to the next; else to every other one its part."""
    leaving: Counter[int] = Counter()
    for group in groups:
        for place, rank in enumerate(group):
            to = group[(place + 1) % len(group)]
            others = [to] if is_ring else [other for other in group if other != rank]
            away = sum(_are_apart(rank, other, each) for other in others)
            # In whole numbers, as many parts as there are others in a group.
            leaving[rank // each] += away
    parts = 1 if is_ring else len(groups[0]) - 1
    return max(leaving.values()) / parts


@lru_cache
def _handed_on(each: int, places: tuple[int, ...], stride: int) -> float:
    """From each stage to the next, by all ranks that have the one."""
    steps = ((first * stride, second * stride) for first, second in pairwise(places))
    return max(
        max(_sending(range(first, first + stride), second - first, each).values(), default=0)
        for first, second in steps
    )


def _sending(ranks: range, distance: int, each: int) -> Counter[int]:
    return Counter(rank // each for rank in ranks if _are_apart(rank, rank + distance, each))


def _are_apart(one: int, other: int, each: int) -> bool:
    return one // each != other // each
