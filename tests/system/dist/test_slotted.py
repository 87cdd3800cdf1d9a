"""What ranks exchange through memory that they share is what torch's exchanges give."""

from __future__ import annotations

import pytest

from tests.system.dist.ranks import on_ranks

pytestmark = pytest.mark.dist


@pytest.mark.parametrize("count", [2, 3, 4])
def test_all_kinds_come_as_torchs_do_in_whatever_order_they_are_waited_for(count: int) -> None:
    ranks = on_ranks("tests.system.dist.slotted:as_torchs", count=count)
    for rank in ranks:
        # Of more than two, a sum depends on who is added first.
        assert rank["bitwise"] or count > 2
        assert rank["off"] <= 1e-6 if count == 2 else rank["off"] <= 0.02
        assert 0 < rank["moved"] <= 1.01 * ranks[0]["moved"]
        assert rank["alike"]
        assert rank["waits"]
        assert rank["left"] == []


@pytest.mark.parametrize("count", [2, 3])
def test_a_sum_allocates_nothing(count: int) -> None:
    assert on_ranks("tests.system.dist.slotted:kept_away", count=count) == [0] * count


def test_ranks_that_ask_for_unlike_room_agree_on_the_most() -> None:
    assert on_ranks("tests.system.dist.slotted:unlike", count=2) == [[2, 2]] * 2
