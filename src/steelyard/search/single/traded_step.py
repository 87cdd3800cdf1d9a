"""The step of one rank under a layout, before and after trades.

Not for choosing trades: see search.py.
"""

from collections.abc import Sequence
from dataclasses import replace

from steelyard.ir.graph import Graph
from steelyard.ir.parallel_layout import ParallelLayout
from steelyard.ir.program import Program
from steelyard.ir.rule import CallRule, CallSite, Rule, RuleT, matching, of_kind, spot_of
from steelyard.ir.rule_kinds import MicroBatches
from steelyard.ir.step_source import ShardedSource, StepSource
from steelyard.plans.trade import (
    Offer,
    Trade,
    apply_rules,
    apply_rules_on_ranks,
    rule_type,
    trade_of,
)


class TradedStep:
    """A step, the rules that shard it, and the trades that may change it.

    ``lossy`` are the call sites of the values that a lossy trade may change.
    """

    def __init__(
        self,
        program: Program,
        *,
        trades: Sequence[Trade],
        source: StepSource,
        lossy: frozenset[CallSite],
        layout: Sequence[Rule],
    ) -> None:
        # With unequal shares of the batch, plan the rank with the largest share, because it has the
        # least free memory.
        rank, *others = ParallelLayout.of(layout).unequal_ranks
        self._base = replace(program, rank=rank) if others else program
        self._base_source = source
        self.layout = tuple(layout)
        self.trades = tuple(trades)
        self.lossy = lossy
        self.program = self.apply(())
        self.source = ShardedSource(
            source=source, layout=self.program.layout, rank=self.program.rank
        )

    def apply(self, rules: Sequence[Rule]) -> Program:
        all_rules = tuple(dict.fromkeys((*self.layout, *rules)))
        return apply_rules(self._base, all_rules, trades=self.trades, source=self._base_source)

    def apply_on_ranks(self, rules: Sequence[Rule]) -> Program:
        all_rules = tuple(dict.fromkeys((*self.layout, *rules)))
        return apply_rules_on_ranks(
            self._base, all_rules, trades=self.trades, source=self._base_source
        )

    def split(self, parts: int) -> tuple[MicroBatches, ...]:
        """Return the rules of a step in this many micro-batches."""
        split = rule_type(self.trades, MicroBatches) if parts > 1 else None
        return (split(micro_batches=parts),) if split is not None else ()

    def rewrite(self, kind: type[Rule], program: Program, rules: Sequence[Rule]) -> Program:
        """Return the program after the rules that are of this trade's kind."""
        trade = trade_of(self.trades, kind)
        assert trade is not None or not rules
        return program if trade is None else trade.rewrite(program, rules, self.source)

    def offered(self, kind: type[CallRule], program: Program) -> frozenset[str]:
        """Return the values for which the trade of this kind has offers."""
        trade = trade_of(self.trades, kind)
        if trade is None:
            return frozenset()
        offers, _ = trade.offers(program, self.source)
        if not trade.is_exact:
            return self.allowed_values(program.graph, offers)
        return matching(program.graph, rules_of(offers, CallRule))

    def allowed_values(self, graph: Graph, offers: Sequence[Offer]) -> frozenset[str]:
        """Return the values that a lossy trade offers and that may be changed."""
        values = matching(graph, rules_of(offers, CallRule))
        return frozenset(v for v in values if spot_of(graph, graph.by_name[v]) in self.lossy)


def rules_of(offers: Sequence[Offer], kind: type[RuleT]) -> list[RuleT]:
    return sorted({rule for offer in offers for rule in of_kind(offer.rules, kind)})
