"""How many blocks each stage of a pipeline holds, and how much of each is computed again.

Blocks are alike, so that only numbers are chosen: of each kind (one for each set of calls that run
again) in each stage, and of blocks in each stage. Not for which kinds there are: see
recompute_sets.py.
"""

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from math import ceil, floor

import numpy as np
from numpy.typing import NDArray

_NEVER = float("inf")
# Seconds that differ by less than this share are equal, and the simpler of two plans is taken.
ALIKE = 5e-4


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockKind:
    """What one block of it takes for one micro-batch, and keeps of each that is under way;
    ``again_bytes`` are there once, while it is computed again; ``far_bytes`` are kept elsewhere.
    ``num_again`` is how many of its calls are computed again."""

    seconds: float
    kept_bytes: float
    again_bytes: int = 0
    far_bytes: float = 0.0
    num_again: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Mix:
    """So many blocks of each kind, in the order that the kinds were given in. ``num_moved`` and
    ``num_again`` are blocks of which something is kept elsewhere or computed again, and
    ``calls_again`` the calls that are computed again."""

    counts: tuple[int, ...]
    seconds: float
    num_moved: int = 0
    num_again: int = 0
    calls_again: int = 0

    @property
    def burden(self) -> tuple[int, int, int, int, float]:
        """The simpler of two mixes comes first: of fewer trades, with less moved or recomputed."""
        num_trades = (self.num_moved > 0) + (self.num_again > 0)
        return num_trades, self.num_moved, self.num_again, self.calls_again, self.seconds


