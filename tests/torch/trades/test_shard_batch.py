"""Batch sharding over ranks, with late waits: the program of one rank.

For the results of such programs on live ranks, see tests/system/dist/test_planned.py.
"""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest
import torch
from torch import nn

import steelyard as sy
from steelyard.errors import Mismatch
from steelyard.hardware.cluster import LevelMember, Link, TopologyLevel
from steelyard.ir.parallel_layout import ParallelLayout
from steelyard.ir.program import Instruction, Program
from steelyard.ir.rule import Rule
from steelyard.plans.budget import Budget
from steelyard.predict import step_seconds
from steelyard.predict.cost_table import CostTable
from steelyard.predict.rank_subsets import Subset
from steelyard.run.compiled.segments import Segment, segments
from steelyard.search import LayoutSearch, SearchResult, StepSearch
from steelyard.trades import TRADES
from steelyard.trades.accumulate import AccumulateRule
from steelyard.trades.overlap import Overlap, OverlapRule
from steelyard.trades.shard_batch import ShardBatch, ShardBatchRule
from tests.harness import Trial
from tests.support.declared import DEVICE, costs
from tests.support.short_search import looking_less_far
from tests.zoo.case import class_loss, next_token_loss, tokens
from tests.zoo.own import GPT

pytestmark = pytest.mark.slow

KIB = 1024


@functools.cache
def trial() -> Trial:
    model = GPT(layers=2, width=32, heads=2, vocabulary=64, length=16)
    return Trial(model, next_token_loss, tokens(8, 16, 64))


def shared(ranks: int, *more: Rule, bucket_bytes: int = 16 * KIB) -> Program:
    batch = ShardBatchRule(ranks=ranks, bucket=bucket_bytes)
    return trial().apply_rules((batch, *more))


def test_batch_statistics_in_half_precision_are_not_split_in_silence() -> None:
    model = nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4), nn.Linear(4, 10)).bfloat16()
    batch = {"x": torch.randn(4, 8).bfloat16(), "y": torch.randint(10, (4,))}
    half = Trial(model, class_loss, batch)
    offers, (refusal,) = ShardBatch().offers(half.plain, half.source)
    assert not offers
    assert "BatchNorm in 1 computes statistics in half precision" in refusal.reason
    with pytest.raises(Mismatch, match="which would change the training result: BatchNorm"):
        half.apply_rules([ShardBatchRule(ranks=2, bucket=KIB)])


