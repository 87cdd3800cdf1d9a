"""Sharing the batch among ranks, and waiting late for what they exchange: one rank's program.

What such programs compute on live ranks: see tests/system/dist/test_planned.py.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from torch import nn

import steelyard as sy
from steelyard.errors import Mismatch
from steelyard.hardware.cluster import Device, LevelMember, Link, TopologyLevel
from steelyard.ir.collective import Exchange
from steelyard.ir.graph import OutputKind, Phase, Role
from steelyard.ir.parallel_layout import DATA, PIPELINE, TENSOR, ParallelLayout
from steelyard.ir.program import Instruction, Program
from steelyard.ir.rule import CallSite, Rule, spots
from steelyard.passes.data_parallel.overlap import sent_first, waits_within
from steelyard.plans.budget import Budget
from steelyard.predict import predict, step_seconds
from steelyard.predict.cost_table import CostTable
from steelyard.predict.liveness import liveness
from steelyard.predict.rank_subsets import Subset
from steelyard.run.compiled.segments import Segment, segments
from steelyard.search import LayoutSearch, SearchResult, StepSearch
from steelyard.trades import TRADES
from steelyard.trades.accumulate import AccumulateRule
from steelyard.trades.offload_state import OffloadState, OffloadStateRule
from steelyard.trades.overlap import Overlap, OverlapRule
from steelyard.trades.shard_batch import ShardBatch, ShardBatchRule
from tests.harness import Trial, looking_less_far
from tests.zoo.case import class_loss, images, next_token_loss, tokens
from tests.zoo.own import GPT

pytestmark = pytest.mark.slow

KIB = 1024
DEVICE = Device(kind="declared", flops_per_second=1e9, bytes_per_second=1e10, memory_bytes=1 << 40)


@functools.cache
def trial() -> Trial:
    model = GPT(layers=2, width=32, heads=2, vocabulary=64, length=16)
    return Trial(model, next_token_loss, tokens(8, 16, 64))


def costs(rate: float) -> CostTable:
    link = Link(kind="declared", latency_seconds=1e-6, bytes_per_second=rate)
    return CostTable(device=DEVICE, links=dict.fromkeys((DATA, TENSOR, PIPELINE), link))


def shared(ranks: int, *more: Rule, bucket_bytes: int = 16 * KIB) -> Program:
    batch = ShardBatchRule(ranks=ranks, bucket=bucket_bytes)
    return trial().apply_rules((batch, *more))


def batch_rows(program: Program) -> set[int]:
    graph = program.graph
    return {
        t.shape[0]
        for node in graph.inputs()
        for t in node.outputs
        if graph.storages[t.storage].role is Role.BATCH
    }


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_a_rank_works_on_its_share_and_sends_each_gradient_once(ranks: int) -> None:
    program = shared(ranks)
    assert program.problems() == []
    assert program.layout == ParallelLayout(data=ranks)
    assert batch_rows(program) == {8 // ranks}
    assert program.parts == ranks
    # A ring passes every share but one's own twice; shares are rounded up.
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


def test_micro_batches_are_of_the_ranks_own_share() -> None:
    program = shared(2, AccumulateRule(micro_batches=2))
    assert (program.repeats, program.parts, batch_rows(program)) == (2, 4, {2})
    # Gradients, and the loss, are exchanged once, behind the last of them.
    assert program.sent_bytes == shared(2).sent_bytes
    assert not program.earlier.exchanges
    whole, share = (p.graph.resident_bytes(Role.BATCH) * p.parts for p in (trial().plain, program))
    assert whole == share, "every rank is given the whole batch"


def test_rules_that_name_the_models_calls_find_them_in_micro_batches_too() -> None:
    """An addition of embeddings at the top of a model is none of losses."""
    parts = AccumulateRule(micro_batches=2)
    alone, program = trial().apply_rules((parts,)), shared(2, parts)
    assert CallSite("", "aten.add.Tensor", 0) in spots(alone.graph)
    assert {spot: spots(program.graph)[spot] for spot in spots(alone.graph)} == spots(alone.graph)


def test_rules_of_other_trades_are_for_a_rank_as_for_the_whole() -> None:
    plain = trial().plain
    recompute = next(t for t in TRADES if t.name == "recompute")
    offers, _ = recompute.offers(plain, trial().source)
    widest = max(offers, key=lambda o: sum(r.count for r in o.rules))
    program = shared(2, *widest.rules)
    assert len(program.recomputed) == len(trial().apply_rules(widest.rules).recomputed) > 0
    assert program.problems() == []


@pytest.mark.parametrize(
    ("ranks", "more", "said"),
    [
        (3, (), "shares the batch among 3 ranks"),
        (16, (), "one of 1, 2, 4, 8 equal shares"),
        (4, (AccumulateRule(micro_batches=4),), "splits the batch into 4 parts"),
    ],
)
def test_a_batch_that_cannot_be_shared_so_is_refused(
    ranks: int, more: tuple[Rule, ...], said: str
) -> None:
    with pytest.raises(Mismatch, match=said):
        shared(ranks, *more)


@functools.cache
def normed() -> Trial:
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3),
        nn.BatchNorm2d(4),
        nn.InstanceNorm2d(4, affine=True),
        nn.Flatten(),
        nn.Linear(4 * 36, 10),
    )
    return Trial(model, class_loss, images(4, 8, 10))


def test_batch_statistics_are_those_of_all_samples() -> None:
    offers, (refusal,) = ShardBatch().offers(normed().plain, normed().source)
    # One sample a rank has no variance of its own.
    assert [offer.rules[0].ranks for offer in offers] == [2]
    assert refusal.label == "with BatchNorm statistics over each rank's own samples"
    assert "is lossy" in refusal.reason
    program = normed().apply_rules([ShardBatchRule(ranks=2, bucket=KIB)])
    assert program.problems() == []
    graph = program.graph
    sent = [n.collective for n in graph.nodes if n.collective is not None and n.path == "1"]
    # Mean and variance of 4 channels of both ranks; then the sums that their derivatives take.
    assert [(c.kind, c.axis, c.whole_bytes) for c in sent] == [
        (Exchange.ALL_GATHER, DATA, 2 * 2 * 4 * 4),
        (Exchange.ALL_REDUCE, DATA, 2 * 4 * 4),
    ]
    over = {n.path for n in graph.nodes if "batch_norm" in n.op}
    assert over == {"2"}, "only what is normalised by sample is as it was"
    updated = {o.target for o in graph.outputs if o.kind is OutputKind.UPDATE}
    whole = {o.target for o in normed().plain.graph.outputs if o.kind is OutputKind.UPDATE}
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
def test_batch_statistics_of_such_shares_are_refused(rule: Rule, said: str) -> None:
    with pytest.raises(Mismatch, match=said):
        normed().apply_rules([rule])


def test_batch_statistics_in_half_precision_are_not_split_in_silence() -> None:
    model = nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4), nn.Linear(4, 10)).bfloat16()
    batch = {"x": torch.randn(4, 8).bfloat16(), "y": torch.randint(10, (4,))}
    half = Trial(model, class_loss, batch)
    offers, (refusal,) = ShardBatch().offers(half.plain, half.source)
    assert not offers
    assert "BatchNorm in 1 computes statistics in half precision" in refusal.reason
    with pytest.raises(Mismatch, match="which would change the training result: BatchNorm"):
        half.apply_rules([ShardBatchRule(ranks=2, bucket=KIB)])


def test_waiting_later_hides_more_and_computes_the_same() -> None:
    plain = shared(2, bucket_bytes=4 * KIB)
    offers, _ = Overlap().offers(plain, trial().source)
    assert [o.rules[0].window for o in offers] == sorted({o.rules[0].window for o in offers})
    assert offers[-1].rules[0].window == len(plain.exchanges) > 8
    programs = [plain, *(Overlap().rewrite(plain, o.rules, trial().source) for o in offers)]
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


def test_what_is_sent_is_computed_before_what_is_not() -> None:
    """A layer's own gradients before that of what it was given, where that is no new peak."""
    plain = shared(2, bucket_bytes=KIB)
    assert sum(map(len, _unsent(plain))) > 10
    assert not any(_unsent(sent_first(plain)))
    ordered = Overlap().rewrite(plain, [OverlapRule(window=2)], trial().source)
    assert liveness(ordered, None).peak_bytes <= liveness(waits_within(plain, 2), None).peak_bytes


