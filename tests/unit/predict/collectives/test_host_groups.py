"""Ranks of several hosts: the bytes that leave the busiest host, and the link that carries them."""

from __future__ import annotations

from typing import Any

import pytest

from steelyard.hardware.link import Link
from steelyard.ir.collective import GLOO, NCCL, Exchange, Transport
from steelyard.ir.parallel_layout import DATA, PIPELINE, ParallelLayout
from steelyard.predict import message_of
from steelyard.predict.collectives.host_groups import RanksPerHost
from steelyard.predict.cost_table import CostTable
from steelyard.predict.pipeline.gradient_reduction import GradientReductions, Trained
from tests.support.declared import DEVICE

NEAR = Link(kind="near", latency_seconds=1e-5, bytes_per_second=1e9)
BETWEEN = Link(kind="between", latency_seconds=1e-3, bytes_per_second=1e7, disturbs=0.5)
SUM, GATHER = Exchange.ALL_REDUCE, Exchange.ALL_GATHER


@pytest.mark.parametrize(
    ("ranks", "each", "kind", "count", "stride", "leaving"),
    [
        (4, 2, SUM, 4, 1, 1),  # one rank of each host sends to the next host
        (4, 2, SUM, 2, 2, 2),  # two rings, each with one rank of either host
        (4, 2, SUM, 2, 1, 0),  # the groups are within a host
        (
            4,
            2,
            GATHER,
            4,
            1,
            4 / 3,
        ),  # two of three other ranks are on the other host
        (6, 3, GATHER, 6, 1, 9 / 5),
        (6, 3, SUM, 2, 1, 1),  # ranks 2 and 3 form the group between hosts
        (6, 2, SUM, 3, 1, 2),  # ranks 2 and 3 of the middle host, each in its own ring
        (6, 2, GATHER, 3, 2, 2),
        (3, 1, SUM, 3, 1, 1),
        (3, 1, GATHER, 3, 1, 1),
    ],
)
def test_bytes_leaving_a_host_are_those_of_the_busiest_host(
    ranks: int, each: int, kind: Exchange, count: int, stride: int, leaving: float
) -> None:
    one = GLOO.collective(kind, axis=DATA, num_ranks=count, nbytes=1 << 20, stride=stride)
    assert RanksPerHost(num_ranks=ranks, each=each, near=NEAR).leaving(one) == pytest.approx(
        leaving
    )


@pytest.mark.parametrize(
    ("kind", "leaving"),
    [(SUM, 1), (GATHER, 1), (Exchange.REDUCE_SCATTER, 1), (Exchange.ALL_TO_ALL, 64 / 15)],
)
def test_nccl_collectives_use_a_ring(kind: Exchange, leaving: float) -> None:
    one = NCCL.collective(kind, axis=DATA, num_ranks=16, nbytes=1 << 20)
    assert RanksPerHost(num_ranks=16, each=8, near=NEAR).leaving(one) == pytest.approx(leaving)


@pytest.mark.parametrize(
    ("stages", "each", "stride", "leaving"),
    [
        (2, 2, 2, 2),
        (4, 2, 1, 1),
        (3, 2, 2, 2),
        (3, 3, 2, 1),
        (4, 4, 1, 0),
        (2, 2, 1, 0),
        (2, 4, 2, 0),
    ],
)
def test_stage_messages_to_the_next_host_leave_the_host(
    stages: int, each: int, stride: int, leaving: float
) -> None:
    """With three ranks on each host and two in each stage, rank 1 sends to 3, and then 2 to 4.

    If all ranks of a plan are on one host, nothing leaves it, however many others met.
    """
    one = message_of(ParallelLayout(pipeline=stages, data=stride), 1 << 20)
    assert RanksPerHost(num_ranks=24, each=each, near=NEAR).leaving(one) == leaving


