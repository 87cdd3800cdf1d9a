"""The candidate rules of each parallel layout, with their step time and peak memory.

Candidates differ in gradient bucket size, in overlap, in the number of sharded tensors, and in the
transport of collectives. They contain no recompute or offload. Not for choosing one: see
layout_search.py.
"""

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from steelyard.ir.collective import SLOTS
from steelyard.ir.graph import path_matches
from steelyard.ir.parallel_layout import ALONE, ParallelLayout
from steelyard.ir.program import Program
from steelyard.ir.rule import BETWEEN_RANKS, Rule, of_kind
from steelyard.ir.rule_kinds import (
    BatchSharding,
    CollectiveOverlap,
    GradientRule,
    PipelineStageEnd,
    SharedMemoryMessages,
    SparseRows,
    StateSharding,
    TensorSharding,
)
from steelyard.ir.step_source import StepSource
from steelyard.plans.trade import Offer, Rejection, Trade, apply_rules_on_ranks, offers_of
from steelyard.predict import peak_bytes, step_seconds
from steelyard.predict.cost_table import CostTable
from steelyard.search.layout_rules import batch_rules
from steelyard.search.ranks.gather_buckets import with_gather_buckets, with_prefetch

# Gradient bucket sizes to try. The best overlap depends on the model's layers and on the link.
BUCKETS = tuple(2**10 * kib for kib in (64, 1024, 4096, 25600, 102400))


