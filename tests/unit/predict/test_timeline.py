"""Steps whose seconds can be counted by hand: a second per line, and one link."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from steelyard.errors import BadInput
from steelyard.ir.collective import GLOO
from steelyard.ir.program import Program
from steelyard.passes.data_parallel.all_reduce import bucketed_all_reduce
from steelyard.passes.data_parallel.overlap import waits_within
from steelyard.predict import predict, step_seconds
from steelyard.predict.arrival_skew import Skew
from tests.support.made_up import chain, costs


def reduced(*, window: int | None, gradients: int = 3, after: int = 0) -> Program:
    graph = bucketed_all_reduce(
        chain(gradients=gradients, after=after), bucket_bytes=1, num_ranks=2, transport=GLOO
    )
    return waits_within(Program.plain(graph), window)


# The loss takes one second too. Exchanges of gradients 0, 1, 2 are issued at 2, 3, 4 seconds, or
# when the device reaches them; the link carries one at a time.
@pytest.mark.parametrize(
    ("exchange_seconds", "window", "after", "step", "exposed"),
    [
        pytest.param(0.5, 0, 0, 5.5, 1.5, id="waited for at once, every exchange is exposed"),
        pytest.param(0.5, None, 0, 4.5, 0.5, id="at the end, only the last is"),
        pytest.param(0.5, None, 1, 5.0, 0.0, id="unless something else goes on"),
        pytest.param(0.5, 1, 0, 4.5, 0.5, id="a window of one is as good here"),
        pytest.param(3.0, None, 0, 11.0, 7.0, id="a slow link works from its first to its end"),
        pytest.param(3.0, None, 1, 11.0, 6.0, id="and hides what the device does meanwhile"),
        pytest.param(3.0, 1, 0, 11.0, 7.0, id="a window keeps a slow link as busy"),
        pytest.param(3.0, 0, 0, 13.0, 9.0, id="no window does not"),
    ],
)
def test_a_wait_blocks_the_device_until_the_link_is_done(
    exchange_seconds: float, window: int | None, after: int, step: float, exposed: float
) -> None:
    program = reduced(window=window, after=after)
    metrics = predict(program, costs(exchange_seconds=exchange_seconds)).metrics
    assert metrics.step_seconds.value == pytest.approx(step)
    assert metrics.exposed_communication_seconds.value == pytest.approx(exposed)
    assert metrics.communication_seconds.value == pytest.approx(3 * exchange_seconds)
    assert metrics.computation_seconds.value == pytest.approx(4 + after)


def test_each_message_costs_its_latency() -> None:
    price = costs(exchange_seconds=1.0)
    slow = replace(price.links["data"], latency_seconds=0.25)
    metrics = predict(reduced(window=0), replace(price, links={"data": slow})).metrics
    # An all-reduce around a ring of two is two messages.
    assert metrics.communication_seconds.value == pytest.approx(3 * (1.0 + 2 * 0.25))


def test_each_micro_batch_exchanges_its_own_values() -> None:
    once = reduced(window=None)
    price = costs(exchange_seconds=0.5)
    one, three = predict(once, price).metrics, predict(once.repeated(3), price).metrics
    # The bytes include gloo's headers for each bucket.
    sent = 3 * (1024 + 576)
    assert three.communication_bytes.value == 3 * one.communication_bytes.value == 3 * sent
    assert three.step_seconds.value == pytest.approx(3 * one.step_seconds.value)


def test_the_drawn_timeline_is_flat_during_waits() -> None:
    drawn = predict(reduced(window=0), costs(exchange_seconds=0.5)).timeline
    assert drawn is not None
    assert max(drawn.seconds) == pytest.approx(5.5)
    assert list(drawn.seconds) == sorted(drawn.seconds)


def test_an_unknown_link_is_an_error() -> None:
    price = replace(
        costs(exchange_seconds=1.0), links={"tensor": costs(exchange_seconds=1).links["data"]}
    )
    with pytest.raises(BadInput, match="axis 'data', whose link is unknown"):
        predict(reduced(window=0), price)


def test_a_step_without_collectives_costs_the_sum_of_its_instructions() -> None:
    metrics = predict(Program.plain(chain()), costs(exchange_seconds=1.0)).metrics
    assert metrics.step_seconds == metrics.computation_seconds
    assert metrics.communication_bytes.value == metrics.communication_seconds.value == 0


@settings(deadline=None)
@given(
    gradients=st.integers(1, 6),
    window=st.integers(0, 6),
    after=st.integers(0, 2),
    exchange_seconds=st.floats(0.01, 5.0),
    spread=st.floats(0.0, 0.5),
)
def test_waiting_later_never_takes_longer(
    gradients: int, window: int, after: int, exchange_seconds: float, spread: float
) -> None:
    price = costs(exchange_seconds=exchange_seconds, spread=spread)
    sooner, later = (
        predict(reduced(window=w, gradients=gradients, after=after), price).metrics
        for w in (window, window + 1)
    )
    slack = 1 + 1e-9
    assert later.step_seconds.value <= sooner.step_seconds.value * slack
    for metrics in (sooner, later):
        exposed, step = metrics.exposed_communication_seconds, metrics.step_seconds
        # The interval comes from two extreme cases; in the middle, the sum is exact.
        assert step.value == pytest.approx(metrics.computation_seconds.value + exposed.value)
        assert step.value * slack >= max(
            metrics.computation_seconds.value, metrics.communication_seconds.value
        )
        assert exposed.value <= metrics.communication_seconds.value * slack
    program = reduced(window=window, gradients=gradients, after=after)
    assert step_seconds(program, price) == sooner.step_seconds


@pytest.mark.parametrize("speed", [1.0, 0.5, 0.25])
def test_device_time_of_a_collective_is_longer_on_a_slow_device(speed: float) -> None:
    """If the collective is hidden, all of it slows the operators; on half of a device, twice as
    much."""
    program = reduced(window=None, after=3)
    price = costs(exchange_seconds=0.5)
    slow = replace(price, device=price.device.at_speed(speed))
    disturbing = replace(slow.links["data"], disturbs=1.0)
    alone = step_seconds(program, slow).value
    beside = step_seconds(program, replace(slow, links={"data": disturbing})).value
    assert beside - alone == pytest.approx(3 * 0.5 / speed)
    # If it is waited for at once, there is no operator that it could slow.
    program = reduced(window=0)
    at_once = step_seconds(program, replace(slow, links={"data": disturbing})).value
    assert at_once == pytest.approx(step_seconds(program, slow).value)


def test_at_each_collective_ranks_wait_for_the_last_one() -> None:
    """The wait is longer the longer the ranks have computed since they were last synchronized."""
    tenth = Skew(short_seconds=1.0, short_wait=0.1, long_seconds=10.0, long_wait=1.0)
    price = replace(costs(exchange_seconds=0.5), skew=tenth)
    metrics = predict(reduced(window=0), price).metrics
    # Exchanges are issued after 2, 1 and 1 seconds of computation.
    assert metrics.exposed_communication_seconds.value == pytest.approx(3 * 0.5 + 0.2 + 0.1 + 0.1)
    assert metrics.step_seconds.value == pytest.approx(5.5 + 0.4)
    assert metrics.communication_seconds.value == pytest.approx(3 * 0.5)
    # The link itself has an uncertainty of one half.
    assert metrics.exposed_communication_seconds.low == pytest.approx(3 * 0.25)
    assert metrics.exposed_communication_seconds.high == pytest.approx(3 * 0.75 + 3 * 0.4)
    # A later wait hides the delay, except that of the last exchange, after 4 seconds.
    late = predict(reduced(window=None), price).metrics
    assert late.exposed_communication_seconds.value == pytest.approx(0.5 + 0.4)


def test_each_rank_reads_its_gradients_before_they_are_summed() -> None:
    price = costs(exchange_seconds=0.5)
    device = replace(price.device, bytes_per_second=1024 / 0.25)
    price = replace(
        price, device=device, links=dict.fromkeys(("data", "other"), price.links["data"])
    )
    graph = reduced(window=0).graph
    summed = next(n for n in map(graph.by_name.__getitem__, graph.collectives) if n.collective)
    assert summed.collective is not None
    other = replace(summed, collective=replace(summed.collective, axis="other"))
    assert price.seconds(summed).value - price.seconds(other).value == pytest.approx(0.25)


def test_shared_cores_widen_the_interval_only() -> None:
    price = costs(exchange_seconds=0.5)
    own, shared = (
        predict(reduced(window=0), replace(price, shares_cores=shares)).metrics.step_seconds
        for shares in (False, True)
    )
    assert shared.value == own.value
    assert shared.low < 0.65 * own.value < own.low
    assert own.high < 1.5 * own.value < shared.high
