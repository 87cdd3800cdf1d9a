"""Exchanges in plain data: the bytes that a ring sends, and programs that read a result too
early."""

from __future__ import annotations

from dataclasses import replace

import pytest

from steelyard.ir.collective import GLOO, THROUGH_SLOTS, Exchange, Transport
from steelyard.ir.graph import Ref, item_bytes
from steelyard.ir.program import Program
from steelyard.passes.data_parallel.all_reduce import bucketed_all_reduce
from tests.support.made_up import chain


@pytest.mark.parametrize(
    ("kind", "sent", "gloo_sends"),
    [
        (Exchange.ALL_REDUCE, 6 * 250, 6 * 250),
        (Exchange.ALL_GATHER, 3 * 250, 3 * 250),
        (Exchange.REDUCE_SCATTER, 3 * 250, 3 * 250),
    ],
)
def test_bytes_around_a_ring_of_four(kind: Exchange, sent: int, gloo_sends: int) -> None:
    ring = Transport(name="ring")
    assert ring.collective(kind, axis="x", num_ranks=4, nbytes=1000).sent_bytes == sent
    assert GLOO.collective(kind, axis="x", num_ranks=4, nbytes=1000).sent_bytes == gloo_sends


def test_one_rank_sends_nothing() -> None:
    for kind in Exchange:
        collective = GLOO.collective(kind, axis="x", num_ranks=1, nbytes=1000)
        assert (collective.sent_bytes, collective.wire_bytes, collective.hops) == (0, 0, 0)


@pytest.mark.parametrize(
    ("kind", "num_ranks", "nbytes", "said"),
    [
        # The bytes that the kernel counted for float32; tests/system/dist/test_said.py counts them
        # again.
        (Exchange.ALL_REDUCE, 2, 240, 576),
        (Exchange.ALL_REDUCE, 3, 240, 1152),
        (Exchange.ALL_REDUCE, 2, 24_000_000, 12 * 288),
        (Exchange.REDUCE_SCATTER, 4, 240, 432),
        (Exchange.ALL_GATHER, 4, 24_000_000, 432),
        (Exchange.ALL_TO_ALL, 4, 24_000_000, 432),
        # A scalar is sent around the ring as one piece, two elements as two.
        (Exchange.ALL_REDUCE, 2, 4, 144),
        (Exchange.ALL_REDUCE, 2, 8, 288),
    ],
)
def test_gloo_message_headers_are_counted(
    kind: Exchange, num_ranks: int, nbytes: int, said: int
) -> None:
    collective = GLOO.collective(kind, axis="x", num_ranks=num_ranks, nbytes=nbytes)
    assert collective.wire_bytes - collective.sent_bytes == said
    others = [Transport(name="another"), THROUGH_SLOTS]
    for one in (t.collective(kind, axis="x", num_ranks=num_ranks, nbytes=nbytes) for t in others):
        assert one.wire_bytes == one.sent_bytes


@pytest.mark.parametrize(
    ("dtype", "nbytes"),
    [("float32", 4), ("bfloat16", 2), ("complex64", 8), ("bool", 1), ("float8_e4m3fn", 1)],
)
def test_bytes_of_an_element(dtype: str, nbytes: int) -> None:
    assert item_bytes(dtype) == nbytes


def test_a_program_must_wait_before_it_reads() -> None:
    graph = bucketed_all_reduce(chain(gradients=1), bucket_bytes=1, num_ranks=2, transport=GLOO)
    program = Program.plain(graph)
    assert program.problems() == []
    unwaited = [i for i in program.instructions if i.value != "bucket_0_reduced_waited"]
    assert (
        "nothing waits for bucket_0_reduced"
        in replace(program, instructions=tuple(unwaited)).problems()
    )
    early = tuple(
        replace(i, inputs=("bucket_0_reduced",)) if i.sink is not None else i
        for i in program.instructions
    )
    assert replace(program, instructions=early).problems() == [
        "sink of bucket_0_reduced_waited reads bucket_0_reduced while it is in flight"
    ]


def test_a_wait_must_read_what_it_waits_for() -> None:
    graph = bucketed_all_reduce(chain(gradients=1), bucket_bytes=1, num_ranks=2, transport=GLOO)
    wait = graph.by_name["bucket_0_reduced_waited"]
    other = replace(wait, inputs=("work0",), args=(Ref("work0"),))
    broken = replace(graph, nodes=tuple(other if n is wait else n for n in graph.nodes))
    assert any("without reading it" in problem for problem in broken.problems())