@pytest.mark.parametrize(
    ("layout", "ranks", "each", "leaving"),
    [
        (
            ParallelLayout(pipeline=4),
            {0, 3},
            2,
            1,
        ),  # a tied embedding, on the first and last stage
        (ParallelLayout(pipeline=4, data=2), {0, 3}, 4, 2),
        (ParallelLayout(pipeline=4), {1, 2}, 2, 1),
        (ParallelLayout(pipeline=4), {0, 1}, 2, 0),
        (ParallelLayout(pipeline=6), {0, 1, 5}, 2, 1),
    ],
)
def test_reductions_among_stages_leave_the_hosts_of_their_ranks(
    layout: ParallelLayout, ranks: set[int], each: int, leaving: float
) -> None:
    nothing: tuple[tuple[Any, ...], ...] = ((),) * layout.pipeline
    sums = GradientReductions(
        layout=layout, shared=((frozenset(ranks), 1 << 20),), trained=nothing, loss_bytes=4,
        gathered=nothing,
    )  # fmt: skip
    (one,) = (c for c in sums.collectives_of(min(ranks)) if c.axis == PIPELINE)
    spread = RanksPerHost(num_ranks=layout.num_ranks, each=each, near=NEAR)
    assert spread.leaving(one) == leaving


@pytest.mark.parametrize(("transport", "leaving"), [(GLOO, 4 / 3), (NCCL, 1)])
def test_weights_of_stages_are_gathered_within_their_replica_groups(
    transport: Transport, leaving: float
) -> None:
    """Four ranks share a stage, on two hosts; the loss is on the host, and gloo sums it."""
    layout = ParallelLayout(pipeline=2, data=4)
    trained = ((Trained(1 << 20, is_shared=True),), ())
    sums = GradientReductions(
        layout=layout, shared=(), trained=trained, loss_bytes=4, gathered=((1 << 20,), ()),
        transport=transport,
    )  # fmt: skip
    spread = RanksPerHost(num_ranks=layout.num_ranks, each=2, near=NEAR)
    assert [spread.leaving(one) for one in sums.collectives_of(0)] == pytest.approx([leaving] * 2)
    assert all(one.adds_headers for one in sums.loss_collectives())


def test_tensor_parallel_groups_have_the_stride_of_their_size() -> None:
    """The program itself does not know about them."""
    one = GLOO.collective(SUM, axis=DATA, num_ranks=2, nbytes=1 << 20)
    assert RanksPerHost(num_ranks=4, each=2, near=NEAR).leaving(one) == 0
    assert RanksPerHost(num_ranks=4, each=2, near=NEAR, group=2).leaving(one) == 2


def test_a_collective_takes_the_time_of_the_busiest_hosts_uplink() -> None:
    spread = RanksPerHost(num_ranks=4, each=2, near=NEAR)
    costs = CostTable(device=DEVICE, links={DATA: BETWEEN}, spread=spread)

    def seconds(count: int, stride: int) -> float:
        made = GLOO.collective(SUM, axis=DATA, num_ranks=count, nbytes=1 << 20, stride=stride)
        return costs.exchange_seconds(made).value

    assert seconds(2, 1) == pytest.approx(2 * 1e-5 + (1 << 20) / 1e9)
    assert seconds(2, 2) == pytest.approx(2 * 1e-3 + 2 * (1 << 20) / 1e7)
    assert seconds(4, 1) == pytest.approx(6 * 1e-3 + 1.5 * (1 << 20) / 1e7)


def test_device_time_of_a_collective_is_for_its_own_bytes() -> None:
    """It does not depend on how many others of its host wait for the same uplink."""
    spread = RanksPerHost(num_ranks=4, each=2, near=NEAR)
    over, within = (
        GLOO.collective(SUM, axis=DATA, num_ranks=2, nbytes=1 << 20, stride=stride)
        for stride in (2, 1)
    )
    costs = CostTable(device=DEVICE, links={DATA: BETWEEN}, spread=spread)
    assert costs.link_of(over) == BETWEEN
    assert costs.link_of(within) == NEAR


def test_an_uplink_is_never_priced_faster_than_the_local_link() -> None:
    slow = Link(kind="near", latency_seconds=1e-5, bytes_per_second=1e6)
    one = GLOO.collective(SUM, axis=DATA, num_ranks=4, nbytes=1 << 20)
    assert RanksPerHost(num_ranks=4, each=2, near=slow).shared(one, BETWEEN).bytes_per_second == 1e6
