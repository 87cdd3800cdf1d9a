"""What ranks send straight to each other is what torch's exchanges give, and is asked for first."""

from __future__ import annotations

import pytest

from tests.system.dist.ranks import on_ranks

pytestmark = pytest.mark.dist


@pytest.mark.parametrize("count", [2, 3, 4])
def test_what_comes_is_what_torch_gives_in_whatever_order_it_is_waited_for(count: int) -> None:
    for rank in on_ranks("tests.system.dist.directly:as_torchs", count=count):
        assert rank["ops"] == 3
        assert len(rank["alike"]) == 4 * 4
        assert all(rank["alike"])
        assert rank["waits"]
        assert rank["held"] == [0] * 4


@pytest.mark.parametrize("count", [2, 3])
def test_ten_thousand_exchanges_twelve_in_flight(count: int) -> None:
    for rank in on_ranks("tests.system.dist.directly:many", count=count):
        assert rank["done"] >= 10_000
        assert rank["wrong"] == 0


def test_what_does_not_lie_row_by_row_is_sent_as_if_it_did() -> None:
    assert on_ranks("tests.system.dist.directly:otherwise_laid_out", count=2) == [[True] * 3] * 2


def test_all_is_asked_for_before_anything_is_sent() -> None:
    expected = ["irecv"] * 2 + ["isend"] * 2
    assert on_ranks("tests.system.dist.directly:asked_first", count=3) == [[expected] * 3] * 3


@pytest.mark.parametrize("count", [2, 3])
def test_nothing_of_a_step_that_was_broken_off_is_taken_for_the_nexts(count: int) -> None:
    alike = [float(rank) for rank in range(count)]
    assert on_ranks("tests.system.dist.directly:broken_off", count=count) == [alike] * count
