"""The interface of a trade: its offers, and its rewrite of the program.

Not for prices: a peak is not a sum, so the price of an offer is the difference between the
predictions for the rewritten program and for the original one.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import ClassVar, Protocol

from steelyard.errors import Mismatch
from steelyard.ir.parallel_layout import ParallelLayout, spelled
from steelyard.ir.program import Program
from steelyard.ir.rule import Rule
from steelyard.ir.step_source import ShardedSource, StepSource
from steelyard.plans.rule_table import RuleTable


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """A possible application of a trade, as rules; ``label`` names the place for people."""

    trade: str
    label: str
    rules: tuple[Rule, ...]


class Remaining(StrEnum):
    """The part of an offer that was not taken."""

    WHOLE = "whole"
    REST = "rest"
    NEVER = "never"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rejection:
    """An offer that was not taken, or a trade without any offer, and the decisive reason.

    ``left`` is ``rest`` if a part of the offer was taken, and ``never`` if there was nothing to
    offer; a ``never`` is not counted among the offers.
    """

    trade: str
    label: str
    reason: str
    left: Remaining = Remaining.WHOLE


class Trade(Protocol):
    """A trade. ``offers`` and ``rewrite`` are pure; ``pays`` and ``buys`` name the four amounts.

    ``is_exact``: the same sums are computed. ``is_bitwise``: they are also added in the same
    order.
    """

    name: ClassVar[str]
    pays: ClassVar[tuple[str, ...]]
    buys: ClassVar[tuple[str, ...]]
    is_exact: ClassVar[bool]
    is_bitwise: ClassVar[bool]
    # The plan-file table of one rule.
    table: ClassVar[type[RuleTable]]

    def offers(
        self, program: Program, source: StepSource
    ) -> tuple[tuple[Offer, ...], tuple[Rejection, ...]]:
        """Return the possible applications, and the impossible ones with the reason."""
        ...

    def rewrite(self, program: Program, rules: Sequence[Rule], source: StepSource) -> Program:
        """Return the program after applying these rules; the given program is unchanged."""
        ...


def apply_rules(
    program: Program, rules: Sequence[Rule], *, trades: Sequence[Trade], source: StepSource
) -> Program:
    """Return the program after all rules; trades apply their own rules, in the order given.

    Rules that distribute the step over ranks turn it into the program of one of them.
    """
    known = {trade.name for trade in trades}
    unknown = sorted({rule.trade for rule in rules} - known)
    if unknown:
        raise Mismatch(
            f"the plan holds rules of an unknown trade: {unknown[0][:40]}",
            expected=f"one of {', '.join(sorted(known))}",
            remedy="correct the trade of these rules, or plan again",
        )
    layout = ParallelLayout.of(rules)
    if layout != program.layout:
        source = _sharded_source(source, layout, program.rank)
        program = replace(program.with_graph(source.graph(micro_batches=1)), layout=layout)
    for trade in trades:
        own = [rule for rule in rules if rule.trade == trade.name]
        program = trade.rewrite(program, own, source)
    return program


def apply_rules_on_ranks(
    program: Program, rules: Sequence[Rule], *, trades: Sequence[Trade], source: StepSource
) -> Program:
    """Apply rules on all ranks; with unequal shares, return the program of the largest share.

    Its ``sibling_programs`` are those of the other shares. Raise Mismatch unless all of them
    issue the same collectives in the same order: otherwise ranks would deadlock.
    """
    layout = ParallelLayout.of(rules)
    if not layout.shares:
        return apply_rules(program, rules, trades=trades, source=source)
    first, *others = (
        apply_rules(replace(program, rank=rank), rules, trades=trades, source=source)
        for rank in layout.unequal_ranks
    )
    differing = next((other for other in others if other.spoken != first.spoken), None)
    if differing is not None:
        raise Mismatch(
            f"with shares of {spelled(layout.shares)}, ranks {first.rank} and {differing.rank} "
            "would exchange gradients in different orders",
            expected="steps that differ between shares in their sizes alone",
            remedy="take other shares under [[shard_batch]], such as larger ones, or equal ones",
        )
    return replace(first, sibling_programs=tuple(others))


def _sharded_source(source: StepSource, layout: ParallelLayout, rank: int) -> ShardedSource:
    possible = source.divisors() if layout.shares else source.sharers()
    if layout.shares and layout.units not in possible:
        raise Mismatch(
            f"the plan shares the batch as {spelled(layout.shares)}",
            expected=f"shares that add up to one of {', '.join(str(k) for k in possible)}",
            remedy="set shares under [[shard_batch]] to such as do, or plan again",
        )
    if layout.units not in possible:
        raise Mismatch(
            f"the plan shares the batch among {layout.data} ranks",
            expected=f"one of {', '.join(str(k) for k in possible)} equal shares",
            remedy="set ranks under [[shard_batch]] to one of these, or plan again",
        )
    # Pipeline stages process the micro-batches of each group separately, one after another.
    why_not = source.why_not_split if layout.pipeline > 1 else source.why_not_shared
    reason = why_not() if layout.data > 1 else None
    if reason is not None:
        raise Mismatch(
            f"the plan shares the batch among {layout.data} ranks, which would change what is "
            f"trained: {reason}",
            expected="a model and loss whose batch can be cut",
            remedy="take the shard_batch rule out of the plan, or plan again",
        )
    return ShardedSource(source=source, layout=layout, rank=rank)
