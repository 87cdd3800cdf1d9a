"""The interface of a trade: its offers, and its rewrite of the program.

Not for prices: a peak is not a sum, so the price of an offer is the difference between the
predictions for the rewritten program and for the original one.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any, ClassVar, Protocol, cast

from steelyard.errors import Mismatch
from steelyard.ir.gradient_codec import Codec
from steelyard.ir.parallel_layout import ParallelLayout, spelled
from steelyard.ir.program import Program
from steelyard.ir.rule import Rule, RuleT, trade_name
from steelyard.ir.rule_kinds import BatchSharding, GradientCompression, ValueCodec
from steelyard.ir.step_source import ShardedSource, StepSource


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """A possible application of a trade, as rules; ``label`` is the name of the place for
    people.
    """

    trade: str
    label: str
    rules: tuple[Rule, ...]


class Remaining(StrEnum):
    """The part of an offer that the plan does not take."""

    WHOLE = "whole"
    REST = "rest"
    NEVER = "never"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rejection:
    """An offer that was not taken, or a trade without any offer, with the decisive reason.

    ``left`` is ``rest`` if a part of the offer was taken, and ``never`` if there was nothing to
    offer; a ``never`` is not counted among the offers.
    """

    trade: str
    label: str
    reason: str
    left: Remaining = Remaining.WHOLE


class Trade(Protocol):
    """A trade. ``offers`` and ``rewrite`` are pure; ``pays`` and ``buys`` name some of the four
    amounts.

    ``is_exact``: the same sums are computed. ``is_bitwise``: their terms are also added in the same
    order. ``rule`` is the type of its rules, which also defines its table in a plan file.
    """

    name: ClassVar[str]
    pays: ClassVar[tuple[str, ...]]
    buys: ClassVar[tuple[str, ...]]
    is_exact: ClassVar[bool]
    is_bitwise: ClassVar[bool]
    rule: ClassVar[type[Rule]]

    def offers(
        self, program: Program, source: StepSource
    ) -> tuple[tuple[Offer, ...], tuple[Rejection, ...]]:
        """Return the possible applications, and the impossible ones with the reason for each."""
        ...

    def rewrite(self, program: Program, rules: Sequence[Any], source: StepSource) -> Program:
        """Return the program after these rules of the trade; the given program does not change."""
        ...


class ValueCodecTrade(Trade, Protocol):
    """A trade that saves values in fewer bits.

    ``probe`` is the operator that returns the relative error of a value that was encoded and
    decoded.
    """

    probe: ClassVar[str]


def value_codec(trades: Iterable[Trade]) -> ValueCodecTrade:
    """Return the trade that saves values in fewer bits."""
    return cast("ValueCodecTrade", next(t for t in trades if issubclass(t.rule, ValueCodec)))


class CodecTrade(Trade, Protocol):
    """A trade that compresses gradients; ``codecs`` are its codecs, the least lossy first."""

    codecs: ClassVar[tuple[Codec, ...]]

    def rule_in(self, codec: Codec) -> GradientCompression:
        """Return a rule for this codec that names no parameter yet."""
        ...


def codecs_of(trades: Iterable[Trade]) -> dict[Codec, CodecTrade]:
    """Return the codecs for gradients, the least lossy first, with the trade of each."""
    return {codec: trade for trade in codec_trades(trades) for codec in trade.codecs}


def codec_trades(trades: Iterable[Trade]) -> tuple[CodecTrade, ...]:
    """Return the trades that compress gradients."""
    return tuple(
        cast("CodecTrade", trade) for trade in trades if issubclass(trade.rule, GradientCompression)
    )


def trade_of(trades: Iterable[Trade], kind: type[Rule]) -> Trade | None:
    """Return the first trade whose rules are of this kind, or None."""
    return next((trade for trade in trades if issubclass(trade.rule, kind)), None)


def offers_of(
    trades: Iterable[Trade], kind: type[Rule], program: Program, source: StepSource
) -> tuple[tuple[Offer, ...], tuple[Rejection, ...]]:
    """Return the offers of the trade of this kind; there are none if the list has no such trade."""
    trade = trade_of(trades, kind)
    return ((), ()) if trade is None else trade.offers(program, source)


def rule_type(trades: Iterable[Trade], kind: type[RuleT]) -> type[RuleT]:
    """Return the rule type of the first trade of this kind."""
    return next(trade.rule for trade in trades if issubclass(trade.rule, kind))


def apply_rules(
    program: Program, rules: Sequence[Rule], *, trades: Sequence[Trade], source: StepSource
) -> Program:
    """Return the program after all rules; trades apply their own rules, in the order given.

    If the rules distribute the step over ranks, the result is the program of one of them.
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
    differing = next(
        (other for other in others if other.collective_order != first.collective_order), None
    )
    if differing is not None:
        raise Mismatch(
            f"with shares of {spelled(layout.shares)}, ranks {first.rank} and {differing.rank} "
            "would exchange gradients in different orders",
            expected="steps that differ between shares only in sizes",
            remedy=f"use other shares under [[{trade_name(BatchSharding)}]], such as larger "
            "or equal ones",
        )
    return replace(first, sibling_programs=tuple(others))


def _sharded_source(source: StepSource, layout: ParallelLayout, rank: int) -> ShardedSource:
    possible = source.divisors() if layout.shares else source.sharers()
    if layout.shares and layout.units not in possible:
        raise Mismatch(
            f"the plan has batch shares of {spelled(layout.shares)}",
            expected=f"shares that add up to one of {', '.join(str(k) for k in possible)}",
            remedy=f"set shares under [[{trade_name(BatchSharding)}]] accordingly, or plan again",
        )
    if layout.units not in possible:
        raise Mismatch(
            f"the plan shares the batch among {layout.data} ranks",
            expected=f"one of {', '.join(str(k) for k in possible)} equal shares",
            remedy=f"set ranks under [[{trade_name(BatchSharding)}]] to one of these, "
            "or plan again",
        )
    # Pipeline stages process the micro-batches of each group separately, one after another.
    why_not = source.why_not_split if layout.pipeline > 1 else source.why_not_shared
    reason = why_not() if layout.data > 1 else None
    if reason is not None:
        raise Mismatch(
            f"the plan shares the batch among {layout.data} ranks, which would change the "
            f"training result: {reason}",
            expected="a model and loss whose batch can be split",
            remedy=f"remove the {trade_name(BatchSharding)} rule from the plan, or plan again",
        )
    return ShardedSource(source=source, layout=layout, rank=rank)
