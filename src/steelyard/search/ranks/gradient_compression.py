"""Finds the fastest data-parallel step with each gradient compression codec.

Bucket size, overlap lag and the set of compressed gradients are chosen together, on the same
timeline as without compression. Not for deciding if accuracy may be lost: see
planner/gradient_compression.py.
"""

import itertools
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace

from steelyard.errors import Mismatch
from steelyard.ir.gradient_codec import Codec
from steelyard.ir.parallel_layout import ALONE, ParallelLayout
from steelyard.ir.rule import Rule, of_kind
from steelyard.ir.rule_kinds import GradientCompression, StateSharding
from steelyard.plans.budget import Budget
from steelyard.plans.plan import SelectedTrade
from steelyard.plans.trade import Rejection, codecs_of
from steelyard.search.ranks.labels import tensor_count
from steelyard.search.ranks.layout_search import LayoutSearch
from steelyard.search.result import SearchResult

# A less lossy codec may make the step slower by up to this share.
_MAX_SLOWDOWN = 0.002


@dataclass(frozen=True, slots=True, kw_only=True)
class CompressedCandidate:
    """A layout with compressed gradients, with its predicted seconds and peak bytes.

    ``rules`` contain the layout and the compression; ``without`` contains the same layout without
    compression. ``codec`` is the lossiest codec in use.
    """

    codec: Codec
    trade: str
    rules: tuple[Rule, ...]
    without: tuple[Rule, ...]
    seconds: float
    nbytes: int

    @property
    def compression_rules(self) -> tuple[GradientCompression, ...]:
        return of_kind(self.rules, GradientCompression)


