"""Gradients in codes: for each code, how a step that shares the batch is fastest with it.

How much goes at once, how late it is waited for and which gradients are coded is weighed together,
on the same timeline as without. Not for whether accuracy may be lost: see api/coded.py.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from steelyard.core.layout import ALONE, Layout
from steelyard.core.program import Program
from steelyard.core.rules import Rule
from steelyard.core.source import Source
from steelyard.core.trade import Refusal, Trade


@dataclass(frozen=True, slots=True, kw_only=True)
class CodedWay:
    """``rules`` lay the step, and say what is coded; ``without`` are the same but for that."""

    trade: str
    label: str
    rules: tuple[Rule, ...]
    without: tuple[Rule, ...]
    seconds: float
    nbytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Weighing:
    """``counted`` says seconds and bytes of the step by some rules."""

    strike: Callable[[Sequence[Rule]], Program]
    counted: Callable[[tuple[Rule, ...]], tuple[float, int]]
    source: Source

    def fastest(
        self, trade: Trade, ways: Sequence[tuple[Rule, ...]], *, thoroughly: bool
    ) -> CodedWay | tuple[Refusal, ...]:
        """Of the same step in these ways, with what this trade offers, or with less of it."""
        found: list[CodedWay] = []
        refused: tuple[Refusal, ...] = ()
        for without in ways:
            offers, refusals = trade.offers(self.strike(without), self.source)
            refused = refused or refusals
            for offer in offers:
                coded = self._way(trade.name, offer.label, without, offer.rules)
                found.append(coded)
        if not found:
            return refused
        best = min(found, key=lambda way: (way.seconds, way.nbytes))
        return self._left_out(best) if thoroughly else best

    def _left_out(self, best: CodedWay) -> CodedWay:
        """Without the codes of those parameters that are sent as they are in less time."""
        for rule in self._codes(best):
            codes = tuple(other for other in self._codes(best) if other != rule)
            if codes:
                fewer = self._way(best.trade, best.label, best.without, codes)
                best = min((best, fewer), key=lambda way: way.seconds)
        return best

    def _codes(self, way: CodedWay) -> tuple[Rule, ...]:
        return tuple(rule for rule in way.rules if rule.trade == way.trade)

    def _way(
        self, trade: str, label: str, without: tuple[Rule, ...], codes: tuple[Rule, ...]
    ) -> CodedWay:
        rules = tuple(sorted((*without, *codes)))
        seconds, nbytes = self.counted(rules)
        return CodedWay(
            trade=trade, label=label, rules=rules, without=without, seconds=seconds, nbytes=nbytes
        )


def shared_alone(layouts: Sequence[Layout]) -> Iterator[Layout]:
    """Those in which ranks share the batch equally, and nothing else."""
    return (layout for layout in layouts if layout == Layout(batch=layout.batch) != ALONE)