class Adapted(nn.Module):
    """A model in which the gradient of ``weight`` is sent, and read again for the gradients of
    an adapter."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.weight = nn.Linear(16, 32), nn.Parameter(torch.randn(32, 32))
        self.left = nn.Parameter(torch.randn(32, 2))
        self.right = nn.Parameter(torch.randn(2, 32))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.up(x).relu() @ (self.weight + self.left @ self.right)


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_gradients_are_accumulated_before_their_all_reduce(micro_batches: int) -> None:
    def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        return model(batch).square().mean()

    rules = [
        ShardBatchRule(ranks=2, bucket=KIB), OverlapRule(window=1),
        *([AccumulateRule(micro_batches=micro_batches)] if micro_batches > 1 else []),
    ]  # fmt: skip
    program = Trial(Adapted(), loss, torch.randn(8, 16)).apply_rules(rules)
    assert program.repeats == micro_batches
    assert program.problems() == []


def test_compiled_segments_lie_between_collectives_in_order() -> None:
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
    # Waits may be later than planned, but the order of the exchanges is the same.
    issued = [value for value in speaking if nodes[value].collective]
    assert [value for value in standing if value in issued] == issued
    compiled = [
        line.node for part in parts if isinstance(part, Segment) for line in part.instructions
    ]
    assert len(compiled) > 100
    assert not any(nodes[name].collective or nodes[name].waits_for for name in compiled)


# The layers could also be split over ranks, but these tests are about the batch alone.
ON_BATCH = tuple(trade for trade in TRADES if trade.name != "shard_pipeline")


def layouts(price: CostTable, *, num_ranks: int = 4) -> LayoutSearch:
    plain, source = trial().plain, trial().source

    def searching(layout: tuple[Rule, ...]) -> StepSearch:
        return StepSearch(plain, trades=ON_BATCH, source=source, costs=price, layout=layout)

    return LayoutSearch(
        plain, trades=ON_BATCH, source=source, costs=price, num_ranks=num_ranks, searching=searching
    )


def test_rival_layouts_differ_in_kind_and_may_use_one_rank() -> None:
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
    # A layout that is too slow for the budget is no rival, and no reason to refuse.
    most = f"{found.prediction.metrics.step_seconds.value} s"
    assert [*both.rivals(found, Budget(step_time=most))] == []


def ranks_of(found: SearchResult) -> int:
    return ParallelLayout.of(found.rules).num_ranks


@looking_less_far()
def test_ranks_are_used_where_the_link_is_fast_enough_with_reasons_for_the_others() -> None:
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
    # Three ranks compute for longer than the whole step takes on four, so they were not captured.
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
def test_eight_samples_are_shared_by_three_equal_ranks_as_3_3_2() -> None:
    found = layouts(costs(1e12), num_ranks=3).find(Budget())
    assert ParallelLayout.of(found.rules) == ParallelLayout(data=3, shares=(3, 3, 2))
    two = layouts(costs(1e12), num_ranks=2).find(Budget())
    fewer = two.prediction.metrics.step_seconds.value
    assert found.prediction.metrics.step_seconds.value == pytest.approx(fewer * 3 / 4, rel=0.05)
    (refusal,) = (r for r in found.refused if r.trade == "shard_batch")
    assert refusal.label == "among 2 ranks"


@looking_less_far()
def test_a_number_of_ranks_that_divides_nothing_is_taken_where_it_is_the_fastest() -> None:
    # The exchanges of three ranks take longer than those of four, but three ranks compute less
    # here.
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
def test_the_two_of_three_hosts_with_a_fast_link_are_chosen() -> None:
    slow, fast = costs(1e5), costs(1e9)
    joined = replace(slow, subsets={2: Subset(ranks=(0, 2), links=fast.links)})
    found = layouts(joined, num_ranks=3).find(Budget())
    assert ranks_of(found) == 2
    two = layouts(fast, num_ranks=2).find(Budget())
    assert found.prediction.metrics.step_seconds == two.prediction.metrics.step_seconds
    (taken,) = (t for t in found.taken if t.trade == "shard_batch")
    assert taken.label.startswith("among 2 ranks (0, 2), ")
    # If no subset were known, one rank alone would be the fastest.
    assert ranks_of(layouts(slow, num_ranks=3).find(Budget())) == 1


def test_more_ranks_than_samples_are_refused_with_the_reason() -> None:
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


def test_a_parameter_with_gaps_is_refused_with_the_reason() -> None:
    model = nn.Linear(4, 6, bias=False)
    model.weight = nn.Parameter(torch.randn(6, 8)[:, :4])
    gaps = Trial(model, class_loss, {"x": torch.randn(4, 4), "y": torch.zeros(4, dtype=torch.long)})
    offers, (refusal,) = ShardBatch().offers(gaps.plain, gaps.source)
    assert not offers
    assert "has gaps between its elements" in refusal.reason


@looking_less_far()
def test_a_declared_cluster_is_planned_from_its_declared_rates() -> None:
    model = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 4))
    batch = {"x": torch.randn(8, 32), "y": torch.zeros(8, dtype=torch.long)}
    many = sy.plan(model, class_loss, batch, cluster=sy.Cluster.named("p2.16xlarge"))
    rules = many.plan.decisions.rules
    one = many.plan.unplanned.metrics.step_seconds.value
    assert ParallelLayout.of(rules).num_ranks in (1, 2, 4, 8)
    assert many.predicted.step_seconds.value <= one
    (uneven,) = (r for r in many.plan.refused if r.label == "among 16 ranks")
    assert uneven.reason == "the batch has only 8 samples"


@looking_less_far()
@pytest.mark.parametrize("slow", range(3))
def test_the_declared_nodes_with_fast_links_are_chosen(slow: int) -> None:
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
