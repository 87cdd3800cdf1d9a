"""Every way in which ranks may lay a step, and what each takes and holds, nothing else being done.

With each size of what is sent at once, each time to wait for it, and more and more of the tensors
cut. Not for which of them is taken: see layout_search.py.
"""

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from steelyard.ir.collective import SLOTS
from steelyard.ir.gradient_codec import CODE_TRADES
from steelyard.ir.graph import path_matches
from steelyard.ir.parallel_layout import ALONE, ParallelLayout
from steelyard.ir.program import Program
from steelyard.ir.rule import Rule
from steelyard.ir.step_source import StepSource
from steelyard.plans.trade import Offer, Rejection, Trade, apply_rules_on_ranks
from steelyard.predict import peak_bytes, step_seconds
from steelyard.predict.cost_table import CostTable
from steelyard.search.ranks.gather_buckets import ahead, together

_BATCH, _TENSOR, _STATES, _OVERLAP = "shard_batch", "shard_tensor", "shard_states", "overlap"
_ROWS, _SLOTS = "sparse_gradients", "shared_memory_transfer"
# How much is sent at once: what hides best depends on the model's layers and on the link.
BUCKETS = tuple(2**10 * kib for kib in (64, 1024, 4096, 25600, 102400))


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutCandidate:
    """How the step may lie, and what it takes so, nothing else being done."""

    rules: tuple[Rule, ...]
    layout: ParallelLayout
    seconds: float
    nbytes: int