def mixed(
    kinds: Sequence[BlockKind], num_blocks: int, room_bytes: float, far_room_bytes: float = _NEVER
) -> Mix | None:
    """The fastest of one kind or of two, and of those that are about as fast the simplest; None
    where none leaves the blocks room. Where not all that could be kept elsewhere has room there,
    also as many blocks as have, and others of one kind or two.
    """
    if not num_blocks:
        return _mix(kinds, {}) if min(room_bytes, far_room_bytes) >= 0 else None
    if far_room_bytes < 0:
        return None
    near = [index for index, kind in enumerate(kinds) if not kind.far_bytes]
    found = _of_two(kinds, range(len(kinds)), num_blocks, room_bytes, far_room_bytes)
    if num_blocks * max(kind.far_bytes for kind in kinds) > far_room_bytes:
        for index, kind in enumerate(kinds):
            count = int(far_room_bytes // kind.far_bytes) if kind.far_bytes else 0
            if count > 0:
                found += _beside(kinds, near, index, min(count, num_blocks), num_blocks, room_bytes)
    least = min((mix.seconds for mix in found), default=_NEVER)
    alike = [mix for mix in found if mix.seconds <= least * (1 + ALIKE)]
    return min(alike, key=lambda mix: mix.burden, default=None)


def _beside(
    kinds: Sequence[BlockKind],
    near: Sequence[int],
    far: int,
    count: int,
    num_blocks: int,
    room_bytes: float,
) -> list[Mix]:
    """So many of one kind that is kept elsewhere, and all others of those that are not."""
    kind = kinds[far]
    if count == num_blocks:
        return _of_two(kinds, [far], num_blocks, room_bytes)
    least = [replace(k, again_bytes=max(k.again_bytes, kind.again_bytes)) for k in kinds]
    rest = _of_two(least, near, num_blocks - count, room_bytes - count * kind.kept_bytes)
    counted = ({i: n for i, n in enumerate(mix.counts) if n} for mix in rest)
    return [_mix(kinds, {**counts, far: count + counts.get(far, 0)}) for counts in counted]


def _of_two(
    kinds: Sequence[BlockKind],
    chosen: Sequence[int],
    num_blocks: int,
    room_bytes: float,
    far_room_bytes: float = _NEVER,
) -> list[Mix]:
    """Of two kinds the numbers of either that have room are an interval, along which what they take
    together grows or shrinks: its ends are the fastest and, of equals, the simplest."""
    found: list[Mix] = []
    for index in chosen:
        kind = kinds[index]
        is_far = num_blocks * kind.far_bytes <= far_room_bytes
        if is_far and num_blocks * kind.kept_bytes + kind.again_bytes <= room_bytes:
            found.append(_mix(kinds, {index: num_blocks}))
    for one, other in combinations(chosen, 2):
        a, b = kinds[one], kinds[other]
        room = room_bytes - max(a.again_bytes, b.again_bytes)
        near = _fitting(num_blocks, a.kept_bytes, b.kept_bytes, room)
        far = _fitting(num_blocks, a.far_bytes, b.far_bytes, far_room_bytes)
        fewest, most = max(near[0], far[0]), min(near[1], far[1])
        found += [
            _mix(kinds, {one: count, other: num_blocks - count})
            for count in dict.fromkeys((fewest, most))
            if fewest <= count <= most
        ]
    return found


def _fitting(num_blocks: int, mine: float, others: float, room: float) -> tuple[int, int]:
    """The fewest and the most blocks of ``mine`` bytes, but neither none nor all, that have room
    with the rest of ``others`` bytes each."""
    fewest, most = 1, num_blocks - 1
    left, between = room - num_blocks * others, mine - others
    if left == _NEVER or (not between and left >= 0):
        return fewest, most
    if not between:
        return num_blocks, 0
    if between > 0:
        return fewest, min(most, floor(left / between))
    return max(fewest, ceil(left / between)), most


def least_seconds(kinds: Sequence[BlockKind], num_blocks: int, room_bytes: float) -> float:
    """No whole numbers of blocks take less, in so much room; infinite where they have too little.

    As if blocks could be of two kinds each, and anything had room elsewhere. Whatever they are of,
    one of their kinds needs most room to be computed again, and has it.
    """
    if not num_blocks:
        return 0.0 if room_bytes >= 0 else _NEVER
    return num_blocks * min(
        (
            _on_the_hull(
                [kind for kind in kinds if kind.again_bytes <= most.again_bytes],
                (room_bytes - most.again_bytes) / num_blocks,
            )
            for most in kinds
        ),
        default=_NEVER,
    )


def _on_the_hull(kinds: Sequence[BlockKind], each_bytes: float) -> float:
    best = min((k.seconds for k in kinds if k.kept_bytes <= each_bytes), default=_NEVER)
    for one, other in combinations(kinds, 2):
        lean, wide = sorted((one, other), key=lambda k: k.kept_bytes)
        if lean.kept_bytes <= each_bytes < wide.kept_bytes:
            share = (each_bytes - lean.kept_bytes) / (wide.kept_bytes - lean.kept_bytes)
            best = min(best, lean.seconds + share * (wide.seconds - lean.seconds))
    return best


SecondsOf = Callable[[int, int], float]


def fastest_slowest(
    num_blocks: int, num_stages: int, seconds_of: SecondsOf
) -> tuple[int, ...] | None:
    """How many blocks each stage holds, one at least, so that the slowest is as fast as can be.

    ``seconds_of`` a stage and a number of blocks grows with that number, and is infinite where
    these do not fit. Given one block after another to where it takes least, no other division has
    a faster slowest stage.
    """
    counts = [1] * num_stages
    if num_blocks < num_stages or _NEVER in (seconds_of(s, 1) for s in range(num_stages)):
        return None
    queue = [(seconds_of(stage, 2), stage) for stage in range(num_stages)]
    heapq.heapify(queue)
    for _ in range(num_blocks - num_stages):
        seconds, stage = queue[0]
        if seconds == _NEVER:
            return None
        counts[stage] += 1
        heapq.heapreplace(queue, (seconds_of(stage, counts[stage] + 1), stage))
    return tuple(counts)


def least_in_all(num_blocks: int, num_stages: int, seconds_of: SecondsOf) -> tuple[int, ...] | None:
    """So that all stages together take as little as can be: stage after stage, the best of every
    number of blocks that they may hold so far."""
    most = num_blocks - num_stages + 1
    if most < 1:
        return None
    so_far = np.full(num_blocks + 1, np.inf)
    so_far[0] = 0.0
    given: list[NDArray[np.int64]] = []
    for stage in range(num_stages):
        after, count_of = np.full(num_blocks + 1, np.inf), np.zeros(num_blocks + 1, dtype=np.int64)
        for count in range(1, most + 1):
            seconds = seconds_of(stage, count)
            if seconds == _NEVER:
                break  # nor do more fit
            with_it = so_far[:-count] + seconds
            is_better = with_it < after[count:]
            after[count:][is_better] = with_it[is_better]
            count_of[count:][is_better] = count
        so_far = after
        given.append(count_of)
    if not np.isfinite(so_far[num_blocks]):
        return None
    counts, left = [], num_blocks
    for count_of in reversed(given):
        counts.append(int(count_of[left]))
        left -= counts[-1]
    return tuple(reversed(counts))


def bettered(
    counts: tuple[int, ...], seconds_of: SecondsOf, of_all: Callable[[Sequence[float]], float]
) -> tuple[int, ...]:
    """One block from one stage to another, as long as that makes ``of_all`` stages less."""
    held, seconds = list(counts), [seconds_of(s, n) for s, n in enumerate(counts)]
    best = of_all(seconds)
    while True:
        found: tuple[float, int, int] | None = None
        for giver in range(len(held)):
            if held[giver] == 1:
                continue
            less = seconds_of(giver, held[giver] - 1)
            for taker in range(len(held)):
                if taker == giver:
                    continue
                moved = [*seconds]
                moved[giver], moved[taker] = less, seconds_of(taker, held[taker] + 1)
                total = of_all(moved)
                if total < best * (1 - 1e-9):
                    best, found = total, (total, giver, taker)
        if found is None:
            return tuple(held)
        _, giver, taker = found
        held[giver] -= 1
        held[taker] += 1
        seconds = [seconds_of(s, n) for s, n in enumerate(held)]


def _mix(kinds: Sequence[BlockKind], of: dict[int, int]) -> Mix:
    return Mix(
        counts=tuple(of.get(index, 0) for index in range(len(kinds))),
        seconds=sum(kinds[index].seconds * count for index, count in of.items()),
        num_moved=sum(count for index, count in of.items() if kinds[index].far_bytes),
        num_again=sum(count for index, count in of.items() if kinds[index].num_again),
        calls_again=sum(kinds[index].num_again * count for index, count in of.items()),
    )
