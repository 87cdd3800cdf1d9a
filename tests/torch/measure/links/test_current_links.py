"""The links of a run, measured again: rates and latencies from timed exchanges."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

from steelyard.hardware.cluster import Link
from steelyard.ir.collective import GLOO, Exchange
from steelyard.measure.links import current_links
from steelyard.measure.links.current_links import measured_now, rates_now

BEFORE = Link(kind="gloo", latency_seconds=1e-4, bytes_per_second=1e9)
RATE = 1e8


def _all_reduce_on(latency: float) -> Callable[[torch.Tensor, int], float]:
    def seconds(x: torch.Tensor, rounds: int) -> float:
        assert rounds >= 1
        cost = GLOO.collective(Exchange.ALL_REDUCE, axis="", num_ranks=2, nbytes=4 * x.numel())
        return cost.hops * latency + cost.sent_bytes / RATE

    return seconds


@pytest.mark.parametrize("latency", [1e-5, 1e-3, 0.05, 0.5])
def test_a_rate_is_found_at_any_latency(latency: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """A small exchange over a distant or stalled link takes longer than a large one elsewhere."""
    monkeypatch.setattr(dist, "get_world_size", lambda: 3)
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    monkeypatch.setattr(current_links, "max_over_ranks", lambda seconds: seconds)
    monkeypatch.setattr(current_links, "all_reduce_seconds", _all_reduce_on(latency))
    monkeypatch.setattr(
        current_links, "_message_seconds", lambda nbytes, other: latency + nbytes / RATE
    )
    assert rates_now(hosts=3) == pytest.approx((RATE, RATE), rel=0.01)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    link = measured_now(BEFORE)
    assert link.bytes_per_second == pytest.approx(RATE, rel=0.01)
    assert link.latency_seconds == pytest.approx(latency, rel=0.05)
