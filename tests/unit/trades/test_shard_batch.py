"""Batch sharding over ranks, with late waits: the program of one rank.

For the results of such programs on live ranks, see tests/system/dist/test_planned.py.
"""

from __future__ import annotations

from itertools import pairwise

import pytest

from steelyard.errors import Mismatch
from steelyard.ir.collective import Exchange
from steelyard.ir.graph import OutputKind, Phase, Role
from steelyard.ir.parallel_layout import DATA, ParallelLayout
from steelyard.ir.program import Instruction, Program
from steelyard.ir.rule import CallSite, Rule, spots
from steelyard.passes.data_parallel.overlap import sent_first, waits_within
from steelyard.predict import predict
from steelyard.predict.liveness import liveness
from steelyard.trades import TRADES
from steelyard.trades.accumulate import AccumulateRule
from steelyard.trades.offload_state import OffloadState, OffloadStateRule
from steelyard.trades.overlap import Overlap, OverlapRule
from steelyard.trades.shard_batch import ShardBatch, ShardBatchRule
from tests.support.declared import costs
from tests.unit.graphs.stored import stored_step

KIB = 1024
STEP, NORMS = stored_step("gpt-2-blocks"), stored_step("norms")


def shared(ranks: int, *more: Rule, bucket_bytes: int = 16 * KIB) -> Program:
    batch = ShardBatchRule(ranks=ranks, bucket=bucket_bytes)
    return STEP.apply_rules((batch, *more))


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_a_rank_works_on_its_share_and_sends_each_gradient_once(ranks: int) -> None:
    program = shared(ranks)
    assert program.problems() == []
    assert program.layout == ParallelLayout(data=ranks)
    assert batch_rows(program) == {8 // ranks}
    assert program.parts == ranks
    # A ring sends every share but a rank's own twice; shares are rounded up.
    nbytes = [
        t.nbytes
        for node in program.graph.inputs()
        for t in node.outputs
        if program.graph.storages[t.storage].role is Role.PARAMETER
    ]
    exchanges = len(program.exchanges)
    least = 2 * (ranks - 1) * (sum(nbytes) + 4) / ranks
    assert least <= program.sent_bytes <= least + 2 * ranks * exchanges
    outputs = {o.kind: o.node for o in program.graph.outputs}
    assert program.graph.by_name[outputs[OutputKind.LOSS]].waits_for


def test_micro_batches_split_the_share_of_a_rank() -> None:
    program = shared(2, AccumulateRule(micro_batches=2))
    assert (program.repeats, program.parts, batch_rows(program)) == (2, 4, {2})
    # Gradients and the loss are exchanged once, after the last micro-batch.
    assert program.sent_bytes == shared(2).sent_bytes
    assert not program.earlier.exchanges
    whole, share = (p.graph.resident_bytes(Role.BATCH) * p.parts for p in (STEP.plain, program))
    assert whole == share, "every rank is given the whole batch"


def test_rules_that_name_the_models_calls_find_them_in_micro_batches_too() -> None:
    """An addition of embeddings at the top of a model is not an addition of losses."""
    parts = AccumulateRule(micro_batches=2)
    alone, program = STEP.apply_rules((parts,)), shared(2, parts)
    assert CallSite("", "aten.add.Tensor", 0) in spots(alone.graph)
    assert {spot: spots(program.graph)[spot] for spot in spots(alone.graph)} == spots(alone.graph)


def test_rules_of_other_trades_apply_to_a_rank_as_to_the_whole_step() -> None:
    plain = STEP.plain
    recompute = next(t for t in TRADES if t.name == "recompute")
    offers, _ = recompute.offers(plain, STEP)
    widest = max(offers, key=lambda o: sum(r.count for r in o.rules))
    program = shared(2, *widest.rules)
    assert len(program.recomputed) == len(STEP.apply_rules(widest.rules).recomputed) > 0
    assert program.problems() == []


@pytest.mark.parametrize(
    ("ranks", "more", "said"),
    [
        (3, (), "shares the batch among 3 ranks"),
        (16, (), "one of 1, 2, 4, 8 equal shares"),
        (4, (AccumulateRule(micro_batches=4),), "splits the batch into 4 parts"),
    ],
)
def test_an_impossible_sharing_of_the_batch_is_refused(
    ranks: int, more: tuple[Rule, ...], said: str
) -> None:
    with pytest.raises(Mismatch, match=said):
        shared(ranks, *more)


def test_batch_statistics_are_those_of_all_samples() -> None:
    offers, (refusal,) = ShardBatch().offers(NORMS.plain, NORMS)
    # One sample per rank has no variance of its own.
    assert [offer.rules[0].ranks for offer in offers] == [2]
    assert refusal.label == "with BatchNorm statistics over each rank's own samples"
    assert "is lossy" in refusal.reason
    program = NORMS.apply_rules([ShardBatchRule(ranks=2, bucket=KIB)])
    assert program.problems() == []
    graph = program.graph
    sent = [n.collective for n in graph.nodes if n.collective is not None and n.path == "1"]
    # Mean and variance of 4 channels from both ranks; then the sums that their derivatives need.
    assert [(c.kind, c.axis, c.whole_bytes) for c in sent] == [
        (Exchange.ALL_GATHER, DATA, 2 * 2 * 4 * 4),
        (Exchange.ALL_REDUCE, DATA, 2 * 4 * 4),
    ]
    over = {n.path for n in graph.nodes if n.op.startswith("aten.") and "batch_norm" in n.op}
    assert over == {"2"}, "only what is normalised by sample is as it was"
    updated = {o.target for o in graph.outputs if o.kind is OutputKind.UPDATE}
    whole = {o.target for o in NORMS.plain.graph.outputs if o.kind is OutputKind.UPDATE}
    assert updated == whole
    assert len(updated) == 3


@pytest.mark.parametrize(
    ("rule", "said"),
    [
        (ShardBatchRule(ranks=4, bucket=KIB), "one of 1, 2 equal shares"),
        (
            ShardBatchRule(ranks=2, shares=(3, 1), bucket=KIB),
            "statistics over unequal shares, 3 : 1",
        ),
    ],
)
def test_impossible_shares_with_batch_statistics_are_refused(rule: Rule, said: str) -> None:
    with pytest.raises(Mismatch, match=said):
        NORMS.apply_rules([rule])


def test_later_waits_hide_more_communication_and_compute_the_same() -> None:
    plain = shared(2, bucket_bytes=4 * KIB)
    offers, _ = Overlap().offers(plain, STEP)
    assert [o.rules[0].window for o in offers] == sorted({o.rules[0].window for o in offers})
    assert offers[-1].rules[0].window == len(plain.exchanges) > 8
    programs = [plain, *(Overlap().rewrite(plain, o.rules, STEP) for o in offers)]
    for program in programs:
        assert program.problems() == []
        assert program.sent_bytes == plain.sent_bytes
        assert {n.name for n in program.graph.nodes} == {n.name for n in plain.graph.nodes}
    first, *others = map(_computed, programs[1:])
    assert sorted(first) == sorted(_computed(plain))
    assert others == [first] * len(others)
    exposed = [predict(p, costs(1e7)).metrics.exposed_communication_seconds.value for p in programs]
    assert all(late <= soon * (1 + 1e-9) for soon, late in pairwise(exposed))
    assert exposed[-1] < 0.8 * exposed[0]


def test_sent_gradients_are_computed_first() -> None:
    """A layer's own gradients are computed before that of its input, if that does not raise the
    peak."""
    plain = shared(2, bucket_bytes=KIB)
    assert sum(map(len, _unsent(plain))) > 10
    assert not any(_unsent(sent_first(plain)))
    ordered = Overlap().rewrite(plain, [OverlapRule(window=2)], STEP)
    assert liveness(ordered, None).peak_bytes <= liveness(waits_within(plain, 2), None).peak_bytes


def _unsent(program: Program) -> list[list[str]]:
    """Return the nodes before each issue of the backward pass, since the last one, that it does
    not send."""
    nodes, found, since = program.graph.by_name, list[list[str]](), list[Instruction]()
    for line in program.instructions:
        node = nodes[line.node]
        if line.sink is not None or line.phase is not Phase.BACKWARD or node.waits_for:
            continue
        since.append(line)
        if node.collective is not None:
            needed = {line.value}
            for one in reversed(since):
                needed.update(one.inputs if one.value in needed else ())
            unsent = (i for i in since if i.value not in needed)
            found.append([i.value for i in unsent if not nodes[i.node].is_free])
            since = []
    return found


def _computed(program: Program) -> list[str]:
    nodes = program.graph.by_name
    computed = (i for i in program.instructions if not i.sink and not nodes[i.node].waits_for)
    return [i.value for i in computed if not nodes[i.node].is_free]


def test_state_offload_is_refused_where_ranks_exchange_gradients() -> None:
    program = shared(2)
    offers, (refusal,) = OffloadState().offers(program, STEP)
    assert not offers
    assert "if ranks exchange gradients" in refusal.reason
    rule = OffloadStateRule(parameter="head.weight", what="gradient")
    with pytest.raises(Mismatch, match="needs 2 ranks and offloads weights"):
        shared(2, rule)


def batch_rows(program: Program) -> set[int]:
    graph = program.graph
    return {
        t.shape[0]
        for node in graph.inputs()
        for t in node.outputs
        if graph.storages[t.storage].role is Role.BATCH
    }
