"""Finds the optimal number of blocks in each pipeline stage, and of each activation policy in a
stage.

Blocks are equal, so only counts are chosen: blocks per stage, and blocks of each kind within a
stage. There is one kind for each activation policy. Not for finding the sets of recomputed calls:
see recompute_sets.py.
"""

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, product
from math import ceil, floor

import numpy as np
from numpy.typing import NDArray

_NEVER = float("inf")
# Times that differ by less than this share count as equal; the simpler of two such plans is chosen.
ALIKE = 5e-4
# The number of blocks of each kind in a mix, by index of the kind.
CountOfKind = dict[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockKind:
    """The costs of one block under one activation policy.

    ``seconds`` are those of one micro-batch. ``saved_bytes`` are its saved activations of all
    micro-batches in flight, ``offloaded_bytes`` those in offload memory. ``recompute_bytes`` are
    needed only once per stage, while a block is recomputed.
    """

    seconds: float
    saved_bytes: float
    recompute_bytes: int = 0
    offloaded_bytes: float = 0.0
    num_recomputed_calls: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Mix:
    """The number of blocks of each kind in one stage, in the order of the kinds.

    ``num_offloaded`` and ``num_recomputed`` count the blocks with offloaded activations and those
    with recompute, ``num_recomputed_calls`` the recomputed calls of all blocks.
    """

    counts: tuple[int, ...]
    seconds: float
    num_offloaded: int = 0
    num_recomputed: int = 0
    num_recomputed_calls: int = 0

    @property
    def burden(self) -> tuple[int, int, int, int, float]:
        """A sort key that puts simpler mixes first: fewer trades, less offload and recompute."""
        num_trades = (self.num_offloaded > 0) + (self.num_recomputed > 0)
        return (
            num_trades,
            self.num_offloaded,
            self.num_recomputed,
            self.num_recomputed_calls,
            self.seconds,
        )


def fastest_mix(
    kinds: Sequence[BlockKind],
    num_blocks: int,
    room_bytes: float,
    offload_room_bytes: float = _NEVER,
) -> Mix | None:
    """Return the fastest mix of one or two kinds that fits, or None if none does.

    If several mixes are about equally fast, the simplest one is returned. If offload memory is too
    small for everything that could be offloaded, the search also considers mixes that fill it with
    one kind and add one or two resident kinds.
    """
    if not num_blocks:
        return _mix(kinds, {}) if min(room_bytes, offload_room_bytes) >= 0 else None
    if offload_room_bytes < 0:
        return None
    resident = [index for index, kind in enumerate(kinds) if not kind.offloaded_bytes]
    found = _mixes_of_two(kinds, range(len(kinds)), num_blocks, room_bytes, offload_room_bytes)
    if num_blocks * max(kind.offloaded_bytes for kind in kinds) > offload_room_bytes:
        for index, kind in enumerate(kinds):
            count = int(offload_room_bytes // kind.offloaded_bytes) if kind.offloaded_bytes else 0
            if count > 0:
                found += _with_offloaded_kind(
                    kinds, resident, index, min(count, num_blocks), num_blocks, room_bytes
                )
    seconds = [_seconds(kinds, counts) for counts in found]
    most = min(seconds, default=_NEVER) * (1 + ALIKE)
    equal = [
        _mix(kinds, counts) for counts, took in zip(found, seconds, strict=True) if took <= most
    ]
    return min(equal, key=lambda mix: mix.burden, default=None)


def _with_offloaded_kind(
    kinds: Sequence[BlockKind],
    resident: Sequence[int],
    offloaded: int,
    count: int,
    num_blocks: int,
    room_bytes: float,
) -> list[CountOfKind]:
    """Return mixes with ``count`` blocks of one offloaded kind, and one or two resident kinds for
    the rest.
    """
    kind = kinds[offloaded]
    if count == num_blocks:
        return _mixes_of_two(kinds, [offloaded], num_blocks, room_bytes)
    adjusted = [
        replace(k, recompute_bytes=max(k.recompute_bytes, kind.recompute_bytes)) for k in kinds
    ]
    rest = _mixes_of_two(
        adjusted, resident, num_blocks - count, room_bytes - count * kind.saved_bytes
    )
    return [{**counts, offloaded: count + counts.get(offloaded, 0)} for counts in rest]


def _mixes_of_two(
    kinds: Sequence[BlockKind],
    chosen: Sequence[int],
    num_blocks: int,
    room_bytes: float,
    offload_room_bytes: float = _NEVER,
) -> list[CountOfKind]:
    """Return the feasible mixes of one kind, and the two extreme feasible mixes of each pair.

    The feasible counts of a pair form an interval on which the total time is monotonic. So one of
    its ends is the fastest mix; if all are equally fast, one is the simplest.
    """
    found: list[CountOfKind] = []
    for index in chosen:
        kind = kinds[index]
        fits_offload_memory = num_blocks * kind.offloaded_bytes <= offload_room_bytes
        if (
            fits_offload_memory
            and num_blocks * kind.saved_bytes + kind.recompute_bytes <= room_bytes
        ):
            found.append({index: num_blocks})
    for one, other in combinations(chosen, 2):
        a, b = kinds[one], kinds[other]
        room = room_bytes - max(a.recompute_bytes, b.recompute_bytes)
        resident = _feasible_counts(num_blocks, a.saved_bytes, b.saved_bytes, room)
        offloaded = _feasible_counts(
            num_blocks, a.offloaded_bytes, b.offloaded_bytes, offload_room_bytes
        )
        fewest, most = max(resident[0], offloaded[0]), min(resident[1], offloaded[1])
        found += [
            {one: count, other: num_blocks - count}
            for count in dict.fromkeys((fewest, most))
            if fewest <= count <= most
        ]
    return found


def _feasible_counts(
    num_blocks: int, bytes_each: float, other_bytes_each: float, room: float
) -> tuple[int, int]:
    """Return the least and the largest number of blocks of ``bytes_each`` that fit into ``room``.

    The remaining blocks take ``other_bytes_each``. There is at least one block of either kind.
    """
    fewest, most = 1, num_blocks - 1
    left, difference = room - num_blocks * other_bytes_each, bytes_each - other_bytes_each
    if left == _NEVER or (not difference and left >= 0):
        return fewest, most
    if not difference:
        return num_blocks, 0
    if difference > 0:
        return fewest, min(most, floor(left / difference))
    return max(fewest, ceil(left / difference)), most


def least_seconds(kinds: Sequence[BlockKind], num_blocks: int, room_bytes: float) -> float:
    """Return a lower bound on the seconds of all mixes that fit; infinity if none fits.

    The relaxation allows fractional blocks of two kinds, and unlimited offload memory. In every mix
    some kind has the largest ``recompute_bytes``, so the bound is the minimum over that kind, with
    its ``recompute_bytes`` subtracted from the room.
    """
    if not num_blocks:
        return 0.0 if room_bytes >= 0 else _NEVER
    return num_blocks * min(
        (
            _hull_seconds(
                [kind for kind in kinds if kind.recompute_bytes <= most],
                (room_bytes - most) / num_blocks,
            )
            for most in {kind.recompute_bytes for kind in kinds}
        ),
        default=_NEVER,
    )


def _hull_seconds(kinds: Sequence[BlockKind], bytes_per_block: float) -> float:
    fitting = [kind for kind in kinds if kind.saved_bytes <= bytes_per_block]
    best = min((kind.seconds for kind in fitting), default=_NEVER)
    wider = [kind for kind in kinds if kind.saved_bytes > bytes_per_block]
    for lean, wide in product(fitting, wider):
        share = (bytes_per_block - lean.saved_bytes) / (wide.saved_bytes - lean.saved_bytes)
        best = min(best, lean.seconds + share * (wide.seconds - lean.seconds))
    return best


SecondsOf = Callable[[int, int], float]


def minimize_slowest_stage(
    num_blocks: int, num_stages: int, seconds_of: SecondsOf
) -> tuple[int, ...] | None:
    """Return the blocks of each stage, at least one, that minimize the time of the slowest stage.

    ``seconds_of(stage, count)`` increases with the number of blocks, and is infinite if they do not
    fit. It is optimal to assign one block after another to the stage where the result is fastest.
    None is returned if the blocks do not fit.
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


def minimize_total(
    num_blocks: int, num_stages: int, seconds_of: SecondsOf
) -> tuple[int, ...] | None:
    """Return the blocks of each stage that minimize the total time, or None if they do not fit.

    This is dynamic programming: stage after stage, it finds the best time for each number of blocks
    so far.
    """
    most = num_blocks - num_stages + 1
    if most < 1:
        return None
    so_far = np.full(num_blocks + 1, np.inf)
    so_far[0] = 0.0
    best_counts: list[NDArray[np.int64]] = []
    for stage in range(num_stages):
        after, count_of = np.full(num_blocks + 1, np.inf), np.zeros(num_blocks + 1, dtype=np.int64)
        for count in range(1, most + 1):
            seconds = seconds_of(stage, count)
            if seconds == _NEVER:
                break  # more blocks would not fit either
            candidate = so_far[:-count] + seconds
            is_better = candidate < after[count:]
            after[count:][is_better] = candidate[is_better]
            count_of[count:][is_better] = count
        so_far = after
        best_counts.append(count_of)
    if not np.isfinite(so_far[num_blocks]):
        return None
    counts, left = [], num_blocks
    for count_of in reversed(best_counts):
        counts.append(int(count_of[left]))
        left -= counts[-1]
    return tuple(reversed(counts))


def improve_counts(
    counts: tuple[int, ...],
    passes_of: Callable[[int, int], tuple[float, float]],
    total_of: Callable[[Sequence[tuple[float, float]]], float],
) -> tuple[int, ...]:
    """Move single blocks between stages as long as that lowers ``total_of`` all stages.

    ``passes_of(stage, count)`` are the passes of a stage, infinite if its blocks do not fit.
    """
    counts_now, passes = list(counts), [passes_of(s, n) for s, n in enumerate(counts)]
    best = total_of(passes)
    while True:
        found: tuple[float, int, int] | None = None
        with_one_more = [passes_of(s, n + 1) for s, n in enumerate(counts_now)]
        for source in range(len(counts_now)):
            if counts_now[source] == 1:
                continue
            source_passes = passes_of(source, counts_now[source] - 1)
            for target, target_passes in enumerate(with_one_more):
                if target == source or target_passes[0] == _NEVER:
                    continue
                moved = [*passes]
                moved[source], moved[target] = source_passes, target_passes
                total = total_of(moved)
                if total < best * (1 - 1e-9):
                    best, found = total, (total, source, target)
        if found is None:
            return tuple(counts_now)
        _, source, target = found
        counts_now[source] -= 1
        counts_now[target] += 1
        passes = [passes_of(s, n) for s, n in enumerate(counts_now)]


def _seconds(kinds: Sequence[BlockKind], count_of_kind: CountOfKind) -> float:
    return sum(kinds[index].seconds * count for index, count in count_of_kind.items())


def _mix(kinds: Sequence[BlockKind], count_of_kind: CountOfKind) -> Mix:
    return Mix(
        counts=tuple(count_of_kind.get(index, 0) for index in range(len(kinds))),
        seconds=_seconds(kinds, count_of_kind),
        num_offloaded=sum(
            count for index, count in count_of_kind.items() if kinds[index].offloaded_bytes
        ),
        num_recomputed=sum(
            count for index, count in count_of_kind.items() if kinds[index].num_recomputed_calls
        ),
        num_recomputed_calls=sum(
            kinds[index].num_recomputed_calls * count for index, count in count_of_kind.items()
        ),
    )
