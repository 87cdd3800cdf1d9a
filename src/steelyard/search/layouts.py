"""On how many of the ranks the step lies, and how: one search for each way, the fastest of them.

What is recomputed, cut and moved is chosen for each way by itself, and what ranks exchange by how
the step then plays. Not for what one rank does under a layout: see search.py.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from steelyard.core.amounts import format_bytes, format_seconds
from steelyard.core.budget import Budget
from steelyard.core.costs import Costs
from steelyard.core.errors import Infeasible
from steelyard.core.layout import LAYOUT_TRADES, Layout
from steelyard.core.plan import Taken
from steelyard.core.program import Program
from steelyard.core.quad import Quad
from steelyard.core.rules import Rule
from steelyard.core.source import Source
from steelyard.core.trade import Left, Offer, Refusal, Trade, strike
from steelyard.predict import peak_bytes, predict, step_seconds
from steelyard.search.found import Found
from steelyard.search.search import ALLOWS_NONE, Search

_BATCH, _OVERLAP = "shard_batch", "overlap"
# How much is sent at once: what hides best depends on the model's layers and on the link.
_BUCKETS = tuple(2**10 * kib for kib in (64, 1024, 4096, 25600, 102400))
# A way that holds this much less is worth a search of its own where memory is short.
_LEANER = 0.98


class Layouts:
    """``searching`` makes the search for some rules of a layout; they are kept for all budgets."""

    def __init__(
        self,
        program: Program,
        *,
        trades: Sequence[Trade],
        source: Source,
        costs: Costs,
        num_ranks: int,
        searching: Callable[[tuple[Rule, ...]], Search],
    ) -> None:
        self._program, self._source, self._costs = program, source, costs
        self._trades = tuple(trades)
        self._searching = searching
        self._searches: dict[tuple[Rule, ...], Search] = {}
        self._ways: dict[int, list[_Way]] = {}
        offers, refusals = self._trade(_BATCH).offers(program, source)
        self.offers = [o for o in offers if num_ranks % o.rules[0].degree == 0]
        self.refusals = refusals or self._uneven(num_ranks)

    def find(self, budget: Budget, *, barred: str = ALLOWS_NONE) -> Found:
        """The plan that is fastest, on as many ranks as that takes; the fewest of those."""
        best: tuple[_Way, Found] | None = None
        tightest: Infeasible | None = None
        for ranks in self._most_promising():
            for way in self._worth_searching(ranks, budget):
                if best is not None and way.seconds >= _seconds(best[1]):
                    continue
                try:
                    found = self.search_by(way.rules).find(budget, barred=barred)
                except Infeasible as infeasible:
                    if tightest is None or _least(infeasible) < _least(tightest):
                        tightest = infeasible
                    continue
                if best is None or _seconds(found) < _seconds(best[1]):
                    best = way, found
        if best is None:
            assert tightest is not None
            raise tightest
        return self._told(*best)

    def search_by(self, rules: Sequence[Rule]) -> Search:
        """The search of the step as these rules lay it."""
        layout = tuple(sorted(rule for rule in rules if rule.trade in LAYOUT_TRADES))
        known = self._searches.get(layout)
        if known is None:
            known = self._searches[layout] = self._searching(layout)
        return known

    def _most_promising(self) -> list[int]:
        """All ranks first: where that is not the fastest, fewer are."""
        return [*sorted((o.rules[0].degree for o in self.offers), reverse=True), 1]

    def _worth_searching(self, ranks: int, budget: Budget) -> list["_Way"]:
        """The fastest, nothing else being done; where that takes too much, the leanest too."""
        ways = self.ways(ranks)
        fastest = min(ways, key=lambda way: (way.seconds, way.nbytes))
        leanest = min(ways, key=lambda way: (way.nbytes, way.seconds))
        limit = budget.memory_bytes
        fits = limit is None or fastest.nbytes <= limit
        if fits or leanest.nbytes > _LEANER * fastest.nbytes:
            return [fastest]
        return [fastest, leanest]

    def ways(self, ranks: int) -> list["_Way"]:
        """On so many ranks: with each bucket, and each time to wait for one."""
        if ranks not in self._ways:
            laid = self._shared(ranks) if ranks > 1 else [()]
            self._ways[ranks] = [self._counted(rules) for rules in laid]
        return self._ways[ranks]

    def _shared(self, ranks: int) -> Iterator[tuple[Rule, ...]]:
        for nbytes in _BUCKETS:
            batch = Rule(trade=_BATCH, degree=ranks, bucket_bytes=nbytes)
            offers, _ = self._trade(_OVERLAP).offers(self._strike((batch,)), self._source)
            for offer in offers:
                yield *offer.rules, batch

    def _counted(self, rules: tuple[Rule, ...]) -> "_Way":
        program = self._strike(rules)
        return _Way(
            rules=rules,
            seconds=step_seconds(program, self._costs).value,
            nbytes=peak_bytes(program, self._costs),
        )

    def _told(self, way: "_Way", found: Found) -> Found:
        """With what was decided here among what was taken and refused."""
        ranks = Layout.of(way.rules).num_ranks
        others = (offer for offer in self.offers if offer.rules[0].degree != ranks)
        refused = [*self.refusals, *(self._why_not(offer, found) for offer in others)]
        taken = () if ranks == 1 else (self._taken(way),)
        return replace(
            found,
            taken=(*taken, *found.taken),
            refused=(*refused, *found.refused),
            num_offers=found.num_offers + len(self.offers),
        )

    def _uneven(self, num_ranks: int) -> tuple[Refusal, ...]:
        """Of all the ranks there are, where the batch has no equal shares for them."""
        if num_ranks in {1, *(offer.rules[0].degree for offer in self.offers)}:
            return ()
        reason = f"the batch does not divide into {num_ranks} equal shares"
        label = f"among {num_ranks} ranks"
        return (Refusal(trade=_BATCH, label=label, reason=reason, left=Left.NEVER),)

    def _taken(self, way: "_Way") -> Taken:
        """Beside the step of one rank on the whole batch, nothing else being done to either."""
        programs = self._program, self._strike(way.rules)
        whole, share = (predict(program, self._costs).quad for program in programs)
        overlap, batch = way.rules
        sent = f"{format_bytes(batch.bucket_bytes)} at a time"
        return Taken(
            trade=_BATCH,
            label=f"among {batch.degree} ranks, gradients {sent}, {overlap.lag} under way",
            rules=way.rules,
            buys_bytes=round(whole.memory_bytes.value - share.memory_bytes.value),
            buys_seconds=whole.computation_seconds.value - share.computation_seconds.value,
            pays_seconds=_exposed(share),
        )

    def _why_not(self, offer: Offer, found: Found) -> Refusal:
        seconds = min(way.seconds for way in self.ways(offer.rules[0].degree))
        alone, plan = format_seconds(seconds), format_seconds(_seconds(found))
        reason = f"takes ~{alone} a step before anything else, the plan ~{plan} in all"
        if seconds < _seconds(found):
            reason = "with it no faster plan fits the budget"
        return Refusal(trade=offer.trade, label=offer.label, reason=reason)

    def _trade(self, name: str) -> Trade:
        return next(trade for trade in self._trades if trade.name == name)

    def _strike(self, rules: Sequence[Rule]) -> Program:
        return strike(self._program, rules, trades=self._trades, source=self._source)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Way:
    """How the step may lie, and what it takes so, nothing else being done."""

    rules: tuple[Rule, ...]
    seconds: float
    nbytes: int


def _seconds(found: Found) -> float:
    return found.prediction.quad.step_seconds.value


def _least(infeasible: Infeasible) -> int:
    return infeasible.least_bytes or sys.maxsize  # where it is time that is too short


def _exposed(quad: Quad) -> float:
    return quad.exposed_communication_seconds.value
