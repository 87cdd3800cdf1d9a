"""Gradients in codes: for each code, how a step that shares the batch is fastest with it.

How much goes at once, how late it is waited for and which gradients are coded is weighed together,
on the same timeline as without. Not for whether accuracy may be lost: see api/coded.py.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace

from steelyard.core.codec import CODE_TRADES, CODES, Codec
from steelyard.core.costs import Costs
from steelyard.core.layout import ALONE, Layout
from steelyard.core.plan import Taken
from steelyard.core.program import Program
from steelyard.core.rules import Rule
from steelyard.core.source import Source
from steelyard.core.trade import Refusal, Trade
from steelyard.predict import predict
from steelyard.search.wording import tensors

# What a code that loses less may take longer, of the step.
_NEXT_TO_NOTHING = 0.002


@dataclass(frozen=True, slots=True, kw_only=True)
class CodedWay:
    """``rules`` lay the step, and say what is coded; ``without`` are the same but for that. Named
    for the code that loses most of those in it."""

    trade: str
    label: str
    rules: tuple[Rule, ...]
    without: tuple[Rule, ...]
    seconds: float
    nbytes: int

    @property
    def codes(self) -> tuple[Rule, ...]:
        return tuple(rule for rule in self.rules if rule.trade in CODE_TRADES)


@dataclass(frozen=True, slots=True, kw_only=True)
class Weighing:
    """``counted`` says seconds and bytes of the step by some rules; ``codecs`` can be had here."""

    strike: Callable[[Sequence[Rule]], Program]
    counted: Callable[[tuple[Rule, ...]], tuple[float, int]]
    source: Source
    codecs: Collection[Codec]

    def fastest(
        self, trades: Sequence[Trade], ways: Sequence[tuple[Rule, ...]], *, thoroughly: bool
    ) -> tuple[list[CodedWay], tuple[Refusal, ...]]:
        """Of the same step in these ways, with what each code is for, or with less of it."""
        found: dict[str, CodedWay] = {}
        refused: dict[str, Refusal] = {}
        for without in ways:
            program = self.strike(without)
            for trade in trades:
                offers, refusals = trade.offers(program, self.source)
                refused |= {refusal.label: refusal for refusal in refusals}
                for offer in offers:
                    if _codec_of(offer.rules[0]) not in self.codecs:
                        continue
                    way = self._way(trade.name, offer.label, without, offer.rules)
                    best = found.get(way.label, way)
                    found[way.label] = min((best, way), key=lambda w: (w.seconds, w.nbytes))
        if not found:
            return [], tuple(refused.values())
        known = [*found.values()]
        return [self._gentler(way) for way in known] if thoroughly else known, ()

    def _gentler(self, way: CodedWay) -> CodedWay:
        """As fast, with no code or one that loses less where that costs next to nothing."""
        allowed = (1 + _NEXT_TO_NOTHING) * way.seconds
        for rule in way.codes:
            others = [other for other in way.codes if other != rule]
            milder = [[], *([one] for one in self._milder(rule))]
            for instead in milder:
                if others or instead:
                    codes = (*others, *instead)
                    tried = self._way(way.trade, way.label, way.without, codes)
                    if tried.seconds <= allowed:
                        allowed = min(allowed, (1 + _NEXT_TO_NOTHING) * tried.seconds)
                        way = tried
                        break
        return way

    def _milder(self, rule: Rule) -> Iterator[Rule]:
        """The same gradients in each code that loses less."""
        for (trade, op), codec in CODES.items():
            if codec is _codec_of(rule):
                return
            if codec in self.codecs:
                yield replace(rule, trade=trade, op=op)

    def _way(
        self, trade: str, label: str, without: tuple[Rule, ...], codes: tuple[Rule, ...]
    ) -> CodedWay:
        rules = tuple(sorted((*without, *codes)))
        seconds, nbytes = self.counted(rules)
        return CodedWay(
            trade=trade, label=label, rules=rules, without=without, seconds=seconds, nbytes=nbytes
        )


def _codec_of(rule: Rule) -> Codec:
    return CODES[rule.trade, rule.op]


def taken_codes(
    way: CodedWay, strike: Callable[[Sequence[Rule]], Program], costs: Costs
) -> Iterator[Taken]:
    """What each code buys and pays, one after the other."""
    rules = way.without
    before = predict(strike(rules), costs).quad
    for (trade, op), codec in CODES.items():
        codes = tuple(rule for rule in way.codes if (rule.trade, rule.op) == (trade, op))
        if not codes:
            continue
        rules = tuple(sorted((*rules, *codes)))
        after = predict(strike(rules), costs).quad
        waited, waits = before.exposed_communication_seconds, after.exposed_communication_seconds
        yield Taken(
            trade=trade,
            label=f"{codec.label} ({tensors(codes)})",
            rules=codes,
            buys_bytes=round(before.memory_bytes.value - after.memory_bytes.value),
            buys_seconds=waited.value - waits.value,
            pays_seconds=after.computation_seconds.value - before.computation_seconds.value,
        )
        before = after


def shared_alone(layouts: Sequence[Layout]) -> Iterator[Layout]:
    """Those in which ranks share the batch equally, and nothing else."""
    return (layout for layout in layouts if layout == Layout(batch=layout.batch) != ALONE)
