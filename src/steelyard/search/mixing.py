"""How many blocks each stage of a pipeline holds, and how much of each is computed again.

Blocks are alike, so that only numbers are chosen: of each kind (one for each set of calls that run
again) in each stage, and of blocks in each stage. Not for which kinds there are: see kinds.py.
"""

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations

_NEVER = float("inf")


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """What one block of it takes for one micro-batch, and keeps of each that is under way;
    ``again_bytes`` are there once, while it is computed again."""

    seconds: float
    kept_bytes: float
    again_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Mix:
    """So many blocks of each kind, in the order that the kinds were given in."""

    counts: tuple[int, ...]
    seconds: float


def mixed(kinds: Sequence[Kind], num_blocks: int, room_bytes: float) -> Mix | None:
    """The fastest of one kind or of two; None where none leaves the blocks room."""
    found: list[Mix] = []
    for index, kind in enumerate(kinds):
        if num_blocks * kind.kept_bytes + kind.again_bytes <= room_bytes:
            found.append(_mix(kinds, {index: num_blocks}))
    for one, other in combinations(range(len(kinds)), 2):
        lean, wide = sorted((one, other), key=lambda i: kinds[i].kept_bytes)
        between = kinds[wide].kept_bytes - kinds[lean].kept_bytes
        if between <= 0:
            continue
        room = room_bytes - max(kinds[lean].again_bytes, kinds[wide].again_bytes)
        wider = int((room - num_blocks * kinds[lean].kept_bytes) // between)
        if 0 < wider < num_blocks:
            found.append(_mix(kinds, {lean: num_blocks - wider, wide: wider}))
    return min(found, key=lambda mix: mix.seconds, default=None)


def least_seconds(kinds: Sequence[Kind], num_blocks: int, room_bytes: float) -> float:
    """No whole numbers of blocks take less, in so much room; infinite where they have too little.

    On the lower hull of what kinds keep and take, as if blocks could be of two kinds each.
    """
    each = room_bytes / num_blocks
    best = min((k.seconds for k in kinds if k.kept_bytes <= each), default=_NEVER)
    for one, other in combinations(kinds, 2):
        lean, wide = sorted((one, other), key=lambda k: k.kept_bytes)
        if lean.kept_bytes <= each < wide.kept_bytes:
            share = (each - lean.kept_bytes) / (wide.kept_bytes - lean.kept_bytes)
            best = min(best, lean.seconds + share * (wide.seconds - lean.seconds))
    return num_blocks * best


def allotted(
    num_blocks: int, num_stages: int, seconds_of: Callable[[int, int], float]
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


def _mix(kinds: Sequence[Kind], of: dict[int, int]) -> Mix:
    return Mix(
        counts=tuple(of.get(index, 0) for index in range(len(kinds))),
        seconds=sum(kinds[index].seconds * count for index, count in of.items()),
    )
