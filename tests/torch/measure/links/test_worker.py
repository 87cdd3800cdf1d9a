"""Times of exchanges are converted to the figures of their link."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from steelyard.hardware.link import Link
from steelyard.ir.collective import GLOO, Exchange
from steelyard.measure.cache import CostCache
from steelyard.measure.links.exchange_sizes import SIZES, ExchangeSizes
from steelyard.measure.links.link_fit import fitted
from steelyard.measure.links.probe import context_of, measured_ranks

_SIZES = SIZES["cpu"]._asdict()


def said_of(link: Link, num_ranks: int, *, sizes: ExchangeSizes = SIZES["cpu"]) -> dict[str, float]:
    """Return the measurements of a rank on a link exactly as it is described."""
    timed = {}
    for name, nbytes in sizes._asdict().items():
        made = GLOO.collective(Exchange.ALL_REDUCE, axis="", num_ranks=num_ranks, nbytes=nbytes)
        timed[name] = link.seconds(made.sent_bytes, messages=made.hops)
    own = {"call": 1e-5 * 2 * (num_ranks - 1), "disturbs": 0.25, "product": 1e-3}
    hops = {
        f"hop {name}": 3 * link.latency_seconds + nbytes / (2 * link.bytes_per_second)
        for name, nbytes in list(sizes._asdict().items())[:2]
    }
    return {**timed, **own, **hops, "hand": 2e-5, "hand disturbs": 0.125}


@given(st.integers(2, 8), st.floats(1e-6, 1e-2), st.floats(1e6, 1e11))
def test_the_link_is_fitted_from_the_slowest_rank(
    num_ranks: int, latency: float, rate: float
) -> None:
    link = Link(kind="", latency_seconds=latency, bytes_per_second=rate)
    slow = said_of(link, num_ranks)
    quick = {name: seconds / 2 for name, seconds in slow.items()} | {"product": slow["product"]}
    found = fitted([quick] * (num_ranks - 1) + [slow])
    assert found["rate"] == pytest.approx(rate, rel=1e-6)
    assert found["latency"] == pytest.approx(latency, rel=1e-3)
    assert found["call"] == pytest.approx(1e-5)
    assert found["hop"] == pytest.approx(3 * latency, rel=1e-3)
    assert found["hand"] == 2e-5
    assert found["hand rate"] == pytest.approx(2 * rate, rel=1e-6)
    assert (found["disturbs"], found["hand disturbs"]) == (0.25, 0.125)


def test_larger_messages_are_sent_between_gpus() -> None:
    link, sizes = Link(kind="", latency_seconds=1e-4, bytes_per_second=1e11), SIZES["cuda"]
    slots = {"slot small": 1e-4, "slot large": 1e-3, "slot hand": 1e-5}
    found = fitted([{**said_of(link, 2, sizes=sizes), **slots}] * 2, sizes=sizes)
    assert found["rate"] == pytest.approx(1e11, rel=1e-6)
    assert found["hand rate"] == pytest.approx(2e11, rel=1e-6)
    assert found["slot rate"] == pytest.approx((sizes.middle - sizes.small) / 9e-4)


def test_the_cost_of_a_collective_on_a_slow_rank_is_counted_once() -> None:
    link = Link(kind="", latency_seconds=1e-4, bytes_per_second=1e9)
    fast = said_of(link, 2)
    half = {**fast, "product": 2 * fast["product"], "disturbs": 3 * fast["disturbs"]}
    found = fitted([fast, half])
    assert found["speed of rank 1"] == 0.5
    assert found["disturbs"] == 1.5 * fast["disturbs"]


@given(st.floats(1e-6, 1e-3), st.floats(1e-6, 1e-4), st.floats(1e8, 1e11))
def test_cpu_time_of_a_message_is_not_counted_as_transfer(
    hop: float, hand: float, rate: float
) -> None:
    link = Link(kind="", latency_seconds=1e-4, bytes_per_second=1e9)
    small = hop + 2 * hand
    large = small + (_SIZES["middle"] - _SIZES["small"]) / rate
    slots = {"slot small": small, "slot large": large, "slot hand": hand}
    found = fitted([{**said_of(link, 2), **slots}] * 2)
    assert found["slot hop"] == pytest.approx(hop, rel=1e-3)
    assert found["slot hand"] == hand
    assert found["slot rate"] == pytest.approx(rate, rel=1e-3)


@given(st.lists(st.floats(0.1, 1.0), min_size=2, max_size=6))
def test_only_clearly_slower_ranks_are_told_apart(speeds: list[float]) -> None:
    link = Link(kind="", latency_seconds=1e-4, bytes_per_second=1e9)
    fastest = max(speeds)
    said = [{**said_of(link, len(speeds)), "product": 1e-3 / speed} for speed in speeds]
    found = fitted(said)
    for rank, speed in enumerate(speeds):
        told, true = found[f"speed of rank {rank}"], speed / fastest
        assert told == (1.0 if true > 0.85 else pytest.approx(true))


def test_arrival_skew_is_the_mean_over_ranks(tmp_path: Path) -> None:
    link = Link(kind="", latency_seconds=1e-4, bytes_per_second=1e9)
    late = {"skew short": 1e-4, "skew short after": 4e-3, "skew long": 3e-3}
    first, second = (
        {**said_of(link, 2), **late, "skew long after": after, "skew short": wait}
        for after, wait in ((0.03, 0.0), (0.05, 2e-4))
    )
    cache = CostCache(tmp_path / "costs.sqlite")
    cache.write_rates(context_of(2), fitted([first, second]))
    skew = measured_ranks(2, cache=cache).skew
    assert skew is not None
    assert skew.short_wait == pytest.approx(1e-4)
    assert (skew.long_wait, skew.long_seconds) == (pytest.approx(3e-3), pytest.approx(0.04))


def test_unmeasured_skew_stays_unknown(tmp_path: Path) -> None:
    link = Link(kind="", latency_seconds=1e-4, bytes_per_second=1e9)
    cache = CostCache(tmp_path / "costs.sqlite")
    cache.write_rates(context_of(2), fitted([said_of(link, 2)] * 2))
    assert measured_ranks(2, cache=cache).skew is None


def test_measurements_of_another_process_are_reused(tmp_path: Path) -> None:
    cache = CostCache(tmp_path / "costs.sqlite")
    link = Link(kind="", latency_seconds=1e-4, bytes_per_second=1e9)
    said = [{**said_of(link, 2), "product": product} for product in (1e-3, 2e-3)]
    cache.write_rates(context_of(2), fitted(said))
    measured = measured_ranks(2, cache=cache)
    assert measured.speeds == (1.0, 0.5)
    assert measured.handing.latency_seconds == pytest.approx(3 * measured.link.latency_seconds)
    assert measured.handing.call_seconds == 2e-5
    assert measured.handing.bytes_per_second == pytest.approx(2e9)
    assert (measured.link.disturbs, measured.handing.disturbs) == (0.25, 0.125)
    assert measured.slots is None, "these ranks have said nothing of memory that they share"
    said = [{**said_of(link, 2), "product": product} for product in (1e-3, 1.1e-3)]
    cache.write_rates(context_of(2), fitted(said))
    assert measured_ranks(2, cache=cache).speeds == ()
