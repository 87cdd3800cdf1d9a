"""Explains a parallel layout: costs and gains of each trade, and reasons against others.

Not for labels: see labels.py. Not for choosing a layout: see layout_search.py.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from steelyard.ir.collective import SLOTS
from steelyard.ir.parallel_layout import ALONE, ParallelLayout
from steelyard.ir.rule import Rule, of_kind
from steelyard.ir.rule_kinds import (
    BatchSharding,
    CollectiveOverlap,
    SharedMemoryMessages,
    SparseRows,
    StateSharding,
    TensorSharding,
)
from steelyard.passes.data_parallel.sync_batchnorm import is_synchronised
from steelyard.plans.plan import Prediction, SelectedTrade
from steelyard.plans.trade import Offer, Rejection
from steelyard.predict import predict
from steelyard.predict.cost_table import CostTable
from steelyard.search.ranks.labels import layout_label, tensor_count
from steelyard.search.ranks.layout_candidates import (
    KNOWN_KINDS,
    LayoutCandidate,
    LayoutCandidates,
)
from steelyard.search.ranks.rank_speeds import RankSpeeds
from steelyard.search.rejection import (
    StepCosts,
    alone_takes,
    rejected,
    without_shared_memory,
)
from steelyard.search.result import SearchResult
from steelyard.search.trade_price import (
    computation_seconds,
    exposed_seconds,
    price_without,
    step_price_without,
)
from steelyard.units import format_bytes

_THROUGH_SLOTS = "collectives through shared memory"
_MAX_LISTED_RANKS = 8


class LayoutExplanation:
    """The selected trades and rejections of a layout, at the prices of its candidates.

    Each trade is compared with the same step without it.
    """

    def __init__(self, candidates: LayoutCandidates, rank_speeds: RankSpeeds) -> None:
        self._candidates, self._rank_speeds = candidates, rank_speeds

    def explain(
        self,
        candidate: LayoutCandidate,
        found: SearchResult,
        *,
        layouts: Sequence[ParallelLayout],
        refusals: Sequence[Rejection],
    ) -> SearchResult:
        """Return ``found`` with the trades and rejections of the layout added."""
        other_layouts = [x for x in layouts if x not in (ALONE, candidate.layout)]
        unapplied_offers = [
            o
            for o in self._candidates.regions[candidate.layout.tensor]
            if not set(o.rules) <= set(candidate.rules)
        ]
        refused = [*refusals, *(self.why_not(layout, found) for layout in other_layouts)]
        refused += [self._why_not_sharded(offer, candidate) for offer in unapplied_offers]
        sparse_offers, impossible = self._candidates.sparse_offers(candidate)
        refused += [
            *impossible,
            *self._why_not_sparse(sparse_offers, candidate),
            *self._why_no_slots(candidate),
        ]
        offers = len(layouts) - (ALONE in layouts) + len(unapplied_offers) + len(sparse_offers)
        offers += candidate.layout != ALONE and SLOTS in self._candidates.costs.links
        offers += bool(of_kind(candidate.rules, StateSharding))
        return replace(
            found,
            taken=(*self.selected_trades(candidate), *found.taken),
            refused=(*refused, *found.refused),
            num_offers=found.num_offers + offers,
        )

    def selected_trades(self, candidate: LayoutCandidate) -> Iterator[SelectedTrade]:
        """Yield the layout's trades, each compared with the same layout without it."""
        batch_rules = of_kind(candidate.rules, BatchSharding)
        tensor_rules = of_kind(candidate.rules, TensorSharding)
        state_rules = of_kind(candidate.rules, StateSharding)
        overlap_rules = of_kind(candidate.rules, CollectiveOverlap)
        lag = max((rule.window for rule in overlap_rules), default=1)
        if batch_rules:
            bucket = format_bytes(batch_rules[0].bucket)
            split = self._label(candidate.layout)
            if subset := self._candidates.costs.subsets.get(candidate.layout.num_ranks):
                more = ", ..." if len(subset.ranks) > _MAX_LISTED_RANKS else ""
                split += f" ({', '.join(map(str, subset.ranks[:_MAX_LISTED_RANKS]))}{more})"
            if candidate.layout.shares:
                split += f" ({self._rank_speeds.describe(candidate.layout.data)})"
            label = f"{split}, gradient buckets of {bucket}, {lag} in flight"
            if is_synchronised(self._candidates.apply_rules(batch_rules).graph):
                label += ", BatchNorm statistics over all samples"
            costs = self._candidates.group_costs(candidate.layout.tensor)
            yield self._trade_between(
                BatchSharding, label, (), (*overlap_rules, *batch_rules), costs
            )
        before = (*overlap_rules, *batch_rules) if batch_rules else ()
        if tensor_rules:
            label = f"{tensor_count(tensor_rules)} sharded over {candidate.layout.tensor} ranks"
            yield self._trade_between(TensorSharding, label, before, (*before, *tensor_rules))
            before = (*before, *tensor_rules)
        if state_rules:
            note = ", gathered twice" if state_rules[0].gathers > 1 else ""
            if size := state_rules[0].bucket:
                note += f", in buckets of {format_bytes(size)}"
            label = f"{tensor_count(state_rules)} sharded over {candidate.layout.data} ranks{note}"
            yield self._trade_between(StateSharding, label, before, (*before, *state_rules))
        if sparse_rules := of_kind(candidate.rules, SparseRows):
            label = f"rows of {tensor_count(sparse_rules)} from {candidate.layout.data} ranks"
            yield self.gradient_trade(label, before, sparse_rules)
        if slot_rules := of_kind(candidate.rules, SharedMemoryMessages):
            yield self._slots_taken(candidate, slot_rules)
        others = [rule for rule in candidate.rules if not isinstance(rule, KNOWN_KINDS)]
        for trade in dict.fromkeys(rule.trade for rule in others):
            rules = tuple(rule for rule in others if rule.trade == trade)
            without = tuple(rule for rule in candidate.rules if rule not in rules)
            label = rules[0].describe() if len(rules) == 1 else f"{len(rules)} places"
            yield self.gradient_trade(label, without, rules)

    def _slots_taken(self, candidate: LayoutCandidate, slots: tuple[Rule, ...]) -> SelectedTrade:
        """Return the trade that sends collectives through shared-memory slots instead of the link.

        Slots also reduce the work that a rank itself does for a collective.
        """
        without = self._candidates.counted(
            tuple(rule for rule in candidate.rules if rule not in slots)
        )
        return step_price_without(
            SharedMemoryMessages,
            _THROUGH_SLOTS,
            slots,
            saved_bytes=without.nbytes - candidate.nbytes,
            saved_seconds=without.seconds - candidate.seconds,
        )

    def gradient_trade(
        self, label: str, before: tuple[Rule, ...], rules: tuple[Rule, ...]
    ) -> SelectedTrade:
        """Return a trade of computation for communication, applied after the rules ``before``."""
        without, with_it = self._predictions(before, (*before, *rules), self._candidates.costs)
        return SelectedTrade(
            trade=rules[0].trade,
            label=label,
            rules=rules,
            buys_bytes=without.peak.nbytes - with_it.peak.nbytes,
            buys_seconds=exposed_seconds(without) - exposed_seconds(with_it),
            pays_seconds=computation_seconds(with_it) - computation_seconds(without),
        )

    def _trade_between(
        self,
        kind: type[Rule],
        label: str,
        before: tuple[Rule, ...],
        after: tuple[Rule, ...],
        costs: CostTable | None = None,
    ) -> SelectedTrade:
        """Return the trade that leads from the rules ``before`` to the rules ``after``.

        ``costs`` are the prices of data parallelism among groups of ranks, if these differ.
        """
        without, with_it = self._predictions(before, after, costs or self._candidates.costs)
        rules = tuple(rule for rule in after if rule not in before)
        return price_without(kind, label, rules, without=without, with_it=with_it)

    def _predictions(
        self, before: tuple[Rule, ...], after: tuple[Rule, ...], costs: CostTable
    ) -> tuple[Prediction, Prediction]:
        apply_rules = self._candidates.apply_rules
        return predict(apply_rules(before), costs), predict(apply_rules(after), costs)

    def why_not(self, layout: ParallelLayout, found: SearchResult) -> Rejection:
        seconds = min(candidate.seconds for candidate in self._candidates.of(layout))
        kind = TensorSharding if layout.tensor > 1 else BatchSharding
        reason = alone_takes(seconds, found.prediction.metrics.step_seconds.value)
        return rejected(kind, self._label(layout), reason)

    def _label(self, layout: ParallelLayout) -> str:
        """Return the layout's label; it mentions equal shares if unequal ones were evaluated
        too.
        """
        if layout.data == 1 or layout.shares or self._rank_speeds.is_homogeneous(layout.num_ranks):
            return layout_label(layout)
        return f"{layout_label(layout)}, in equal shares"

    def _why_not_sharded(self, offer: Offer, candidate: LayoutCandidate) -> Rejection:
        """Return why the tensors of this offer are not sharded, or are sharded in another way."""
        if not self._candidates.sharded_tensors(candidate.rules).isdisjoint(
            self._candidates.sharded_tensors(offer.rules)
        ):
            reason = "the plan shards the same weights differently"
            return rejected(TensorSharding, offer.label, reason)
        return self._why_not_added(TensorSharding, offer, candidate)

    def _why_not_sparse(
        self, offers: Sequence[Offer], candidate: LayoutCandidate
    ) -> Iterator[Rejection]:
        for offer in offers:
            if not set(offer.rules) <= set(candidate.rules):
                yield self._why_not_added(SparseRows, offer, candidate)

    def _why_not_added(
        self, kind: type[Rule], offer: Offer, candidate: LayoutCandidate
    ) -> Rejection:
        """Return why the layout does not use this offer as well."""
        seconds = self._candidates.counted((*candidate.rules, *offer.rules)).seconds
        reason = alone_takes(seconds, candidate.seconds, reference="without it, a step takes")
        return rejected(kind, offer.label, reason)

    def _why_no_slots(self, candidate: LayoutCandidate) -> Iterator[Rejection]:
        if candidate.layout == ALONE or bool(of_kind(candidate.rules, SharedMemoryMessages)):
            return
        links, tried = self._candidates.costs.links, None
        if rules := self._candidates.slot_rules(candidate.rules) if SLOTS in links else ():
            with_slots = self._candidates.counted((*candidate.rules, *rules))
            tried = StepCosts(with_slots.seconds, with_slots.nbytes)
        yield from without_shared_memory(
            _THROUGH_SLOTS,
            is_possible=SLOTS in links,
            tried=tried,
            chosen=StepCosts(candidate.seconds, candidate.nbytes),
        )