@dataclass(frozen=True, slots=True, kw_only=True)
class Weighing:
    """The search for compressed candidates on the data-parallel layouts of ``layouts``.

    ``codecs`` are the codecs available on these ranks.
    """

    layouts: LayoutSearch
    codecs: Collection[Codec]

    def fastest(
        self, *, thoroughly: bool
    ) -> tuple[list[CompressedCandidate], tuple[Rejection, ...]]:
        """Return the fastest candidate of each codec, or the rejections if there is none.

        A candidate compresses every gradient that its codec supports, and has no other trades. With
        ``thoroughly``, compression is tried on every candidate of each data-parallel layout,
        otherwise only on the fastest candidate of each.
        """
        found: dict[Codec, CompressedCandidate] = {}
        refused: dict[str, Rejection] = {}
        trades = dict.fromkeys(codecs_of(self.layouts.candidates.trades).values())
        for without in self._data_parallel_rules(thoroughly=thoroughly):
            program = self.layouts.candidates.apply_rules(without)
            for trade in trades:
                offers, refusals = trade.offers(program, self.layouts.candidates.source)
                refused |= {refusal.label: refusal for refusal in refusals}
                for offer in offers:
                    rules = of_kind(offer.rules, GradientCompression)
                    if (codec := rules[0].codec) in self.codecs:
                        candidate = self._candidate(codec, trade.name, without, rules)
                        best = found.get(codec, candidate)
                        found[codec] = min((best, candidate), key=lambda c: (c.seconds, c.nbytes))
        if not found:
            return [], tuple(refused.values())
        return list(found.values()), ()

    def coding_seconds(self, candidate: CompressedCandidate) -> float:
        """Return the computation that compression adds, which a less lossy codec may save."""
        trade = self.layouts.explanation.gradient_trade(
            candidate.codec.label, candidate.without, candidate.compression_rules
        )
        return max(0.0, trade.pays_seconds)

    def plan(self, candidate: CompressedCandidate, budget: Budget) -> SearchResult:
        """Return the plan on this layout, with all further trades that the budget requires."""
        layouts = self.layouts
        found = layouts.search_by(candidate.rules).find(budget)
        assert found is not None, "every data parallel layout has been searched"
        layout_trades = (
            *layouts.explanation.selected_trades(layouts.candidates.counted(candidate.without)),
            *self._codec_trades(candidate),
        )
        return replace(
            found,
            taken=(*layout_trades, *found.taken),
            refused=(*layouts.refusals, *found.refused),
            num_offers=found.num_offers + len(layout_trades),
        )

    def gentler(self, candidate: CompressedCandidate) -> CompressedCandidate:
        """Return the candidate with less lossy codecs, or none, for gradients where this is nearly
        as fast.

        The codec after which the candidate is named stays in use.
        """
        for rule in candidate.compression_rules:
            other_rules = tuple(other for other in candidate.compression_rules if other != rule)
            # First, no codec is tried; then the codecs follow, from the lossiest on, because a less
            # lossy codec has more bytes to send.
            for replacement in ((), *((less_lossy,) for less_lossy in self._less_lossy(rule))):
                tried = self._with_codecs(candidate, (*other_rules, *replacement))
                if tried is None:
                    continue
                if tried.seconds <= (1 + _MAX_SLOWDOWN) * candidate.seconds:
                    # The best time so far remains the reference, so that small losses do not add
                    # up.
                    candidate = replace(tried, seconds=min(candidate.seconds, tried.seconds))
                    if not replacement:
                        break
                elif replacement and not replacement[0].codec.rank:
                    # A less lossy codec sends more bytes. Low-rank factors need two exchanges, so a
                    # codec with more bytes may still be faster.
                    break
        return replace(candidate, seconds=self.layouts.candidates.counted(candidate.rules).seconds)

    def _with_codecs(
        self, candidate: CompressedCandidate, compression_rules: tuple[GradientCompression, ...]
    ) -> CompressedCandidate | None:
        """Return the candidate with these codecs, or None if a gradient does not support its codec.

        None is also returned if the candidate's own codec is no longer in use.
        """
        if candidate.codec not in (rule.codec for rule in compression_rules):
            return None
        try:
            return self._candidate(
                candidate.codec, candidate.trade, candidate.without, compression_rules
            )
        except Mismatch:
            return None

    def _less_lossy(self, rule: GradientCompression) -> list[GradientCompression]:
        """Return the rule with each less lossy codec, starting with the lossiest of these."""
        trades = codecs_of(self.layouts.candidates.trades)
        less_lossy = itertools.takewhile(lambda codec: codec != rule.codec, trades)
        return [
            replace(
                trades[codec].rule_in(codec),
                parameter=rule.parameter,
                count=rule.count,
                warm_up=rule.warm_up,
            )
            for codec in reversed([*less_lossy])
            if codec in self.codecs
        ]

    def _data_parallel_rules(self, *, thoroughly: bool) -> Iterator[tuple[Rule, ...]]:
        """Yield the rules of purely data-parallel candidates: all, or only the fastest of each
        layout.
        """
        for layout in self.layouts.layouts:
            if layout == ParallelLayout(data=layout.data, shares=layout.shares) != ALONE:
                candidates = self.layouts.candidates.of(layout)
                unsharded = [
                    candidate
                    for candidate in candidates
                    if not of_kind(candidate.rules, StateSharding)
                ]
                fastest = min(unsharded, key=lambda c: (c.seconds, c.nbytes))
                yield from (
                    candidate.rules for candidate in (unsharded if thoroughly else [fastest])
                )

    def _candidate(
        self,
        codec: Codec,
        trade: str,
        without: tuple[Rule, ...],
        compression_rules: tuple[GradientCompression, ...],
    ) -> CompressedCandidate:
        rules = tuple(sorted((*without, *compression_rules)))
        counted = self.layouts.candidates.counted(rules)
        return CompressedCandidate(
            codec=codec, trade=trade, rules=rules, without=without, seconds=counted.seconds,
            nbytes=counted.nbytes,
        )  # fmt: skip

    def _codec_trades(self, candidate: CompressedCandidate) -> Iterator[SelectedTrade]:
        """Yield the trade of each codec; the codecs are applied one after the other."""
        before = candidate.without
        for codec in codecs_of(self.layouts.candidates.trades):
            compression_rules = tuple(
                rule for rule in candidate.compression_rules if rule.codec == codec
            )
            if compression_rules:
                label = f"{codec.label} ({tensor_count(compression_rules)})"
                yield self.layouts.explanation.gradient_trade(label, before, compression_rules)
                before = (*before, *compression_rules)
