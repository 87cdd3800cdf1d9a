"""Variants combine the rules of several trades only where these apply together."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import pytest

from steelyard.errors import Mismatch
from steelyard.hardware.cluster import Device
from steelyard.ir.graph import Graph, Storage
from steelyard.ir.program import Program
from steelyard.ir.rule import CallRule, Stage, matching, to_rules
from steelyard.plans.budget import Budget
from steelyard.plans.trade import Offer, Trade, apply_rules
from steelyard.predict import peak_bytes
from steelyard.predict.cost_table import CostTable
from steelyard.search import StepSearch
from steelyard.trades.chunk import ChunkRule
from tests.support.graphs import Whole, tower

COSTS = CostTable(
    device=Device(kind="made up", flops_per_second=1e9, bytes_per_second=1e8, memory_bytes=1 << 30)
)


@dataclass(frozen=True, kw_only=True)
class ShrinkRule(CallRule):
    trade: str = field(init=False, default="shrink")
    stage: ClassVar[Stage] = Stage.VARIANT


@dataclass(frozen=True, kw_only=True)
class SqueezeRule(CallRule):
    trade: str = field(init=False, default="squeeze")
    stage: ClassVar[Stage] = Stage.VARIANT


class Smaller:
    """Replaces one call by another whose result is a quarter as large, so its rules name a call
    that no longer exists after another trade of this class.
    """

    pays: ClassVar[tuple[str, ...]] = ("computation",)
    buys: ClassVar[tuple[str, ...]] = ("memory",)
    is_exact: ClassVar[bool] = True
    is_bitwise: ClassVar[bool] = True

    def __init__(self, rule: type[CallRule], **parameters: int) -> None:
        self.rule, self.name, self._parameters = rule, rule.trade, parameters

    def offers(self, program: Program, _: Any) -> tuple[tuple[Offer, ...], tuple[()]]:
        rules = to_rules(program.graph, ["blocks.0:up"], self.rule, **self._parameters)
        return (Offer(trade=self.name, label="smaller", rules=rules),), ()

    def rewrite(self, program: Program, rules: Sequence[CallRule], _: Any) -> Program:
        graph = program.graph
        for name in matching(graph, rules):
            graph = _with_smaller_result(graph, name)
        return program.with_graph(graph) if rules else program


def _with_smaller_result(graph: Graph, name: str) -> Graph:
    storages: list[Storage] = list(graph.storages)
    (storage,) = graph.storages_of(name)
    storages[storage] = replace(storages[storage], nbytes=storages[storage].nbytes // 4)
    nodes = tuple(replace(n, op="made.up") if n.name == name else n for n in graph.nodes)
    return replace(graph, nodes=nodes, storages=tuple(storages))


CHUNK, SHRINK, SQUEEZE = Smaller(ChunkRule, slices=2), Smaller(ShrinkRule), Smaller(SqueezeRule)


@pytest.mark.parametrize("trades", [(CHUNK, SHRINK), (SHRINK, SQUEEZE)])
def test_rules_that_do_not_apply_together_are_tried_one_trade_at_a_time(
    trades: tuple[Trade, ...],
) -> None:
    graph = tower(2)
    plain, source = Program.plain(graph), Whole(graph)
    one, other = (trade.offers(plain, source)[0][0].rules for trade in trades)
    searching = StepSearch(plain, trades=trades, source=source, costs=COSTS)
    searching.explore_all()
    alone = peak_bytes(apply_rules(plain, one, trades=trades, source=source), COSTS)
    assert alone < searching.untraded_bytes
    found = searching.find(Budget(memory_bytes=alone))
    assert found.rules in (one, other)
    (refused,) = found.refused
    assert refused.reason.startswith("not needed: the plan fits without it, and a step takes the")
    # A plan that a user wrote still has to apply as a whole.
    with pytest.raises(Mismatch, match="matches 0 operators"):
        apply_rules(plain, (*one, *other), trades=trades, source=source)
