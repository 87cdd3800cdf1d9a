"""What is told of a step that lies on ranks: what each way of sharing pays and buys, and why not
the others.

Not for what they are called: see labels.py; nor for deciding: see layout_search.py.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from steelyard.ir.collective import SLOTS
from steelyard.ir.metrics import Metrics
from steelyard.ir.parallel_layout import ALONE, ParallelLayout
from steelyard.ir.rule import Rule
from steelyard.passes.data_parallel.sync_batchnorm import is_synchronised
from steelyard.plans.plan import SelectedTrade
from steelyard.plans.trade import Offer, Rejection, Remaining
from steelyard.predict import predict
from steelyard.predict.cost_table import CostTable
from steelyard.search.ranks.labels import called, slower, tensors
from steelyard.search.ranks.layout_candidates import LayoutCandidate, LayoutCandidates
from steelyard.search.ranks.rank_speeds import RankSpeeds
from steelyard.search.result import SearchResult
from steelyard.units import format_bytes, format_seconds

_BATCH, _TENSOR, _STATES, _OVERLAP = "shard_batch", "shard_tensor", "shard_states", "overlap"
_ROWS, _SLOTS = "sparse_gradients", "shared_memory_transfer"
_THROUGH_SLOTS = "exchanges through slots"
_MOST_SPELLED = 8


class LayoutExplanation:
    """Beside the same step without, at what ``ways`` count."""

    def __init__(self, ways: LayoutCandidates, unlike: RankSpeeds) -> None:
        self._ways, self._unlike = ways, unlike

    def of(
        self,
        way: LayoutCandidate,
        found: SearchResult,
        *,
        layouts: Sequence[ParallelLayout],
        refusals: Sequence[Rejection],
    ) -> SearchResult:
        """With what was decided of the layout among what was taken and refused."""
        others = [x for x in layouts if x not in (ALONE, way.layout)]
        whole = [
            o for o in self._ways.regions[way.layout.tensor] if not set(o.rules) <= set(way.rules)
        ]
        refused = [*refusals, *(self.why_not(layout, found) for layout in others)]
        refused += [self._why_whole(offer, found, way) for offer in whole]
        rows, never = self._ways.rows_of(way)
        refused += [*never, *self._why_not_rows(rows, found, way), *self._why_no_slots(way)]
        offers = len(layouts) - (ALONE in layouts) + len(whole) + len(rows)
        offers += way.layout != ALONE and SLOTS in self._ways.costs.links
        offers += any(rule.trade == _STATES for rule in way.rules)
        return replace(
            found,
            taken=(*self.taken(way), *found.taken),
            refused=(*refused, *found.refused),
            num_offers=found.num_offers + offers,
        )

    def taken(self, way: LayoutCandidate) -> Iterator[SelectedTrade]:
        """Each way of sharing beside the step without it, nothing else being done to either."""
        of_batch = tuple(r for r in way.rules if r.trade == _BATCH)
        of_tensors = tuple(r for r in way.rules if r.trade == _TENSOR)
        of_states = tuple(r for r in way.rules if r.trade == _STATES)
        lag = max((r.lag for r in way.rules if r.trade == _OVERLAP), default=1)
        saved_for_backward = tuple(r for r in way.rules if r.trade == _OVERLAP)
        if of_batch:
            sent = f"{format_bytes(of_batch[0].bucket_bytes)} at a time"
            among = self._labelled(way.layout)
            if subset := self._ways.costs.subsets.get(way.layout.num_ranks):
                more = ", ..." if len(subset.ranks) > _MOST_SPELLED else ""
                among += f" ({', '.join(map(str, subset.ranks[:_MOST_SPELLED]))}{more})"
            if way.layout.shares:
                among += f" ({self._unlike.said(way.layout.batch)})"
            label = f"{among}, gradients {sent}, {lag} under way"
            if is_synchronised(self._ways.apply_rules(of_batch).graph):
                label += ", BatchNorm's statistics of all samples"
            costs = self._ways.costs_of_groups(way.layout.tensor)
            yield self._gained(_BATCH, label, (), (*saved_for_backward, *of_batch), costs)
        before = (*saved_for_backward, *of_batch) if of_batch else ()
        if of_tensors:
            label = f"{tensors(of_tensors)} in parts on {way.layout.tensor} ranks"
            yield self._gained(_TENSOR, label, before, (*before, *of_tensors))
            before = (*before, *of_tensors)
        if of_states:
            twice = ", gathered twice" if of_states[0].times > 1 else ""
            if size := of_states[0].bucket_bytes:
                twice += f", {format_bytes(size)} at a time"
            label = f"{tensors(of_states)} in shares on {way.layout.batch} ranks{twice}"
            yield self._gained(_STATES, label, before, (*before, *of_states))
        if of_rows := tuple(r for r in way.rules if r.trade == _ROWS):
            label = f"rows of {tensors(of_rows)}, {way.layout.batch} ranks'"
            yield self.sent_otherwise(label, before, of_rows)
        if of_slots := tuple(r for r in way.rules if r.trade == _SLOTS):
            yield self._slots_taken(way, of_slots)

    def _slots_taken(self, way: LayoutCandidate, slots: tuple[Rule, ...]) -> SelectedTrade:
        """Beside the same through the link: of a rank's own work, too, exchanges take less."""
        without = self._ways.counted(tuple(rule for rule in way.rules if rule not in slots))
        return SelectedTrade(
            trade=_SLOTS,
            label=_THROUGH_SLOTS,
            rules=slots,
            buys_bytes=without.nbytes - way.nbytes,
            buys_seconds=max(0.0, without.seconds - way.seconds),
            pays_seconds=max(0.0, way.seconds - without.seconds),
        )

    def sent_otherwise(
        self, label: str, before: tuple[Rule, ...], rules: tuple[Rule, ...]
    ) -> SelectedTrade:
        """What it buys of communication and pays in computing, added to what was applied before."""
        applied = self._ways.apply_rules(before), self._ways.apply_rules((*before, *rules))
        without, with_it = (predict(program, self._ways.costs).metrics for program in applied)
        return SelectedTrade(
            trade=rules[0].trade,
            label=label,
            rules=rules,
            buys_bytes=round(without.memory_bytes.value - with_it.memory_bytes.value),
            buys_seconds=_exposed(without) - _exposed(with_it),
            pays_seconds=with_it.computation_seconds.value - without.computation_seconds.value,
        )

    def _gained(
        self,
        trade: str,
        label: str,
        before: tuple[Rule, ...],
        after: tuple[Rule, ...],
        costs: CostTable | None = None,
    ) -> SelectedTrade:
        """``costs`` are of the batch among groups, where that is another price."""
        programs = self._ways.apply_rules(before), self._ways.apply_rules(after)
        without, with_it = (
            predict(program, costs or self._ways.costs).metrics for program in programs
        )
        quicker = without.computation_seconds.value - with_it.computation_seconds.value
        return SelectedTrade(
            trade=trade,
            label=label,
            rules=tuple(rule for rule in after if rule not in before),
            buys_bytes=round(without.memory_bytes.value - with_it.memory_bytes.value),
            buys_seconds=max(quicker, 0.0),
            pays_seconds=_exposed(with_it) - _exposed(without) + max(-quicker, 0.0),
        )

    def why_not(self, layout: ParallelLayout, found: SearchResult) -> Rejection:
        seconds = min(way.seconds for way in self._ways.of(layout))
        return Rejection(
            trade=_TENSOR if layout.tensor > 1 else _BATCH,
            label=self._labelled(layout),
            reason=slower(seconds, found) or "with it no faster plan fits the budget",
        )

    def _labelled(self, layout: ParallelLayout) -> str:
        """Equal shares are said to be, where others are weighed too."""
        if layout.batch == 1 or layout.shares or self._unlike.is_alike(layout.num_ranks):
            return called(layout)
        return f"{called(layout)}, in equal shares"

    def _why_whole(self, offer: Offer, found: SearchResult, way: LayoutCandidate) -> Rejection:
        """Of tensors that could be cut too, or otherwise, where others are."""
        if not self._ways.cut_by(way.rules).isdisjoint(self._ways.cut_by(offer.rules)):
            reason = "the same weights are cut otherwise"
        else:
            seconds = self._ways.counted((*way.rules, *offer.rules)).seconds
            reason = slower(seconds, found, than=way.seconds) or "no faster plan was found with it"
        return Rejection(trade=_TENSOR, label=offer.label, reason=reason)

    def _why_not_rows(
        self, offers: Sequence[Offer], found: SearchResult, way: LayoutCandidate
    ) -> Iterator[Rejection]:
        for offer in offers:
            if not set(offer.rules) <= set(way.rules):
                seconds = self._ways.counted((*way.rules, *offer.rules)).seconds
                reason = slower(seconds, found, than=way.seconds) or "no faster plan has it"
                yield Rejection(trade=_ROWS, label=offer.label, reason=reason)

    def _why_no_slots(self, way: LayoutCandidate) -> Iterator[Rejection]:
        if way.layout == ALONE or any(rule.trade == _SLOTS for rule in way.rules):
            return
        if SLOTS not in self._ways.costs.links:
            reason = "these ranks are not known to share memory, or to reach one another's by RDMA"
            yield Rejection(trade=_SLOTS, label=_THROUGH_SLOTS, reason=reason, left=Remaining.NEVER)
        elif rules := self._ways.slots_of(way.rules):
            tried = self._ways.counted((*way.rules, *rules))
            said = f"{format_seconds(tried.seconds)} a step and {format_bytes(tried.nbytes)}"
            beside = f"{format_seconds(way.seconds)} and {format_bytes(way.nbytes)}"
            reason = f"would take ~{said}, without them ~{beside}"
            yield Rejection(trade=_SLOTS, label=_THROUGH_SLOTS, reason=reason)


def _exposed(metrics: Metrics) -> float:
    return metrics.exposed_communication_seconds.value
