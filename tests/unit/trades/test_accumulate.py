"""The accumulate trade: where the batch may be split, and the resulting step."""

from dataclasses import dataclass, field

import pytest

from steelyard.errors import Mismatch
from steelyard.hardware.cluster import Device
from steelyard.ir.program import Program
from steelyard.ir.rule import Rule, to_rules
from steelyard.plans.trade import apply_rules
from steelyard.predict import peak_bytes, step_seconds
from steelyard.predict.cost_table import CostTable
from steelyard.trades import TRADES
from steelyard.trades.accumulate import Accumulate, AccumulateRule
from steelyard.trades.recompute import RecomputeRule, recomputable
from tests.support.graphs import Split, Whole, random_step

COSTS = CostTable(
    device=Device(kind="made up", flops_per_second=1e9, bytes_per_second=1e8, memory_bytes=1 << 30)
)
TRADE = Accumulate()


def by(degree: int) -> tuple[Rule, ...]:
    return (AccumulateRule(micro_batches=degree),)


def test_every_number_of_micro_batches_is_offered() -> None:
    graph = random_step(0)
    offers, refusals = TRADE.offers(Program.plain(graph), Split(graph, (1, 2, 4)))
    assert [r.micro_batches for o in offers for r in o.rules] == [2, 4]
    assert not refusals


def test_a_batch_that_must_stay_whole_is_refused_with_the_reason() -> None:
    graph = random_step(0)
    source = Split(graph, (1, 2, 4), reason="BatchNorm in bn counts the whole batch")
    offers, refusals = TRADE.offers(Program.plain(graph), source)
    assert not offers
    assert [r.reason for r in refusals] == ["BatchNorm in bn counts the whole batch"]
    with pytest.raises(Mismatch, match="BatchNorm in bn"):
        TRADE.rewrite(Program.plain(graph), by(2), source)
    offers, refusals = TRADE.offers(Program.plain(graph), Whole(graph))
    assert not offers
    assert "one sample" in refusals[0].reason


def test_asking_for_offers_captures_nothing() -> None:
    graph = random_step(0)
    source = Split(graph, (1, 2, 4))
    TRADE.offers(Program.plain(graph), source)
    assert source.asked == []


def test_the_step_runs_its_micro_batches_in_sequence() -> None:
    graph = random_step(0)
    plain = Program.plain(graph)
    source = Split(graph, (1, 2, 4))
    program = TRADE.rewrite(plain, by(4), source)
    assert program.repeats == 4
    assert program.problems() == []
    assert plain.repeats == 1
    assert TRADE.rewrite(plain, (), source) is plain
    assert TRADE.rewrite(program, by(4), source) is program
    assert step_seconds(program, COSTS).value >= step_seconds(plain, COSTS).value


def test_memory_falls_where_activations_weigh_most() -> None:
    lower = 0
    for seed in range(20):
        graph = random_step(seed)
        plain = Program.plain(graph)
        program = TRADE.rewrite(plain, by(2), Split(graph, (1, 2)))
        lower += peak_bytes(program, COSTS) < peak_bytes(plain, COSTS)
    assert lower > 15


@pytest.mark.parametrize("degrees", [(3,), (2, 4)])
def test_another_number_of_parts_is_an_error(degrees: tuple[int, ...]) -> None:
    graph = random_step(0)
    rules = [rule for degree in degrees for rule in by(degree)]
    with pytest.raises(Mismatch, match="1, 2, 4 equal parts"):
        TRADE.rewrite(Program.plain(graph), rules, Split(graph, (1, 2, 4)))


def test_rules_of_recompute_survive_cutting_the_batch() -> None:
    graph = random_step(7)
    values = recomputable(graph)
    rules = (*to_rules(graph, values, RecomputeRule), *by(2))
    source = Split(graph, (1, 2))
    program = apply_rules(Program.plain(graph), rules, trades=TRADES, source=source)
    assert program.repeats == 2
    assert program.recomputed
    assert {i.node for i in program.recomputed} <= {n.name for n in graph.nodes}


@dataclass(frozen=True, kw_only=True)
class UnknownRule(Rule):
    trade: str = field(init=False, default="recompute_all")


def test_a_rule_of_an_unknown_trade_is_an_error() -> None:
    graph = random_step(7)
    rule = UnknownRule()
    with pytest.raises(Mismatch, match="unknown trade: recompute_all"):
        apply_rules(Program.plain(graph), (rule,), trades=TRADES, source=Whole(graph))
