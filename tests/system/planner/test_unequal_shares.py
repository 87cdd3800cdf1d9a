"""Unequal batch shares for ranks of unequal speed: the program of one rank, and of all together.

For the results of such programs on live ranks, see tests/system/dist/test_planned.py.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from pathlib import Path

import pytest

import steelyard as sy
from steelyard.errors import Infeasible, Mismatch
from steelyard.hardware.cluster import Cluster, LevelMember, Link, TopologyLevel
from steelyard.ir.parallel_layout import DATA, PIPELINE, TENSOR, ParallelLayout
from steelyard.ir.program import Program
from steelyard.ir.rule import Rule
from steelyard.plans.budget import Budget
from steelyard.plans.trade import apply_rules_on_ranks
from steelyard.predict import (
    peak_bytes,
    predict,
    rank_peak_bytes,
    rank_seconds,
    spans,
    step_seconds,
)
from steelyard.predict.cost_table import CostTable
from steelyard.predict.timeline import play
from steelyard.predict.unequal_ranks import RankClass, play_synchronized, rank_classes
from steelyard.search import LayoutSearch, SearchResult, StepSearch
from steelyard.trades import TRADES
from steelyard.trades.accumulate import AccumulateRule
from steelyard.trades.shard_batch import ShardBatchRule
from tests.harness import Trial
from tests.support.declared import DEVICE
from tests.support.short_search import looking_less_far
from tests.unit.trades.test_shard_batch import batch_rows
from tests.zoo.case import next_token_loss, tokens
from tests.zoo.own import GPT

pytestmark = pytest.mark.slow

KIB = 1024
HALF = DEVICE.at_speed(0.5)


@functools.cache
def trial() -> Trial:
    model = GPT(layers=2, width=32, heads=2, vocabulary=64, length=16)
    return Trial(model, next_token_loss, tokens(12, 16, 64))


def costs(*speeds: float, rate: float = 1e9) -> CostTable:
    link = Link(kind="declared", latency_seconds=1e-6, bytes_per_second=rate)
    devices = tuple(DEVICE if speed == 1 else DEVICE.at_speed(speed) for speed in speeds)
    links = dict.fromkeys((DATA, TENSOR, PIPELINE), link)
    return CostTable(device=DEVICE, links=links, devices=devices if len({*devices}) > 1 else ())


def shared(shares: tuple[int, ...], *more: Rule) -> Program:
    rule = ShardBatchRule(ranks=len(shares), bucket=16 * KIB, shares=shares)
    rules = (rule, *more)
    return apply_rules_on_ranks(trial().plain, rules, trades=TRADES, source=trial().source)


# --- the program ----------------------------------------------------------------------------------


@pytest.mark.parametrize("shares", [(2, 1), (1, 2), (3, 2, 1), (7, 5), (1, 1, 4)])
def test_ranks_compute_their_share_and_issue_equal_collectives(shares: tuple[int, ...]) -> None:
    program = shared(shares)
    ones = (program, *program.sibling_programs)
    assert [one.share for one in ones] == sorted({*shares}, reverse=True)
    for one in ones:
        assert one.problems() == []
        assert batch_rows(one) == {12 // sum(shares) * one.share}
        assert one.layout == program.layout == ParallelLayout(data=len(shares), shares=shares)
        assert one.layout.share_of(one.rank) == one.share
        assert one.batch_bytes == trial().plain.batch_bytes, "every rank is given the whole batch"
        assert (one.collective_order, one.sent_bytes) == (
            program.collective_order,
            program.sent_bytes,
        )


def test_equal_shares_give_the_plan_without_shares() -> None:
    plain = trial().apply_rules([ShardBatchRule(ranks=2, bucket=16 * KIB)])
    for program in (shared((3, 3)), shared((1, 1))):
        assert (program.layout, program.sibling_programs) == (plain.layout, ())
        assert program.instructions == plain.instructions
        assert program.graph.nodes == plain.graph.nodes


def test_micro_batches_split_the_share_of_each_rank() -> None:
    program = shared((2, 1), AccumulateRule(micro_batches=2))
    (other,) = program.sibling_programs
    assert (program.repeats, program.units) == (other.repeats, other.units) == (2, 6)
    assert (batch_rows(program), batch_rows(other)) == ({4}, {2})
    with pytest.raises(Mismatch, match="one of 1, 2, 4 equal parts"):
        shared((2, 1), AccumulateRule(micro_batches=3))


@pytest.mark.parametrize("shares", [(4, 1), (12, 1), (5, 2, 1)])
def test_shares_that_do_not_add_up_to_the_batch_are_refused(shares: tuple[int, ...]) -> None:
    with pytest.raises(Mismatch, match="add up to one of 1, 2, 3, 4, 6, 12") as refused:
        shared(shares)
    assert len(str(refused.value).splitlines()) == 3


# --- the prediction -------------------------------------------------------------------------------


def test_equal_ranks_take_the_time_of_one() -> None:
    program, price = shared((1, 1)), costs()
    one = RankClass(rank=0, program=program, costs=price)
    assert play_synchronized([one, one], begins=[0.0, 0.0]) == [play(program, price)] * 2
    alike = replace(price, devices=(DEVICE, DEVICE))
    assert len(rank_classes(program, alike)) == 1
    assert predict(program, alike).metrics == predict(program, price).metrics


def test_a_slower_rank_never_makes_a_step_faster() -> None:
    program = shared((1, 1))
    seconds = [step_seconds(program, costs(1, speed)).value for speed in (1, 0.9, 0.5, 0.1)]
    assert seconds == sorted(seconds)
    both = replace(costs(), device=HALF)
    assert seconds[2] == pytest.approx(step_seconds(program, both).value, rel=0.01)


def test_faster_ranks_wait_for_the_slowest() -> None:
    program, price = shared((1, 1)), costs(1, 0.5)
    fast, slow = play_synchronized(rank_classes(program, price), begins=[0.0, 0.0])
    assert fast.exposed_seconds > slow.exposed_seconds
    assert fast.seconds == pytest.approx(slow.seconds, rel=0.02)
    first, second = rank_seconds(program, price)
    assert second == pytest.approx(2 * first)


@pytest.mark.parametrize("more", [(), (AccumulateRule(micro_batches=2),)])
def test_shares_in_proportion_to_speed_leave_no_rank_waiting(more: tuple[Rule, ...]) -> None:
    price = costs(1, 0.5, rate=1e12)
    by_speed, even, wrong = (
        predict(shared(shares, *more), price).metrics for shares in ((2, 1), (1, 1), (1, 2))
    )
    found = [metrics.step_seconds.value for metrics in (by_speed, even, wrong)]
    assert found == sorted(found)
    # Two thirds of the batch on one device; a half at half the speed; two thirds at half the speed.
    assert found[1] / found[0] == pytest.approx(1.5, rel=0.1)
    assert found[2] / found[0] == pytest.approx(2.0, rel=0.1)
    for metrics in (by_speed, even, wrong):
        estimate = metrics.step_seconds
        assert estimate.low <= estimate.value <= estimate.high
        waits = metrics.exposed_communication_seconds
        assert 0 <= waits.low <= waits.value <= waits.high
        assert estimate.value >= metrics.computation_seconds.value


def test_predicted_memory_is_that_of_the_largest_share() -> None:
    program, price = shared((1, 3)), costs()
    ones = [replace(one, sibling_programs=()) for one in (program, *program.sibling_programs)]
    peaks = [peak_bytes(one, price) for one in ones]
    assert peaks == sorted(peaks, reverse=True)
    assert peak_bytes(program, price) == predict(program, price).peak.nbytes == peaks[0]
    assert rank_peak_bytes(program, price) == (peaks[1], peaks[0])


@pytest.mark.parametrize("more", [(), (AccumulateRule(micro_batches=2),)])
@pytest.mark.parametrize("shares", [(2, 1), (1, 1), (1, 2)])
def test_the_drawn_timeline_ends_at_the_predicted_step_time(
    shares: tuple[int, ...], more: tuple[Rule, ...]
) -> None:
    program = shared(shares, *more)
    # An exchange takes no time of the device here.
    drawn = spans(program, costs(1, 0.5, rate=1e6))
    assert {span.rank for span in drawn} == {0, 1}
    ends = max(span.begin_seconds + span.seconds for span in drawn)
    assert ends == pytest.approx(step_seconds(program, costs(1, 0.5, rate=1e6)).value)


# --- the search -----------------------------------------------------------------------------------


def layouts(price: CostTable, *, num_ranks: int) -> LayoutSearch:
    plain, source = trial().plain, trial().source

    def searching(layout: tuple[Rule, ...]) -> StepSearch:
        return StepSearch(plain, trades=TRADES, source=source, costs=price, layout=layout)

    return LayoutSearch(
        plain, trades=TRADES, source=source, costs=price, num_ranks=num_ranks, searching=searching
    )


def of_batch(found: SearchResult) -> ParallelLayout:
    return ParallelLayout.of(found.rules)


@looking_less_far()
def test_the_batch_is_shared_by_declared_speeds_with_the_reason() -> None:
    found = layouts(costs(1, 0.5, rate=1e12), num_ranks=2).find(Budget())
    assert of_batch(found) == ParallelLayout(data=2, shares=(2, 1))
    (taken,) = (t for t in found.taken if t.trade == "shard_batch")
    assert taken.label.startswith(
        "among 2 ranks as 2 : 1 (rank 1 computes at 0.50 times the speed of rank 0), "
    )
    refused = {r.label: r.reason for r in found.refused}
    assert refused["among 2 ranks, in equal shares"].startswith("alone takes ~")
    for label in ("sharded over 2 ranks", "layers on 2 ranks"):
        assert refused[label] == (
            "all ranks would wait for the slowest: rank 1 computes at 0.50 times the speed of "
            "rank 0"
        )


@looking_less_far()
@pytest.mark.parametrize("speeds", [(), (1, 1)])
def test_equal_speeds_have_equal_shares(speeds: tuple[float, ...]) -> None:
    ways = layouts(costs(*speeds, rate=1e12), num_ranks=2)
    assert {layout.shares for layout in ways.layouts} == {()}


@looking_less_far()
def test_a_much_slower_rank_is_left_out() -> None:
    found = layouts(costs(1, 0.001), num_ranks=2).find(Budget())
    assert of_batch(found).num_ranks == 1


@looking_less_far()
def test_the_budget_holds_on_the_rank_with_the_largest_share() -> None:
    ways = layouts(costs(1, 0.5, rate=1e12), num_ranks=2)
    largest = peak_bytes(shared((2, 1)), costs())
    found = ways.find(Budget(memory_bytes=round(0.9 * largest)))
    assert found.prediction.peak.nbytes <= 0.9 * largest
    with pytest.raises(Infeasible):
        ways.find(Budget(memory_bytes=1 << 10))


# --- plans through the api ------------------------------------------------------------------------


def mixed() -> Cluster:
    link = Link(kind="declared", latency_seconds=1e-6, bytes_per_second=1e11)
    other = replace(DEVICE, kind="other", flops_per_second=5e8, bytes_per_second=5e9)
    members = (
        LevelMember(of=DEVICE, count=1, link=link),
        LevelMember(of=other, count=1, link=link),
    )
    return Cluster(tree=TopologyLevel(name="two", members=members))


@looking_less_far()
def test_a_mixed_cluster_is_planned_for(tmp_path: Path) -> None:
    it = trial()
    planned = sy.plan(it.model, it.loss, it.batch, cluster=mixed())
    assert ParallelLayout.of(planned.plan.decisions.rules).shares == (2, 1)
    assert planned.plan.decisions.target.speeds == ()
    planned.save(tmp_path / "mixed.plan.toml")
    assert "shares = [2, 1]" in (tmp_path / "mixed.plan.toml").read_text()
    assert planned.predicted.step_seconds.value < planned.plan.unplanned.metrics.step_seconds.value
