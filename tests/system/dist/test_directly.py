"""Direct messages give the results of torch's exchanges, and receives are posted first."""

from __future__ import annotations

import pytest

from tests.system.dist.ranks import on_ranks

pytestmark = pytest.mark.dist


@pytest.mark.parametrize("count", [2, 3, 4])
def test_results_equal_those_of_torch_in_any_order_of_waits(count: int) -> None:
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


def test_non_contiguous_tensors_are_sent_like_contiguous_ones() -> None:
    assert on_ranks("tests.system.dist.directly:otherwise_laid_out", count=2) == [[True] * 3] * 2


def test_all_receives_are_posted_before_any_send() -> None:
    expected = ["irecv"] * 2 + ["isend"] * 2
    assert on_ranks("tests.system.dist.directly:asked_first", count=3) == [[expected] * 3] * 3


@pytest.mark.parametrize("count", [2, 3])
def test_messages_of_an_aborted_step_are_not_read_by_the_next_one(count: int) -> None:
    alike = [float(rank) for rank in range(count)]
    assert on_ranks("tests.system.dist.directly:broken_off", count=count) == [alike] * count