# The kinds of trades between ranks that have candidates of their own.
KNOWN_KINDS = (
    BatchSharding, TensorSharding, StateSharding, PipelineStageEnd, GradientRule,
    CollectiveOverlap, SharedMemoryMessages,
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutCandidate:
    """The layout rules of a step, with its seconds and peak bytes under no other trade."""

    rules: tuple[Rule, ...]
    layout: ParallelLayout
    seconds: float
    nbytes: int


class LayoutCandidates:
    """The candidates of one program, priced once for each layout.

    ``regions`` maps each tensor-parallel degree to the offers that shard tensors, the best first.
    """

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
        self._candidates: dict[ParallelLayout, list[LayoutCandidate]] = {}

    def over(self, costs: CostTable, source: StepSource) -> "LayoutCandidates":
        """Return the candidates of the same program at the prices in ``costs``.

        ``source`` captures graphs at these prices.
        """
        other = copy.copy(self)
        other.costs, other.source, other._candidates = costs, source, {}
        return other

    def of(self, layout: ParallelLayout) -> list[LayoutCandidate]:
        """Return all candidates of ``layout``.

        They cover each bucket size, each overlap lag, and a growing number of sharded tensors; then
        ZeRO-style sharded weights on data-parallel ranks, and sparse gradients of embedding tables.
        Collectives use the link or shared memory.
        """
        if layout not in self._candidates:
            candidates = [self.counted(rules) for rules in self._rules(layout)]
            candidates += [
                *self._with_sharded_states(candidates),
                *self._with_sparse_gradients(candidates),
            ]
            candidates += self._through_slots(candidates)
            candidates += self._with_other_trades(candidates)
            self._candidates[layout] = candidates
        return self._candidates[layout]

    def _through_slots(self, candidates: Sequence[LayoutCandidate]) -> Iterator[LayoutCandidate]:
        """Yield candidates whose collectives use shared-memory slots, if the ranks have slots.

        They are the fastest candidate with each bucket size, and the one with the least memory.
        """
        if SLOTS not in self.costs.links or candidates[0].layout == ALONE:
            return
        by_size: dict[int, LayoutCandidate] = {}
        for candidate in sorted(candidates, key=lambda c: (c.seconds, c.nbytes)):
            by_size.setdefault(bucket_bytes_of(candidate.rules), candidate)
        leanest = min(candidates, key=lambda c: (c.nbytes, c.seconds))
        for candidate in dict.fromkeys((*by_size.values(), leanest)):
            yield self.counted((*candidate.rules, *self.slot_rules(candidate.rules)))

    def _with_other_trades(
        self, candidates: Sequence[LayoutCandidate]
    ) -> Iterator[LayoutCandidate]:
        """Yield the fastest and the leanest candidate with all offers of each further trade between
        ranks, about which the search knows nothing else.
        """
        fastest = min(candidates, key=lambda c: (c.seconds, c.nbytes))
        leanest = min(candidates, key=lambda c: (c.nbytes, c.seconds))
        for trade in self.trades:
            if trade.rule.stage not in BETWEEN_RANKS or issubclass(trade.rule, KNOWN_KINDS):
                continue
            for candidate in dict.fromkeys((fastest, leanest)):
                offers, _ = trade.offers(self.apply_rules(candidate.rules), self.source)
                rules = tuple(rule for offer in offers for rule in offer.rules)
                if rules:
                    yield self.counted((*candidate.rules, *rules))

    def slot_rules(self, rules: tuple[Rule, ...]) -> tuple[Rule, ...]:
        offers, _ = self.offers(SharedMemoryMessages, self.apply_rules(rules))
        return tuple(rule for offer in offers for rule in offer.rules)

    def _with_sharded_states(
        self, candidates: Sequence[LayoutCandidate]
    ) -> Iterator[LayoutCandidate]:
        """Yield the fastest candidate and the one with the least memory, with ZeRO-style sharded
        states added.
        """
        if candidates[0].layout.data == 1:
            return
        fastest = min(candidates, key=lambda c: (c.seconds, c.nbytes))
        leanest = min(candidates, key=lambda c: (c.nbytes, c.seconds))
        for candidate in dict.fromkeys((fastest, leanest)):
            program = self.apply_rules(candidate.rules)
            offers, _ = self.offers(StateSharding, program)
            states = [rule for offer in offers for rule in of_kind(offer.rules, StateSharding)]
            # Weights gathered for each pass can be freed between the two passes.
            for times in (1, 2) if states else ():
                repeated = [replace(rule, gathers=times) for rule in states]
                gathered = [
                    self.counted((*candidate.rules, *rules))
                    for rules in with_gather_buckets(program.graph, repeated)
                ]
                yield from gathered
                fastest_gather = min(gathered, key=lambda c: (c.seconds, c.nbytes))
                leanest_gather = min(gathered, key=lambda c: (c.nbytes, c.seconds))
                for chosen in dict.fromkeys((fastest_gather, leanest_gather)):
                    has_equal_shares = not candidate.layout.shares
                    yield self.counted(
                        with_prefetch(chosen.rules, has_equal_shares=has_equal_shares)
                    )

    def _with_sparse_gradients(
        self, candidates: Sequence[LayoutCandidate]
    ) -> Iterator[LayoutCandidate]:
        """Yield the candidates with sparse gradients of every table that allows them."""
        offers, _ = self.sparse_offers(candidates[0])
        rules = tuple(rule for offer in offers for rule in offer.rules)
        yield from (self.counted((*candidate.rules, *rules)) for candidate in candidates if rules)

    def sparse_offers(
        self, candidate: LayoutCandidate
    ) -> tuple[tuple[Offer, ...], tuple[Rejection, ...]]:
        """Return the sparse-gradient offers and rejections for a plain data-parallel candidate.

        Gradient compression in the rules is ignored. Other layouts have no offers.
        """
        dense = tuple(rule for rule in candidate.rules if not isinstance(rule, GradientRule))
        if (
            candidate.layout != ParallelLayout(data=candidate.layout.data)
            or candidate.layout == ALONE
        ):
            return (), ()
        return self.offers(SparseRows, self.apply_rules(dense))

    def _rules(self, layout: ParallelLayout) -> Iterator[tuple[Rule, ...]]:
        if layout.tensor == 1:
            yield from self._batch_rules(layout) if layout.data > 1 else [()]
            return
        # Gradient communication is chosen as if each tensor-parallel group were a single rank.
        batch_rules: tuple[Rule, ...] = ()
        if layout.data > 1:
            candidates = self.of(replace(layout, tensor=1))
            # ZeRO sharding of tensor-parallel weights is decided later, on the sharded program.
            unsharded = [
                candidate
                for candidate in candidates
                if not any(isinstance(rule, SparseRows | StateSharding) for rule in candidate.rules)
            ]
            batch_rules = self._fastest_of_groups(unsharded, layout.tensor).rules
        for sharding in self._sharding_rules(layout.tensor):
            if batch_rules:
                yield *batch_rules, *sharding
                continue
            overlaps = self._overlaps(sharding)
            for overlap in overlaps[:: max(len(overlaps) - 1, 1)]:
                yield *overlap, *sharding

    def _fastest_of_groups(
        self, candidates: Sequence[LayoutCandidate], group: int
    ) -> LayoutCandidate:
        """Return the fastest candidate if each data-parallel rank is a group of ``group`` ranks."""
        costs = self.group_costs(group)
        if costs is self.costs:
            return min(candidates, key=lambda c: (c.seconds, c.nbytes))
        seconds = {
            candidate: step_seconds(self.apply_rules(candidate.rules), costs).value
            for candidate in candidates
        }
        return min(candidates, key=lambda candidate: (seconds[candidate], candidate.nbytes))

    def group_costs(self, group: int) -> CostTable:
        """Return the prices of data parallelism among groups of ``group`` neighbouring ranks.

        On hosts with several ranks, groups have other links between them than single ranks have.
        """
        spread = self.costs.spread
        if spread is None or group == 1:
            return self.costs
        return replace(self.costs, spread=replace(spread, group=group))

    def _sharding_rules(self, ranks: int) -> Iterator[tuple[Rule, ...]]:
        """Yield rules with a growing number of sharding offers, the best offers first.

        No tensor is sharded twice.
        """
        rules: tuple[Rule, ...] = ()
        for offer in self.regions[ranks]:
            if self.sharded_tensors(rules).isdisjoint(self.sharded_tensors(offer.rules)):
                rules = *rules, *offer.rules
                yield rules

    def sharded_tensors(self, rules: Iterable[Rule]) -> frozenset[str]:
        """Return the names of the model tensors that these rules shard."""
        patterns = [rule.parameter for rule in of_kind(rules, TensorSharding)]
        names = (node.name.partition(":")[2] for node in self._program.graph.inputs())
        return frozenset(n for n in names if any(path_matches(n, p) for p in patterns))

    def _batch_rules(self, layout: ParallelLayout) -> Iterator[tuple[Rule, ...]]:
        for nbytes in BUCKETS:
            batch = batch_rules(layout, self.trades, bucket_bytes=nbytes)
            # If several candidates are predicted to be equal, the first one wins. It has the
            # largest lag, and so waits least.
            for overlap in reversed(self._overlaps(batch)):
                yield *overlap, *batch

    def _overlaps(self, rules: tuple[Rule, ...]) -> list[tuple[Rule, ...]]:
        """Return the possible overlaps of a step with these rules, or no rules if it has none."""
        offers, _ = self.offers(CollectiveOverlap, self.apply_rules(rules))
        return [offer.rules for offer in offers] or [()]

    def counted(self, rules: tuple[Rule, ...]) -> LayoutCandidate:
        program = self.apply_rules(rules)
        return LayoutCandidate(
            rules=rules,
            layout=program.layout,
            seconds=step_seconds(program, self.costs).value,
            nbytes=peak_bytes(program, self.costs),
        )

    def offers(
        self, kind: type[Rule], program: Program
    ) -> tuple[tuple[Offer, ...], tuple[Rejection, ...]]:
        return offers_of(self.trades, kind, program, self.source)

    def apply_rules(self, rules: Sequence[Rule]) -> Program:
        return apply_rules_on_ranks(self._program, rules, trades=self.trades, source=self.source)


def bucket_bytes_of(rules: Iterable[Rule]) -> int:
    return max((rule.bucket for rule in of_kind(rules, BatchSharding)), default=0)
