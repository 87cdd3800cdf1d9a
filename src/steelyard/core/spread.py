"""Ranks of several hosts, as many on each: what leaves the busiest of these while all exchange.

Each host has one way out, which all of its ranks share; among themselves they need none of it. Not
for how fast the ways are: see link.py.
"""

from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache

from steelyard.core.collective import Collective, Exchange
from steelyard.core.layout import PIPELINE
from steelyard.core.link import Link


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """Ranks of a host are neighbours, ``each`` of them; ``near`` is what joins these."""

    num_ranks: int
    each: int
    near: Link

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
        is_sum = collective.kind is Exchange.ALL_REDUCE
        if collective.axis == PIPELINE and not is_sum:
            return _handed_on(self.num_ranks, self.each, collective.stride)
        return _exchanged(
            self.num_ranks, self.each, collective.num_ranks, collective.stride, is_ring=is_sum
        )


# The search asks for the same few over and over.
@lru_cache
def _exchanged(num_ranks: int, each: int, count: int, stride: int, *, is_ring: bool) -> float:
    """Around a ring each sends all to the next; else to every other one its part."""
    leaving: dict[int, float] = defaultdict(float)
    for rank in range(num_ranks):
        place = rank // stride % count
        first = rank - place * stride
        to = [(place + 1) % count] if is_ring else [n for n in range(count) if n != place]
        away = sum(_are_apart(rank, first + other * stride, each) for other in to)
        leaving[rank // each] += away / len(to)
    return max(leaving.values())


@lru_cache
def _handed_on(num_ranks: int, each: int, stride: int) -> float:
    """From each stage to the next, by all ranks that have the one."""
    return max(
        (
            n
            for first in range(0, num_ranks - stride, stride)
            for n in _leaving_stage(range(first, first + stride), stride, each)
        ),
        default=0,
    )


def _leaving_stage(sending: range, stride: int, each: int) -> Iterator[int]:
    yield from Counter(r // each for r in sending if _are_apart(r, r + stride, each)).values()


def _are_apart(one: int, other: int, each: int) -> bool:
    return one // each != other // each
