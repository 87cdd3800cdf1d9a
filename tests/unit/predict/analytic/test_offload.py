"""Offload of a block's activations to host memory: it overlaps with computation as far as
possible."""

from __future__ import annotations

from dataclasses import replace

import pytest

from steelyard.hardware.link import Link
from steelyard.predict.analytic.offload import with_offload
from steelyard.predict.analytic.sections import Section

_BLOCK = Section(
    forward_seconds=1.0,
    backward_seconds=2.0,
    recompute_seconds=0.0,
    exchange_seconds=0.25,
    exchanged_bytes=10,
    flops=7,
    saved_bytes=1000,
    recompute_bytes=0,
    peak_bytes=1500,
    parameters=(("w", 3),),
)


def _link(rate: float) -> Link:
    return Link(kind="host", latency_seconds=0.0, bytes_per_second=rate)


@pytest.mark.parametrize(
    ("rate", "forward", "backward"),
    [(4000.0, 1.0, 2.0), (1000.0, 1.0, 2.0), (800.0, 1.25, 2.0), (250.0, 4.0, 4.0)],
)
def test_only_transfers_longer_than_a_pass_are_waited_for(
    rate: float, forward: float, backward: float
) -> None:
    found = with_offload(_BLOCK, _link(rate))
    assert (found.forward_seconds, found.backward_seconds) == (forward, backward)
    waited = found.seconds - _BLOCK.seconds
    assert found.exchange_seconds == pytest.approx(_BLOCK.exchange_seconds + waited)


def test_offloaded_blocks_lie_on_the_host_and_two_on_the_device() -> None:
    found = with_offload(replace(_BLOCK, recompute_bytes=100), _link(1000.0))
    assert found.saved_bytes == 0
    assert found.offloaded_bytes == 1000
    assert found.recompute_bytes == 100 + 2 * 1000
    assert found.exchanged_bytes == 10 + 2 * 1000
    assert (found.flops, found.parameters) == (_BLOCK.flops, _BLOCK.parameters)


def test_fetching_overlaps_with_recomputation() -> None:
    again = replace(_BLOCK, recompute_seconds=1.0)
    assert with_offload(again, _link(1000 / 3)).backward_seconds == pytest.approx(2.0)