class LayoutCandidates:
    """``regions``: what may be cut, for each number of ranks that share tensors, best first."""

    def __init__(
        self,
        program: Program,
        *,
        trades: Sequence[Trade],
        source: StepSource,
        costs: CostTable,
        regions: Mapping[int, Sequence[Offer]],
    ) -> None:
        self._program, self.source, self.costs = program, source, costs
        self.trades, self.regions = tuple(trades), regions
        self._found: dict[ParallelLayout, list[LayoutCandidate]] = {}

    def over(self, costs: CostTable, source: StepSource) -> "LayoutCandidates":
        """The same ways at other prices, which ``source`` puts what it captures on."""
        other = copy.copy(self)
        other.costs, other.source, other._found = costs, source, {}
        return other

    def of(self, layout: ParallelLayout) -> list[LayoutCandidate]:
        """With each bucket, each time to wait for one, and more and more of the tensors cut; with
        weights in shares too, where several have the same, and with rows of gradients in place of
        tables, where there are fewer; all of it through a link, or through memory that ranks
        share."""
        if layout not in self._found:
            ways = [self.counted(rules) for rules in self._rules(layout)]
            ways += [*self._with_states(ways), *self._with_rows(ways)]
            ways += self._through_slots(ways)
            self._found[layout] = ways
        return self._found[layout]

    def _through_slots(self, ways: Sequence[LayoutCandidate]) -> Iterator[LayoutCandidate]:
        """The fastest with each size of what is sent at once, and the leanest, where there are
        slots."""
        if SLOTS not in self.costs.links or ways[0].layout == ALONE:
            return
        by_size: dict[int, LayoutCandidate] = {}
        for way in sorted(ways, key=lambda way: (way.seconds, way.nbytes)):
            by_size.setdefault(at_once(way.rules), way)
        leanest = min(ways, key=lambda way: (way.nbytes, way.seconds))
        for way in dict.fromkeys((*by_size.values(), leanest)):
            yield self.counted((*way.rules, *self.slots_of(way.rules)))

    def slots_of(self, rules: tuple[Rule, ...]) -> tuple[Rule, ...]:
        offers, _ = self.trade(_SLOTS).offers(self.apply_rules(rules), self.source)
        return tuple(rule for offer in offers for rule in offer.rules)

    def _with_states(self, ways: Sequence[LayoutCandidate]) -> Iterator[LayoutCandidate]:
        """Added to the fastest and to the leanest."""
        if ways[0].layout.batch == 1:
            return
        fastest = min(ways, key=lambda way: (way.seconds, way.nbytes))
        leanest = min(ways, key=lambda way: (way.nbytes, way.seconds))
        for way in dict.fromkeys((fastest, leanest)):
            program = self.apply_rules(way.rules)
            offers, _ = self.trade(_STATES).offers(program, self.source)
            states = [rule for offer in offers for rule in offer.rules]
            # Gathered for each pass, weights need not stay from one to the other.
            for times in (1, 2) if states else ():
                again = [replace(rule, times=times) for rule in states]
                found = [
                    self.counted((*way.rules, *rules)) for rules in together(program.graph, again)
                ]
                yield from found
                quickest = min(found, key=lambda way: (way.seconds, way.nbytes))
                least = min(found, key=lambda way: (way.nbytes, way.seconds))
                for one in dict.fromkeys((quickest, least)):
                    is_alike = not way.layout.shares
                    yield self.counted(ahead(one.rules, is_alike=is_alike))

    def _with_rows(self, ways: Sequence[LayoutCandidate]) -> Iterator[LayoutCandidate]:
        """Of all tables that it is offered for."""
        offers, _ = self.rows_of(ways[0])
        rules = tuple(rule for offer in offers for rule in offer.rules)
        yield from (self.counted((*way.rules, *rules)) for way in ways if rules)

    def rows_of(self, way: LayoutCandidate) -> tuple[tuple[Offer, ...], tuple[Rejection, ...]]:
        """Of a step that lies so, and whose gradients go as a whole."""
        whole = tuple(rule for rule in way.rules if rule.trade not in (_ROWS, *CODE_TRADES))
        if way.layout != ParallelLayout(batch=way.layout.batch) or way.layout == ALONE:
            return (), ()
        return self.trade(_ROWS).offers(self.apply_rules(whole), self.source)

    def _rules(self, layout: ParallelLayout) -> Iterator[tuple[Rule, ...]]:
        if layout.tensor == 1:
            yield from self._shared(layout) if layout.batch > 1 else [()]
            return
        # How gradients are sent is chosen as if each group were one rank.
        shared: tuple[Rule, ...] = ()
        if layout.batch > 1:
            ways = self.of(replace(layout, tensor=1))
            # Which weights have shares is another question once they are cut, and asked then.
            of_whole = {_ROWS, _STATES}
            whole = [way for way in ways if of_whole.isdisjoint(rule.trade for rule in way.rules)]
            shared = self._fastest_of_groups(whole, layout.tensor).rules
        for cut in self._cuts(layout.tensor):
            if shared:
                yield *shared, *cut
                continue
            offers, _ = self.trade(_OVERLAP).offers(self.apply_rules(cut), self.source)
            for offer in offers[:: max(len(offers) - 1, 1)]:
                yield *offer.rules, *cut

    def _fastest_of_groups(self, ways: Sequence[LayoutCandidate], group: int) -> LayoutCandidate:
        """Of ways to share the batch, where ``group`` ranks stand for each of theirs."""
        costs = self.costs_of_groups(group)
        if costs is self.costs:
            return min(ways, key=lambda way: (way.seconds, way.nbytes))
        seconds = {way: step_seconds(self.apply_rules(way.rules), costs).value for way in ways}
        return min(ways, key=lambda way: (seconds[way], way.nbytes))

    def costs_of_groups(self, group: int) -> CostTable:
        """Of hosts that have several ranks, other links join groups than join as many ranks."""
        spread = self.costs.spread
        if spread is None or group == 1:
            return self.costs
        return replace(self.costs, spread=replace(spread, group=group))

    def _cuts(self, ranks: int) -> Iterator[tuple[Rule, ...]]:
        """The first offers, best first, and one more each time; no tensor is cut twice."""
        rules: tuple[Rule, ...] = ()
        for offer in self.regions[ranks]:
            if self.cut_by(rules).isdisjoint(self.cut_by(offer.rules)):
                rules = *rules, *offer.rules
                yield rules

    def cut_by(self, rules: Iterable[Rule]) -> frozenset[str]:
        """The tensors of the model that these rules cut."""
        patterns = [rule.module for rule in rules if rule.trade == _TENSOR]
        names = (node.name.partition(":")[2] for node in self._program.graph.inputs())
        return frozenset(n for n in names if any(path_matches(n, p) for p in patterns))

    def _shared(self, layout: ParallelLayout) -> Iterator[tuple[Rule, ...]]:
        for nbytes in BUCKETS:
            batch = Rule(
                trade=_BATCH, degree=layout.batch, bucket_bytes=nbytes, shares=layout.shares
            )
            offers, _ = self.trade(_OVERLAP).offers(self.apply_rules((batch,)), self.source)
            # Of what is said to take and hold the same, that which waits for least comes first.
            for offer in reversed(offers):
                yield *offer.rules, batch

    def counted(self, rules: tuple[Rule, ...]) -> LayoutCandidate:
        program = self.apply_rules(rules)
        return LayoutCandidate(
            rules=rules,
            layout=program.layout,
            seconds=step_seconds(program, self.costs).value,
            nbytes=peak_bytes(program, self.costs),
        )

    def trade(self, name: str) -> Trade:
        return next(trade for trade in self.trades if trade.name == name)

    def apply_rules(self, rules: Sequence[Rule]) -> Program:
        return apply_rules_on_ranks(self._program, rules, trades=self.trades, source=self.source)


def at_once(rules: Iterable[Rule]) -> int:
    return max((rule.bucket_bytes for rule in rules if rule.trade == _BATCH), default=0)
