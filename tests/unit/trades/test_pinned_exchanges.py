"""The number of slots that exchanges need, and the refusal of a plan without a link through
shared memory."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from steelyard.errors import BadInput, Mismatch
from steelyard.ir.graph import Graph
from steelyard.ir.message_slots import rounds_of
from steelyard.ir.program import Program
from steelyard.passes.data_parallel.overlap import issued_ahead, waits_within
from steelyard.predict import predict
from steelyard.trades.shared_memory_transfer import SharedMemoryTransfer, SharedMemoryTransferRule
from tests.unit.passes.data_parallel.test_overlap import _COSTS, exchanging
from tests.unit.trades.test_shard_pipeline import SOURCE, stages

_RULE = SharedMemoryTransferRule(messages="exchanges")


def _pinned(program: Program) -> Program:
    return SharedMemoryTransfer().rewrite(program, [_RULE], SOURCE)


def _in_turn(graph: Graph) -> list[tuple[str, str]]:
    """Return what a rank issues and waits for, in order."""
    events = []
    for node in graph.nodes:
        if node.waits_for:
            events.append(("waits", node.waits_for))
        if node.collective is not None:
            events.append(("issues", node.name))
    return events


def _most_unread(events: list[tuple[str, str]], steps: int, drawn: random.Random) -> int:
    """Return, for two ranks that run in any order as far as each can, the most messages that one
    has written and the other has not read."""
    lists = [(step, *event) for step in range(steps) for event in events]
    place, issued = [0, 0], [set[object](), set[object]()]
    read, most = [set[object](), set[object]()], 0
    while min(place) < len(lists):
        rank = drawn.choice([r for r in (0, 1) if place[r] < len(lists)])
        # Now and then, one rank runs as far as it can.
        for _ in range(drawn.choice([1, 1, len(lists)])):
            if place[rank] == len(lists):
                break
            step, does, what = lists[place[rank]]
            if does == "issues":
                issued[rank].add((step, what))
            elif (step, what) not in issued[1 - rank]:
                break
            else:
                read[rank].add((step, what))
            place[rank] += 1
            most = max(most, *(len(issued[r] - read[1 - r]) for r in (0, 1)))
    return most


@settings(deadline=None, max_examples=60)
@given(seed=st.integers(0, 10_000), lag=st.integers(1, 6), ahead=st.integers(0, 4))
def test_no_rank_ever_waits_for_a_free_slot(seed: int, lag: int, ahead: int) -> None:
    program = issued_ahead(waits_within(_pinned(exchanging(seed, again=False)), lag), ahead)
    nodes = program.graph.by_name
    lines = (line.node for line in program.instructions if line.sink is None)
    graph = replace(program.graph, nodes=tuple(nodes[name] for name in lines))
    assume(graph.collectives)  # few drawn graphs have no gradient
    ((axis, rounds),) = rounds_of(graph).items()
    assert axis == "data"
    events, drawn = _in_turn(graph), random.Random(seed)
    most = max(_most_unread(events, 3, drawn) for _ in range(5))
    assert 0 < most <= rounds.count
    # A part also has room for the largest exchange.
    largest = max(c.whole_bytes for n in graph.nodes if (c := n.collective))
    assert rounds.part_bytes >= largest // 2
    assert rounds.held_bytes == sum(e.nbytes for e in rounds.edges if e.target == 1)
    assert rounds.sum_bytes == 0, "of two ranks each adds up all"


@settings(deadline=None, max_examples=20)
@given(seed=st.integers(0, 10_000))
def test_all_collectives_use_slots_and_send_no_more_bytes(seed: int) -> None:
    before = exchanging(seed, again=True)
    after = _pinned(before)
    assert after.problems() == []
    assert all(n.collective.is_pinned for n in after.graph.nodes if n.collective)
    assert after.instructions == before.instructions
    # A reduce-scatter, of which each rank reads its own rows, is not an all-reduce here.
    assert before.sent_bytes // 2 <= after.sent_bytes <= before.sent_bytes


def test_a_cluster_without_shared_memory_is_refused() -> None:
    with pytest.raises(BadInput, match="have none in common") as error:
        predict(_pinned(exchanging(1, again=False)), _COSTS)
    assert len(str(error.value).splitlines()) == 3


def test_the_rule_is_refused_without_collectives_and_for_stages() -> None:
    for program in (SOURCE.plain, stages("blocks.1")):
        with pytest.raises(
            Mismatch, match="the plan has shared_memory_transfer for collectives"
        ) as error:
            _pinned(program)
        assert len(str(error.value).splitlines()) == 3
