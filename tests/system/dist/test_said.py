"""The predicted headers of gloo's messages equal the bytes that the kernel counts."""

from __future__ import annotations

import pytest

from steelyard.ir.collective import GLOO_GETS, GLOO_SENDS
from tests.system.dist.ranks import on_ranks, on_two_ranks
from tests.system.dist.said import SIZES

pytestmark = pytest.mark.dist


@pytest.mark.parametrize("count", [2, 3, 4])
def test_collectives_send_the_predicted_bytes(count: int) -> None:
    for each in zip(*on_ranks("tests.system.dist.said:exchanges", count=count), strict=True):
        name, said, sent = each[0]["name"], each[0]["said"], each[0]["sent"]
        assert said > sent, name
        # A ring rounds each piece up to whole elements; the last ranks have smaller pieces.
        pieces = 2 * count * -(-sent // (2 << 20))
        assert max(one["counted"] for one in each) == pytest.approx(said, abs=8 * pieces), name


def test_point_to_point_messages_send_the_predicted_bytes() -> None:
    sender, receiver = on_two_ranks("tests.system.dist.said:messages")
    for size in SIZES:
        assert sender[str(size)] == 3 * (4 * size + GLOO_SENDS)
        assert receiver[str(size)] == 3 * GLOO_GETS


@pytest.mark.parametrize("count", [2, 3, 5])
def test_bytes_of_the_agreement_before_a_step_are_those_that_the_kernel_counts(count: int) -> None:
    """These bytes are in no prediction and in no receipt of a step."""
    for rank in on_ranks("tests.system.dist.said:asked", count=count):
        assert rank["counted"] == rank["said"] > 0


def test_a_message_of_any_rank_reaches_all_ranks() -> None:
    expected = [f"rank {of} \0 says: ± 1" for of in (0, 0, 1)]
    assert on_two_ranks("tests.system.dist.said:words") == [[*expected, ""]] * 2
