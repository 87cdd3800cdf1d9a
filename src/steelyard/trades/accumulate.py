"""Accumulate: run the batch as equal micro-batches and accumulate their gradients.

This trade is applied first because it changes the graph; rules of other trades name modules and
stay valid. The mean over equal micro-batches is the mean over the batch, summed in another order.
Eager PyTorch with the same micro-batches gives bitwise equal results. Not for finding the possible
numbers of micro-batches, which the step source does.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from steelyard.errors import Mismatch
from steelyard.ir.program import Program
from steelyard.ir.rule import Rule
from steelyard.ir.rule_kinds import MicroBatches
from steelyard.ir.step_source import StepSource
from steelyard.plans.trade import Offer, Rejection


@dataclass(frozen=True, kw_only=True)
class AccumulateRule(MicroBatches):
    """``[[accumulate]]``: the number of micro-batches."""

    trade: str = field(init=False, default="accumulate")


class Accumulate:
    """Pays computation (smaller operators, more calls), buys memory."""

    name: ClassVar[str] = AccumulateRule.trade
    pays: ClassVar[tuple[str, ...]] = ("computation",)
    buys: ClassVar[tuple[str, ...]] = ("memory",)
    is_exact: ClassVar[bool] = True
    is_bitwise: ClassVar[bool] = False
    rule: ClassVar[type[Rule]] = AccumulateRule

    def offers(
        self,
        program: Program,  # noqa: ARG002 - the batch decides, not the program
        source: StepSource,
    ) -> tuple[tuple[Offer, ...], tuple[Rejection, ...]]:
        parts = [k for k in source.divisors() if k > 1]
        reason = source.why_not_split() if parts else "the batch has only one sample"
        if reason is not None:
            label = "the batch in equal parts"
            return (), (Rejection(trade=self.name, label=label, reason=reason),)
        offers = (
            Offer(
                trade=self.name,
                label=f"{k} micro-batches",
                rules=(AccumulateRule(micro_batches=k),),
            )
            for k in parts
        )
        return tuple(offers), ()

    def rewrite(
        self, program: Program, rules: Sequence[AccumulateRule], source: StepSource
    ) -> Program:
        if not rules:
            return program
        assert not program.recomputed, "accumulate changes the graph, so it is applied first"
        parts = self._parts(rules, source)
        if parts == program.repeats:
            return program
        graph = source.graph(micro_batches=parts)
        return program.with_graph(graph).repeated(parts)

    def _parts(self, rules: Sequence[AccumulateRule], source: StepSource) -> int:
        degrees = sorted({rule.micro_batches for rule in rules})
        possible = source.divisors()
        if len(degrees) > 1 or degrees[0] not in possible:
            wanted = " and ".join(str(d) for d in degrees)
            raise Mismatch(
                f"the plan splits the batch into {wanted} parts",
                expected=f"one of {', '.join(str(k) for k in possible)} equal parts",
                remedy="set micro_batches under [[accumulate]] to one of these, or plan again",
            )
        reason = source.why_not_split() if degrees[0] > 1 else None
        if reason is not None:
            raise Mismatch(
                f"the plan splits the batch into {degrees[0]} parts, which would change the "
                f"training result: {reason}",
                expected="a model and loss whose batch can be split",
                remedy="remove the accumulate rule from the plan, or plan again",
            )
        return degrees[0]