class Adapted(nn.Module):
    """The gradient of ``weight`` is sent, and read again for those of what is added to it."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.weight = nn.Linear(16, 32), nn.Parameter(torch.randn(32, 32))
        self.left = nn.Parameter(torch.randn(32, 2))
        self.right = nn.Parameter(torch.randn(2, 32))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.up(x).relu() @ (self.weight + self.left @ self.right)


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_a_gradient_that_is_read_again_is_added_before_its_sum_is_sent(micro_batches: int) -> None:
    def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        return model(batch).square().mean()

    rules = [
        ShardBatchRule(ranks=2, bucket=KIB), OverlapRule(window=1),
        *([AccumulateRule(micro_batches=micro_batches)] if micro_batches > 1 else []),
    ]  # fmt: skip
    program = Trial(Adapted(), loss, torch.randn(8, 16)).apply_rules(rules)
    assert program.repeats == micro_batches
    assert program.problems() == []


def _unsent(program: Program) -> list[list[str]]:
    """Before each issue of the backward pass, since the last one, what it sends nothing of."""
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


def test_what_is_compiled_lies_between_exchanges_which_stay_in_order() -> None:
    plain = shared(2, bucket_bytes=64 * KIB)
    program = Overlap().rewrite(plain, [OverlapRule(window=2)], trial().source)
    nodes = program.graph.by_name
    parts = segments(program)
    speaking = [
        line.value
        for line in program.instructions
        if line.sink is None and (nodes[line.node].collective or nodes[line.node].waits_for)
    ]
    standing = [part.value for part in parts if isinstance(part, Instruction) and not part.sink]
    assert sorted(value for value in standing if value in speaking) == sorted(speaking)
    # Waits may come later than planned, but an exchange is issued behind what it was issued behind.
    issued = [value for value in speaking if nodes[value].collective]
    assert [value for value in standing if value in issued] == issued
    compiled = [
        line.node for part in parts if isinstance(part, Segment) for line in part.instructions
    ]
    assert len(compiled) > 100
    assert not any(nodes[name].collective or nodes[name].waits_for for name in compiled)


def _computed(program: Program) -> list[str]:
    nodes = program.graph.by_name
    computed = (i for i in program.instructions if not i.sink and not nodes[i.node].waits_for)
    return [i.value for i in computed if not nodes[i.node].is_free]


# The layers, too, could lie on ranks; what is asked here is about the batch alone.
ON_BATCH = tuple(trade for trade in TRADES if trade.name != "shard_pipeline")


def layouts(price: CostTable, *, num_ranks: int = 4) -> LayoutSearch:
    plain, source = trial().plain, trial().source

    def searching(layout: tuple[Rule, ...]) -> StepSearch:
        return StepSearch(plain, trades=ON_BATCH, source=source, costs=price, layout=layout)

    return LayoutSearch(
        plain, trades=ON_BATCH, source=source, costs=price, num_ranks=num_ranks, searching=searching
    )


def test_rivals_are_of_other_kinds_and_may_be_one_rank() -> None:
    both = layouts(costs(1e7), num_ranks=2)
    found = both.find(Budget())
    assert ranks_of(found) == 2
    alone = step_seconds(trial().plain, costs(1e7)).value
    rivals = [*both.rivals(found, Budget())]
    seconds = [rival.prediction.metrics.step_seconds.value for rival in rivals]
    assert rivals
    assert all(took <= 1.2 * found.prediction.metrics.step_seconds.value for took in seconds)
    is_near = alone <= 1.2 * found.prediction.metrics.step_seconds.value
    assert (1 in map(ranks_of, rivals)) == is_near
    # What is too slow for a budget is nobody's rival, and no reason to refuse.
    most = f"{found.prediction.metrics.step_seconds.value} s"
    assert [*both.rivals(found, Budget(step_time=most))] == []


def ranks_of(found: SearchResult) -> int:
    return ParallelLayout.of(found.rules).num_ranks


@looking_less_far()
def test_ranks_are_used_where_their_link_is_worth_it_and_the_rest_is_told() -> None:
    alone = step_seconds(trial().plain, costs(1e3)).value
    slow = layouts(costs(1e3)).find(Budget())
    assert ranks_of(slow) == 1
    assert slow.prediction.metrics.step_seconds.value == alone
    assert {r.label for r in slow.refused if r.trade == "shard_batch"} == {
        "among 2 ranks", "among 3 ranks as 3 : 3 : 2", "among 4 ranks",
    }  # fmt: skip
    fast = layouts(costs(1e12)).find(Budget())
    assert ranks_of(fast) == 4
    assert fast.prediction.metrics.step_seconds.value < 0.3 * alone
    (taken,) = (t for t in fast.taken if t.trade == "shard_batch")
    assert taken.buys_seconds > 0.7 * alone
    assert taken.buys_bytes > 0
    # Three ranks would only compute for longer than four take in all, and were not captured.
    others = {r.label: r.reason for r in fast.refused if r.trade == "shard_batch"}
    assert [*others] == ["among 3 ranks", "among 2 ranks"]
    assert "a step; another number of ranks" in others["among 3 ranks"]


@looking_less_far()
def test_a_faster_link_never_makes_the_step_slower() -> None:
    found = [layouts(costs(rate), num_ranks=2).find(Budget()) for rate in (1e3, 1e7, 1e12)]
    seconds = [f.prediction.metrics.step_seconds.value for f in found]
    assert seconds == sorted(seconds, reverse=True)
    assert {ranks_of(f) for f in found} == {1, 2}


@looking_less_far()
def test_a_batch_of_eight_goes_to_three_equal_ranks_as_three_three_and_two() -> None:
    found = layouts(costs(1e12), num_ranks=3).find(Budget())
    assert ParallelLayout.of(found.rules) == ParallelLayout(data=3, shares=(3, 3, 2))
    two = layouts(costs(1e12), num_ranks=2).find(Budget())
    fewer = two.prediction.metrics.step_seconds.value
    assert found.prediction.metrics.step_seconds.value == pytest.approx(fewer * 3 / 4, rel=0.05)
    (refusal,) = (r for r in found.refused if r.trade == "shard_batch")
    assert refusal.label == "among 2 ranks"


@looking_less_far()
def test_a_number_of_ranks_that_divides_nothing_is_taken_where_it_is_the_fastest() -> None:
    # What three ranks send around takes longer than what four do, and what they compute less.
    seconds = {
        num_ranks: min(
            way.seconds
            for layout in layouts(costs(4e6), num_ranks=num_ranks).layouts
            if layout.num_ranks == num_ranks
            for way in layouts(costs(4e6), num_ranks=num_ranks).candidates.of(layout)
        )
        for num_ranks in (1, 2, 3)
    }
    found = layouts(costs(4e6), num_ranks=3).find(Budget())
    assert ranks_of(found) == min(seconds, key=seconds.__getitem__)
    assert found.prediction.metrics.step_seconds.value == pytest.approx(min(seconds.values()))


@looking_less_far()
def test_of_three_hosts_the_two_that_a_fast_link_joins_are_taken() -> None:
    slow, fast = costs(1e5), costs(1e9)
    joined = replace(slow, subsets={2: Subset(ranks=(0, 2), links=fast.links)})
    found = layouts(joined, num_ranks=3).find(Budget())
    assert ranks_of(found) == 2
    two = layouts(fast, num_ranks=2).find(Budget())
    assert found.prediction.metrics.step_seconds == two.prediction.metrics.step_seconds
    (taken,) = (t for t in found.taken if t.trade == "shard_batch")
    assert taken.label.startswith("among 2 ranks (0, 2), ")
    # Were no subset known, one rank alone would be the fastest.
    assert ranks_of(layouts(slow, num_ranks=3).find(Budget())) == 1


def test_more_ranks_than_examples_are_told_so() -> None:
    model = nn.Linear(4, 6)
    few = Trial(model, class_loss, {"x": torch.randn(2, 4), "y": torch.zeros(2, dtype=torch.long)})

    def searching(layout: tuple[Rule, ...]) -> StepSearch:
        return StepSearch(
            few.plain, trades=ON_BATCH, source=few.source, costs=costs(1e12), layout=layout
        )

    three = LayoutSearch(
        few.plain, trades=ON_BATCH, source=few.source, costs=costs(1e12), num_ranks=3,
        searching=searching,
    )  # fmt: skip
    reasons = {r.label: r.reason for r in three.refusals if r.trade == "shard_batch"}
    assert reasons == {"among 3 ranks": "the batch has only 2 samples"}


def test_a_parameter_with_gaps_is_a_refusal_and_no_error() -> None:
    model = nn.Linear(4, 6, bias=False)
    model.weight = nn.Parameter(torch.randn(6, 8)[:, :4])
    gaps = Trial(model, class_loss, {"x": torch.randn(4, 4), "y": torch.zeros(4, dtype=torch.long)})
    offers, (refusal,) = ShardBatch().offers(gaps.plain, gaps.source)
    assert not offers
    assert "has gaps between its elements" in refusal.reason


@looking_less_far()
def test_a_cluster_that_is_not_here_is_planned_for_from_what_was_declared() -> None:
    model = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 4))
    batch = {"x": torch.randn(8, 32), "y": torch.zeros(8, dtype=torch.long)}
    many = sy.plan(model, class_loss, batch, cluster=sy.Cluster.named("p2.16xlarge"))
    rules = many.plan.decisions.rules
    one = many.plan.unplanned.metrics.step_seconds.value
    assert ParallelLayout.of(rules).num_ranks in (1, 2, 4, 8)
    assert many.predicted.step_seconds.value <= one
    (uneven,) = (r for r in many.plan.refused if r.label == "among 16 ranks")
    assert uneven.reason == "the batch has only 8 samples"


def test_what_stays_between_steps_is_not_moved_where_ranks_exchange_it() -> None:
    program = shared(2)
    offers, (refusal,) = OffloadState().offers(program, trial().source)
    assert not offers
    assert "if ranks exchange gradients" in refusal.reason
    rule = OffloadStateRule(parameter="head.weight", what="gradient")
    with pytest.raises(Mismatch, match="needs 2 ranks and offloads weights"):
        shared(2, rule)


@looking_less_far()
@pytest.mark.parametrize("slow", range(3))
def test_of_declared_nodes_the_ones_behind_fast_links_are_taken(slow: int) -> None:
    fast = Link(kind="fast", latency_seconds=1e-5, bytes_per_second=1e10)
    links = [
        replace(fast, kind="slow", bytes_per_second=1e5) if n == slow else fast for n in range(3)
    ]
    members = tuple(LevelMember(of=DEVICE, count=1, link=link) for link in links)
    cluster = sy.Cluster(tree=TopologyLevel(name="three", members=members))
    model = nn.Sequential(nn.Linear(256, 512), nn.Tanh(), nn.Linear(512, 4))
    batch = {"x": torch.randn(512, 256), "y": torch.zeros(512, dtype=torch.long)}
    planned = sy.plan(model, class_loss, batch, cluster=cluster)
    decisions = planned.plan.decisions
    assert ParallelLayout.of(decisions.rules).num_ranks == 2
    assert [*decisions.ranks_used(2)] == [n for n in range(3) if n != slow]
