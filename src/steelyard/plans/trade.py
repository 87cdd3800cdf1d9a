"""The one shape every trade has: where it could be applied, and what the step becomes.

Not for prices: a peak is not a sum, so the price of an offer is what predict/ says of the
rewritten program less what it says of the program before.
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
    """Something that could be applied, as rules; ``label`` says where, for people."""

    trade: str
    label: str
    rules: tuple[Rule, ...]


class Remaining(StrEnum):
    """How much of an offer was not taken."""

    WHOLE = "whole"
    REST = "rest"
    NEVER = "never"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rejection:
    """An offer that was not taken, or a trade that has none here, and the reason that binds.

    ``left`` is ``rest`` of an offer of which a part was taken, and ``never`` of what could not be
    offered at all, which no number of offers counts.
    """

    trade: str
    label: str
    reason: str
    left: Remaining = Remaining.WHOLE


class Trade(Protocol):
    """``offers`` and ``rewrite`` are pure; ``pays`` and ``buys`` are words of the four.

    What is exact computes the same sums; what ``is_bitwise`` adds them up in the same order too.
    """

    name: ClassVar[str]
    pays: ClassVar[tuple[str, ...]]
    buys: ClassVar[tuple[str, ...]]
    is_exact: ClassVar[bool]
    is_bitwise: ClassVar[bool]
    # The table of a plan file that holds one rule.
    table: ClassVar[type[RuleTable]]

    def offers(
        self, program: Program, source: StepSource
    ) -> tuple[tuple[Offer, ...], tuple[Rejection, ...]]:
        """What could be applied here, and what could not, with the reason."""
        ...

    def rewrite(self, program: Program, rules: Sequence[Rule], source: StepSource) -> Program:
        """The program after applying these rules; the one given is not changed."""
        ...


def apply_rules(
    program: Program, rules: Sequence[Rule], *, trades: Sequence[Trade], source: StepSource
) -> Program:
    """The program after all rules, each trade its own, in the order the trades are given.

    Rules that lay the step on several ranks make it the program of one of them.
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
        source = _laid(source, layout, program.rank)
        program = replace(program.with_graph(source.graph(micro_batches=1)), layout=layout)
    for trade in trades:
        own = [rule for rule in rules if rule.trade == trade.name]
        program = trade.rewrite(program, own, source)
    return program


def apply_rules_on_ranks(
    program: Program, rules: Sequence[Rule], *, trades: Sequence[Trade], source: StepSource
) -> Program:
    """As ``apply_rules``; where ranks have unequal shares, the program of the one that has most,
    and
    beside it one of each other share.

    They have to exchange the same in the same order, or they would wait for one another for ever.
    """
    layout = ParallelLayout.of(rules)
    if not layout.shares:
        return apply_rules(program, rules, trades=trades, source=source)
    first, *others = (
        apply_rules(replace(program, rank=rank), rules, trades=trades, source=source)
        for rank in layout.unequal_ranks
    )
    odd = next((other for other in others if other.spoken != first.spoken), None)
    if odd is not None:
        raise Mismatch(
            f"with shares of {spelled(layout.shares)}, ranks {first.rank} and {odd.rank} would "
            "exchange gradients in different orders",
            expected="steps that differ between shares in their sizes alone",
            remedy="take other shares under [[shard_batch]], such as larger ones, or equal ones",
        )
    return replace(first, sibling_programs=tuple(others))


def _laid(source: StepSource, layout: ParallelLayout, rank: int) -> ShardedSource:
    possible = source.divisors() if layout.shares else source.sharers()
    if layout.shares and layout.units not in possible:
        raise Mismatch(
            f"the plan shares the batch as {spelled(layout.shares)}",
            expected=f"shares that add up to one of {', '.join(str(k) for k in possible)}",
            remedy="set shares under [[shard_batch]] to such as do, or plan again",
        )
    if layout.units not in possible:
        raise Mismatch(
            f"the plan shares the batch among {layout.batch} ranks",
            expected=f"one of {', '.join(str(k) for k in possible)} equal shares",
            remedy="set ranks under [[shard_batch]] to one of these, or plan again",
        )
    # In stages micro-batches go one after another, of each group by itself.
    why_not = source.why_not_split if layout.pipeline > 1 else source.why_not_shared
    reason = why_not() if layout.batch > 1 else None
    if reason is not None:
        raise Mismatch(
            f"the plan shares the batch among {layout.batch} ranks, which would change what is "
            f"trained: {reason}",
            expected="a model and loss whose batch can be cut",
            remedy="take the shard_batch rule out of the plan, or plan again",
        )
    return ShardedSource(source=source, layout=layout, rank=rank)
