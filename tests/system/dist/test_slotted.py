"""Exchanges through shared memory give the results of torch's exchanges."""

from __future__ import annotations

import pytest

from tests.system.dist.ranks import on_ranks

pytestmark = pytest.mark.dist


@pytest.mark.parametrize("count", [2, 3, 4])
def test_all_collectives_equal_those_of_torch_in_any_order_of_waits(count: int) -> None:
    ranks = on_ranks("tests.system.dist.slotted:as_torchs", count=count)
    for rank in ranks:
        # With more than two ranks, a sum depends on the order of its terms.
        assert rank["bitwise"] or count > 2
        assert rank["off"] <= 1e-6 if count == 2 else rank["off"] <= 0.02
        assert 0 < rank["moved"] <= 1.01 * ranks[0]["moved"]
        assert rank["alike"]
        assert rank["waits"]
        assert rank["left"] == []


@pytest.mark.parametrize("count", [2, 3])
def test_an_all_reduce_through_slots_allocates_nothing(count: int) -> None:
    assert on_ranks("tests.system.dist.slotted:kept_away", count=count) == [0] * count


def test_ranks_with_different_slot_sizes_agree_on_the_largest() -> None:
    assert on_ranks("tests.system.dist.slotted:unlike", count=2) == [[2, 2]] * 2
