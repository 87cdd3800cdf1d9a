"""Gradients in codes: for each code, how a step that shares the batch is fastest with it.

How much goes at once, how late it is waited for and which gradients are coded is weighed together,
on the same timeline as without. Not for whether accuracy may be lost: see
planner/gradient_compression.py.
"""

import itertools
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace

from steelyard.errors import Mismatch
from steelyard.ir.gradient_codec import CODE_TRADES, CODES, Codec, codec_of
from steelyard.ir.parallel_layout import ALONE, ParallelLayout
from steelyard.ir.rule import Rule
from steelyard.plans.budget import Budget
from steelyard.plans.plan import SelectedTrade
from steelyard.plans.trade import Rejection
from steelyard.search.ranks.labels import tensors
from steelyard.search.ranks.layout_search import LayoutSearch
from steelyard.search.result import SearchResult

# What a code that loses less may take longer, of the step.
_NEXT_TO_NOTHING = 0.002
_STATES = "shard_states"


@dataclass(frozen=True, slots=True, kw_only=True)
class CompressedCandidate:
    """``rules`` lay the step, and say what is coded; ``without`` are the same but for that.
    ``codec`` is the one that loses most of those in it."""

    codec: Codec
    trade: str
    rules: tuple[Rule, ...]
    without: tuple[Rule, ...]
    seconds: float
    nbytes: int

    @property
    def codes(self) -> tuple[Rule, ...]:
        return tuple(rule for rule in self.rules if rule.trade in CODE_TRADES)


@dataclass(frozen=True, slots=True, kw_only=True)
class Weighing:
    """``layouts`` say how the step lies without; ``codecs`` can be had here."""

    layouts: LayoutSearch
    codecs: Collection[Codec]

    def fastest(
        self, *, thoroughly: bool
    ) -> tuple[list[CompressedCandidate], tuple[Rejection, ...]]:
        """How the step is fastest with all gradients that can be in each of these codes, nothing
        else being done; or why there is no such way. What is not to be had is only weighed beside
        what is fastest without."""
        found: dict[Codec, CompressedCandidate] = {}
        refused: dict[str, Rejection] = {}
        trades = [trade for trade in self.layouts.ways.trades if trade.name in CODE_TRADES]
        for without in self._shared(thoroughly=thoroughly):
            program = self.layouts.ways.apply_rules(without)
            for trade in trades:
                offers, refusals = trade.offers(program, self.layouts.ways.source)
                refused |= {refusal.label: refusal for refusal in refusals}
                for offer in offers:
                    if (codec := codec_of(offer.rules[0])) in self.codecs:
                        way = self._way(codec, trade.name, without, offer.rules)
                        best = found.get(codec, way)
                        found[codec] = min((best, way), key=lambda w: (w.seconds, w.nbytes))
        if not found:
            return [], tuple(refused.values())
        return list(found.values()), ()

    def coding_seconds(self, way: CompressedCandidate) -> float:
        """What codes add to computing, which gentler ones may save."""
        coded = self.layouts.told.sent_otherwise(way.codec.label, way.without, way.codes)
        return max(0.0, coded.pays_seconds)

    def plan(self, way: CompressedCandidate, budget: Budget) -> SearchResult:
        """The plan that lies so, with all that the budget needs besides."""
        layouts = self.layouts
        found = layouts.search_by(way.rules).find(budget)
        assert found is not None, "what shares the batch alone is searched"
        own = *layouts.told.taken(layouts.ways.counted(way.without)), *self._taken(way)
        return replace(
            found,
            taken=(*own, *found.taken),
            refused=(*layouts.refusals, *found.refused),
            num_offers=found.num_offers + len(own),
        )

    def gentler(self, way: CompressedCandidate) -> CompressedCandidate:
        """The same, with no code or one that loses less wherever that costs next to nothing; what
        the way is named for stays in it."""
        for rule in way.codes:
            others = tuple(other for other in way.codes if other != rule)
            # Without a code first; then from the code that loses most, for what loses less is more
            # to send.
            for instead in ((), *((milder,) for milder in self._milder(rule))):
                tried = self._in_codes(way, (*others, *instead))
                if tried is None:
                    continue
                if tried.seconds <= (1 + _NEXT_TO_NOTHING) * way.seconds:
                    # What was gained is not given away again bit by bit.
                    way = replace(tried, seconds=min(way.seconds, tried.seconds))
                    if not instead:
                        break
                elif instead and not codec_of(instead[0]).rank:
                    break  # factors are exchanged twice, and may take longer than what is more
        return replace(way, seconds=self.layouts.ways.counted(way.rules).seconds)

    def _in_codes(
        self, way: CompressedCandidate, codes: tuple[Rule, ...]
    ) -> CompressedCandidate | None:
        """None where it would be another code's way, or not every gradient can go so."""
        if way.codec not in map(codec_of, codes):
            return None
        try:
            return self._way(way.codec, way.trade, way.without, codes)
        except Mismatch:
            return None

    def _milder(self, rule: Rule) -> list[Rule]:
        """The same gradients in each code that loses less, the one that loses most first."""
        milder = itertools.takewhile(lambda kind: CODES[kind] != codec_of(rule), CODES)
        return [
            replace(rule, trade=trade, op=op, degree=degree)
            for trade, op, degree in reversed([*milder])
            if CODES[trade, op, degree] in self.codecs
        ]

    def _shared(self, *, thoroughly: bool) -> Iterator[tuple[Rule, ...]]:
        """Every way in which ranks share the batch and nothing else, or the fastest."""
        for layout in self.layouts.layouts:
            if layout == ParallelLayout(batch=layout.batch, shares=layout.shares) != ALONE:
                ways = self.layouts.ways.of(layout)
                whole = [w for w in ways if not any(r.trade == _STATES for r in w.rules)]
                fastest = min(whole, key=lambda way: (way.seconds, way.nbytes))
                yield from (way.rules for way in (whole if thoroughly else [fastest]))

    def _way(
        self, codec: Codec, trade: str, without: tuple[Rule, ...], codes: tuple[Rule, ...]
    ) -> CompressedCandidate:
        rules = tuple(sorted((*without, *codes)))
        counted = self.layouts.ways.counted(rules)
        return CompressedCandidate(
            codec=codec, trade=trade, rules=rules, without=without, seconds=counted.seconds,
            nbytes=counted.nbytes,
        )  # fmt: skip

    def _taken(self, way: CompressedCandidate) -> Iterator[SelectedTrade]:
        """What each code buys and pays, one after the other."""
        before = way.without
        for codec in CODES.values():
            codes = tuple(rule for rule in way.codes if codec_of(rule) == codec)
            if codes:
                label = f"{codec.label} ({tensors(codes)})"
                yield self.layouts.told.sent_otherwise(label, before, codes)
                before = (*before, *codes)
