"""Blocks assigned to stages and to kinds, compared with every possible assignment on small
random cases."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import combinations_with_replacement

import pytest

from steelyard.search.cluster.policy_mixture import (
    ALIKE,
    BlockKind,
    fastest_mix,
    improve_counts,
    least_seconds,
    minimize_slowest_stage,
    minimize_total,
)

_SEEDS = range(60)


def _kinds(draw: random.Random) -> list[BlockKind]:
    """Return kinds of blocks: the more is saved, the less is recomputed; the first one saves
    everything."""
    count = draw.randint(1, 4)
    kept = sorted((draw.randint(1, 40) for _ in range(count)), reverse=True)
    seconds = sorted(draw.uniform(1, 2) for _ in range(count))
    again = [0, *(draw.randint(0, 6) for _ in range(count - 1))]
    return [
        BlockKind(seconds=s, saved_bytes=k, recompute_bytes=a)
        for s, k, a in zip(seconds, kept, again, strict=True)
    ]


def _fits(chosen: tuple[BlockKind, ...], room: float) -> bool:
    return sum(k.saved_bytes for k in chosen) + max(k.recompute_bytes for k in chosen) <= room


def _least_of_all(kinds: list[BlockKind], count: int, room: float) -> float:
    return min(
        (
            sum(kind.seconds for kind in chosen)
            for chosen in combinations_with_replacement(kinds, count)
            if _fits(chosen, room)
        ),
        default=float("inf"),
    )


@pytest.mark.parametrize("seed", _SEEDS)
def test_a_mix_fits_and_is_between_the_bound_and_every_mix_of_two(seed: int) -> None:
    draw = random.Random(seed)
    kinds, count = _kinds(draw), draw.randint(1, 7)
    room = draw.uniform(0, 45 * count)
    least = _least_of_all(kinds, count, room)
    found = fastest_mix(kinds, count, room)
    assert least_seconds(kinds, count, room) <= least * (1 + 1e-12)
    if found is None:
        assert least == float("inf") or len(kinds) > 2
        return
    chosen = tuple(k for k, n in zip(kinds, found.counts, strict=True) for _ in range(n))
    assert len(chosen) == count
    assert _fits(chosen, room)
    assert found.seconds == pytest.approx(sum(k.seconds for k in chosen))
    if len(kinds) <= 2:
        assert found.seconds == pytest.approx(least)
    assert found.seconds <= 1.1 * least


@pytest.mark.parametrize("seed", _SEEDS)
def test_offloaded_activations_fit_into_host_memory(seed: int) -> None:
    draw = random.Random(seed)
    kinds, count = _kinds(draw), draw.randint(1, 7)
    moved = [
        replace(
            k, seconds=k.seconds + draw.uniform(0, 1), saved_bytes=0, offloaded_bytes=k.saved_bytes
        )
        for k in kinds
    ]
    kinds += moved
    room, offload_room = draw.uniform(0, 45 * count), draw.uniform(-5, 45 * count)

    def far(chosen: tuple[BlockKind, ...]) -> float:
        return sum(k.offloaded_bytes for k in chosen)

    mixes = [
        sum(kind.seconds for kind in chosen)
        for chosen in combinations_with_replacement(kinds, count)
        if _fits(chosen, room) and far(chosen) <= offload_room
    ]
    least = min(mixes, default=float("inf"))
    found = fastest_mix(kinds, count, room, offload_room)
    assert least_seconds(kinds, count, room) <= least * (1 + 1e-12)
    if offload_room < 0:
        assert found is None
    if found is None:
        return
    chosen = tuple(k for k, n in zip(kinds, found.counts, strict=True) for _ in range(n))
    assert len(chosen) == count
    assert _fits(chosen, room)
    assert far(chosen) <= offload_room
    assert found.seconds == pytest.approx(sum(k.seconds for k in chosen))
    assert least * (1 - 1e-12) <= found.seconds <= 1.25 * least


def test_blocks_are_offloaded_only_as_far_as_memory_is_short() -> None:
    """80 blocks of a 70B model take 3.3 GiB each, 1.4 with 13 recomputed calls, and nothing if
    offloaded, which takes 5 % longer. The host memory has room for all of them."""
    kinds = [
        BlockKind(seconds=83.6, saved_bytes=3.3),
        BlockKind(seconds=85.6, saved_bytes=1.4, recompute_bytes=2, num_recomputed_calls=13),
        BlockKind(seconds=102.8, saved_bytes=0.3, recompute_bytes=3, num_recomputed_calls=20),
        BlockKind(seconds=150.7, saved_bytes=0, recompute_bytes=7, offloaded_bytes=3.3),
        BlockKind(
            seconds=90.1,
            saved_bytes=0,
            recompute_bytes=5,
            offloaded_bytes=1.4,
            num_recomputed_calls=13,
        ),
    ]
    found = fastest_mix(kinds, 80, 70, 256)
    assert found is not None
    assert found.counts == (0, 46, 0, 0, 34)
    assert found.seconds == pytest.approx(46 * 85.6 + 34 * 90.1)


@pytest.mark.parametrize("seed", _SEEDS)
def test_the_simplest_of_equal_mixtures_is_taken(seed: int) -> None:
    """Where something else sets the pace, recompute and offload cost nothing."""
    draw = random.Random(seed)
    count = draw.randint(2, 7)
    room, offload_room = draw.uniform(10, 45 * count), draw.uniform(0, 45 * count)
    kinds = [
        BlockKind(
            seconds=1.0 + draw.uniform(0, ALIKE / 2),
            saved_bytes=40 - n,
            offloaded_bytes=f,
            num_recomputed_calls=n,
        )
        for n in (0, 10, 30)
        for f in (0, 40 - n)
    ]
    kinds = [
        replace(kind, saved_bytes=0 if kind.offloaded_bytes else kind.saved_bytes) for kind in kinds
    ]
    found = fastest_mix(kinds, count, room, offload_room)
    burdens = [
        _burden(chosen)
        for chosen in combinations_with_replacement(kinds, count)
        if _fits(chosen, room)
        and sum(k.offloaded_bytes for k in chosen) <= offload_room
        and len(set(chosen)) <= 2
    ]
    if found is None:
        assert not burdens
        return
    chosen = tuple(k for k, n in zip(kinds, found.counts, strict=True) for _ in range(n))
    assert _burden(chosen)[:2] <= min(burdens)[:2]


def _burden(chosen: tuple[BlockKind, ...]) -> tuple[int, int, int]:
    moved = sum(kind.offloaded_bytes > 0 for kind in chosen)
    again = sum(kind.num_recomputed_calls > 0 for kind in chosen)
    return (moved > 0) + (again > 0), moved, again


def _divisions(blocks: int, stages: int) -> Iterator[tuple[int, ...]]:
    if stages == 1:
        yield (blocks,)
        return
    for first in range(1, blocks - stages + 2):
        for rest in _divisions(blocks - first, stages - 1):
            yield first, *rest


@pytest.mark.parametrize("seed", _SEEDS)
def test_no_other_division_has_a_faster_slowest_stage_or_takes_less_in_all(seed: int) -> None:
    draw = random.Random(seed)
    blocks, stages = draw.randint(1, 8), draw.randint(1, 5)
    most = [draw.randint(1, 8) for _ in range(stages)]
    takes = [[draw.uniform(0, 2)] for _ in range(stages)]
    for row in takes:
        for _ in range(blocks + 1):
            row.append(row[-1] + draw.uniform(0, 1))

    def seconds_of(stage: int, count: int) -> float:
        return takes[stage][count] if count <= most[stage] else float("inf")

    def all_of(counts: tuple[int, ...]) -> list[float]:
        return [seconds_of(stage, count) for stage, count in enumerate(counts)]

    every = [all_of(c) for c in _divisions(blocks, stages)] if blocks >= stages else []
    every = [seconds for seconds in every if max(seconds) < float("inf")]
    quick = minimize_slowest_stage(blocks, stages, seconds_of)
    lean = minimize_total(blocks, stages, seconds_of)
    assert (quick is None) == (lean is None) == (not every)
    if quick is None or lean is None:
        return
    assert sum(quick) == sum(lean) == blocks
    assert max(all_of(quick)) == pytest.approx(min(map(max, every)))
    assert sum(all_of(lean)) == pytest.approx(min(map(sum, every)))

    def belt(seconds: Sequence[float]) -> float:
        return 4 * max(seconds) + sum(seconds)

    better = improve_counts(
        quick, lambda s, n: (seconds_of(s, n), 0.0), lambda passes: belt([f for f, _ in passes])
    )
    assert sum(better) == blocks
    assert belt(all_of(better)) <= belt(all_of(quick))
