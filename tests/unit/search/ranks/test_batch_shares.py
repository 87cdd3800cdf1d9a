"""Whole units for ranks of unequal speed, as close to their speeds as possible."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from steelyard.search.ranks.batch_shares import (
    Shares,
    describe_speeds,
    in_whole_units,
    near_equal_shares,
    unequal_shares,
    units_for,
)

_SPEEDS = st.lists(st.floats(0.05, 1.0), min_size=2, max_size=6)


@given(st.integers(6, 500), _SPEEDS)
def test_shares_cover_all_samples_and_are_off_by_less_than_one(
    size: int, speeds: list[float]
) -> None:
    shares = in_whole_units(size, speeds)
    ideal = [size * speed / sum(speeds) for speed in speeds]
    assert sum(shares) == size
    assert min(shares) >= 1
    if min(ideal) >= 1:
        assert all(abs(n - part) < 1 for n, part in zip(shares, ideal, strict=True))


class _Ranks:
    """Ranks with a fixed time, and a time for each sample."""

    def __init__(self, fixed: Sequence[float], each: Sequence[float]) -> None:
        self._fixed, self._each = fixed, each
        self.asked: list[Shares] = []

    def works(self, shares: Shares) -> list[float]:
        ranks = zip(self._fixed, self._each, shares, strict=True)
        return [fixed + each * n for fixed, each, n in ranks]

    def timed(self, shares: Shares) -> tuple[float, list[float]]:
        self.asked.append(shares)
        return max(self.works(shares)), self.works(shares)

    def best(self, size: int) -> float:
        return min(max(self.works((n, size - n))) for n in range(1, size))


@given(st.integers(8, 200), st.floats(0.1, 0.9), st.floats(0, 4))
def test_two_ranks_take_at_most_a_sample_more_than_the_best_shares(
    size: int, speed: float, fixed: float
) -> None:
    # Both run the same step: the whole batch takes longer on the slower rank.
    ranks = _Ranks([fixed, fixed / speed], [1, 1 / speed])
    alone = ranks.works((size, size))
    found = unequal_shares(size, alone, ranks.timed)
    assert len(ranks.asked) <= 3
    if found is not None:
        assert max(ranks.works(found)) <= (ranks.best(size) + 2 / speed) / 0.98
        assert max(ranks.works(found)) <= min(max(ranks.works(s)) for s in ranks.asked) / 0.98


def test_a_rank_twice_as_fast_gets_twice_the_share() -> None:
    ranks = _Ranks([0, 0], [1, 2])
    assert unequal_shares(24, [24, 48], ranks.timed) == (16, 8)
    ranks = _Ranks([0, 0], [1, 2])
    assert unequal_shares(8, [8, 16], ranks.timed) in {(5, 3), (6, 2)}
    assert {(5, 3), (6, 2)} <= {*ranks.asked}


def test_shares_move_back_if_a_smaller_share_is_slower() -> None:
    works = {(16, 8): (16.2, 16.0), (15, 9): (15.2, 18.0), (17, 7): (17.2, 14.0)}
    # The exchange time of the slow rank is not part of its work.
    asked: list[Shares] = []

    def timed(shares: Shares) -> tuple[float, Sequence[float]]:
        asked.append(shares)
        fast, slow = works[shares]
        return max(fast, slow + 3), (fast, slow)

    assert unequal_shares(24, [24, 48], timed) == (17, 7)
    assert asked == [(16, 8), (15, 9), (17, 7)]


def test_sublinear_prices_move_no_samples() -> None:
    fast, slow = {32: 2.70, 33: 2.78, 34: 2.87}, {16: 2.70, 15: 2.62, 14: 2.5}

    def timed(shares: Shares) -> tuple[float, Sequence[float]]:
        works = fast[shares[0]], slow[shares[1]]
        return max(works), works

    assert min(fast, key=lambda n: timed((n, 48 - n))[0]) == 32  # according to these prices
    assert unequal_shares(48, [4.05, 4.05 / 0.463], timed) == (33, 15)


@pytest.mark.parametrize("count", [2, 3, 4])
def test_equal_ranks_get_equal_shares(count: int) -> None:
    ranks = _Ranks([0] * count, [1] * count)
    assert unequal_shares(12, [12.0] * count, ranks.timed) is None
    assert not ranks.asked


@given(st.integers(2, 8), st.integers(8, 5000))
def test_units_are_enough_for_all_ranks_and_no_more_than_that_takes(ranks: int, size: int) -> None:
    possible = [k for k in range(1, size + 1) if size % k == 0]
    units = units_for(ranks, possible)
    assert units in possible
    assert units >= min(size, 24 * ranks)
    assert not any(24 * ranks <= fewer < units for fewer in possible)


def test_speeds_are_printed_relative_to_the_fastest_and_grouped() -> None:
    assert describe_speeds([1, 2]) == "rank 1 computes at 0.50 times the speed of rank 0"
    assert describe_speeds([4, 1, 1]) == "rank 0 computes at 0.25 times the speed of rank 1"
    assert describe_speeds([1, 2, 2, 4]) == (
        "ranks 1 to 2 compute at 0.50 times the speed of rank 0, "
        "rank 3 computes at 0.25 times the speed of rank 0"
    )
    assert describe_speeds([1, 2, 4, 8, 16]).endswith(
        "rank 3 computes at 0.12 times the speed of rank 0 and 1 more"
    )


@given(st.integers(2, 9), st.integers(2, 4096))
def test_equal_ranks_have_nearly_equal_shares_of_any_batch(ranks: int, size: int) -> None:
    possible = [units for units in range(1, size + 1) if size % units == 0]
    shares = near_equal_shares(ranks, possible)
    if size < ranks:
        assert shares is None
        return
    assert shares is not None
    assert len(shares) == ranks
    assert sum(shares) in possible
    assert max(shares) - min(shares) <= 1
    # No other number of units has a clearly smaller largest share.
    least = min(-(-units // ranks) / units for units in possible if units >= ranks)
    assert max(shares) / sum(shares) <= max(1.02 / ranks, least) * (1 + 1e-12)


def test_shares_are_in_the_fewest_units_for_batches_of_other_sizes_divide_into_them_too() -> None:
    assert near_equal_shares(3, (1, 2, 4, 8)) == (3, 3, 2)
    assert near_equal_shares(3, (1, 7)) == (3, 2, 2)
    assert near_equal_shares(3, tuple(2**n for n in range(12))) == (43, 43, 42)


def test_speeds_are_printed_for_the_used_ranks() -> None:
    assert (
        describe_speeds([1.0, 2.0], (0, 2)) == "rank 2 computes at 0.50 times the speed of rank 0"
    )
