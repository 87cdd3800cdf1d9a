"""Sharded weights: gathered in buckets, and ahead of their readers, without raising the peak.

For the results of such programs on live ranks, see tests/system/dist/test_planned.py.
"""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest

from steelyard.hardware.cluster import Device, Link
from steelyard.ir.collective import Exchange
from steelyard.ir.optimizer_update import WEIGHT
from steelyard.ir.parallel_layout import DATA
from steelyard.ir.program import Program
from steelyard.ir.rule import Rule
from steelyard.predict import peak_bytes, predict
from steelyard.predict.cost_table import CostTable
from steelyard.search.ranks.gather_buckets import with_gather_buckets, with_prefetch
from steelyard.trades.accumulate import AccumulateRule
from steelyard.trades.overlap import OverlapRule
from steelyard.trades.recompute import Recompute, RecomputeRule
from steelyard.trades.shard_batch import ShardBatchRule
from steelyard.trades.shard_states import ShardStates
from tests.unit.graphs.stored import stored_step

STEP = stored_step("gpt-fused")
DEVICE = Device(kind="declared", flops_per_second=1e9, bytes_per_second=1e9, memory_bytes=1 << 40)
# The link is like gloo: the latency of a message is longer than the transfer of many of these
# weights.
LINK = Link(kind="declared", latency_seconds=1e-3, bytes_per_second=1e8)
COSTS = CostTable(device=DEVICE, links={DATA: LINK})
BATCH = (
    OverlapRule(window=1),
    ShardBatchRule(ranks=2, bucket=1 << 20),
)


@functools.cache
def states(times: int) -> tuple[Rule, ...]:
    offers, _ = ShardStates().offers(STEP.apply_rules(BATCH), STEP)
    return tuple(replace(rule, gathers=times) for offer in offers for rule in offer.rules)


def gathered(rules: tuple[Rule, ...], *more: Rule) -> Program:
    return STEP.apply_rules((*rules, *more))


def test_larger_buckets_send_the_same_bytes_in_fewer_collectives() -> None:
    ways = with_gather_buckets(STEP.plain.graph, states(2))
    assert [rules[0].bucket for rules in ways] == [0, 64 << 10, 256 << 10, 1 << 20]
    programs = [gathered((*BATCH, *rules)) for rules in ways]
    counts = [len(program.exchanges) for program in programs]
    assert counts == sorted(counts, reverse=True)
    # All in one bucket: a gather for each pass, a reduce-scatter, the loss, and the unsharded
    # gradients.
    assert counts[0] > 40
    assert counts[-1] == 5
    assert len({program.sent_bytes for program in programs}) == 1
    for program in programs:
        assert program.problems() == []
        assert _sent(program, Exchange.ALL_GATHER) == _sent(programs[0], Exchange.ALL_GATHER)
        assert _sent(program, Exchange.REDUCE_SCATTER) == _sent(
            programs[0], Exchange.REDUCE_SCATTER
        )


def _sent(program: Program, kind: Exchange) -> int:
    nodes = program.graph.by_name
    issued = (nodes[program.instructions[e.issue].node].collective for e in program.exchanges)
    return sum(c.sent_bytes for c in issued if c is not None and c.kind is kind)


@pytest.mark.parametrize("nbytes", [0, 128 << 10])
def test_prefetched_gathers_overlap_without_raising_the_peak(nbytes: int) -> None:
    rules = (*BATCH, *(replace(rule, bucket=nbytes) for rule in states(2)))
    plain = gathered(rules)
    within = gathered(with_prefetch(rules, has_equal_shares=True))
    freely = gathered(with_prefetch(rules, has_equal_shares=False))
    before, after = (predict(p, COSTS).metrics for p in (plain, within))
    assert within.sent_bytes == plain.sent_bytes
    assert peak_bytes(within, COSTS) <= peak_bytes(plain, COSTS) < peak_bytes(freely, COSTS)
    assert after.exposed_communication_seconds.value < (
        0.8 * before.exposed_communication_seconds.value
    )
    assert after.step_seconds.value < before.step_seconds.value


def test_sharded_states_combine_with_micro_batches_and_recomputation() -> None:
    again = RecomputeRule(module="blocks.*.mlp.act", op="aten.gelu.default", count=3)
    at_once = (replace(rule, bucket=128 << 10) for rule in states(2))
    rules = with_prefetch((*BATCH, *at_once), has_equal_shares=True)
    parts = AccumulateRule(micro_batches=2)
    for more in ((again,), (parts,), (again, parts)):
        program = gathered(rules, *more)
        assert program.problems() == []
        assert len(program.exchanges) == len(gathered(rules).exchanges)
        # Sharded gradients are exchanged in every micro-batch, other gradients and the loss in the
        # last one.
        whole = (n for n in program.graph.inputs() if n.name.startswith(WEIGHT))
        once = 4 + sum(n.outputs[0].nbytes for n in whole if n.name not in program.in_shares)
        rounds = program.repeats
        assert program.sent_bytes == once + rounds * (gathered(rules).sent_bytes - once)
    assert peak_bytes(gathered(rules, again), COSTS) < peak_bytes(gathered(rules), COSTS)
    assert {offer.trade for offer in Recompute().offers(gathered(rules), STEP)[0]}
