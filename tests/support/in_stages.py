"""A captured step under rules that lay its layers on several ranks.

Not a test: what the tests of pipelines share.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from steelyard.ir.parallel_layout import ParallelLayout
from steelyard.ir.program import Program
from steelyard.ir.rule import Rule
from steelyard.ir.step_source import StepSource
from steelyard.plans.trade import apply_rules
from steelyard.trades import TRADES
from steelyard.trades.accumulate import AccumulateRule
from steelyard.trades.shard_pipeline import ShardPipeline, rules_for


@dataclass(frozen=True, slots=True, kw_only=True)
class InStages:
    plain: Program
    source: StepSource

    def applied(self, *rules: Rule, micro_batches: int = 4) -> Program:
        split = AccumulateRule(micro_batches=micro_batches)
        every = (split, *rules) if micro_batches > 1 else rules
        return apply_rules(self.plain, every, trades=TRADES, source=self.source)

    def stages(
        self, *ends: str, schedule: str = "1F1B", ranks: int = 2, micro_batches: int = 4
    ) -> Program:
        rules = rules_for(ends, schedule=schedule, ranks=ranks)
        return self.applied(*rules, micro_batches=micro_batches)

    def offered(self, ranks: int) -> dict[str, tuple[Rule, ...]]:
        """Return the rules that are offered for each schedule."""
        among = replace(self.plain, layout=ParallelLayout(pipeline=ranks))
        offers, refusals = ShardPipeline().offers(among, self.source)
        assert bool(offers) != bool(refusals)
        return {offer.rules[0].schedule: offer.rules for offer in offers}
