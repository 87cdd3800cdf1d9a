"""Times of exchanges become the figures of the link that took them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from steelyard.core.collective import GLOO, Exchange
from steelyard.core.link import Link
from steelyard.measure.exchanges import fitted

_SIZES = {"small": 4096, "middle": 1 << 20, "large": 16 << 20}


def _said(link: Link, num_ranks: int) -> dict[str, float]:
    """What a rank measures on a link that is just as it is described."""
    timed = {}
    for name, nbytes in _SIZES.items():
        made = GLOO.collective(Exchange.ALL_REDUCE, axis="", num_ranks=num_ranks, nbytes=nbytes)
        timed[name] = link.seconds(made.sent_bytes, messages=made.hops)
    return {**timed, "call": 1e-5 * 2 * (num_ranks - 1), "disturbs": 0.25}


@given(st.integers(2, 8), st.floats(1e-6, 1e-2), st.floats(1e6, 1e11))
def test_the_link_is_found_again_and_the_slowest_rank_counts(
    num_ranks: int, latency: float, rate: float
) -> None:
    link = Link(kind="", latency_seconds=latency, bytes_per_second=rate)
    slow = _said(link, num_ranks)
    quick = {name: seconds / 2 for name, seconds in slow.items()}
    found = fitted([quick] * (num_ranks - 1) + [slow])
    assert found["rate"] == pytest.approx(rate, rel=1e-6)
    assert found["latency"] == pytest.approx(latency, rel=1e-3)
    assert found["call"] == pytest.approx(1e-5)
    assert found["disturbs"] == 0.25
