"""On how many of the ranks the step lies, and how: one search for each way, the fastest of them.

Ranks share the batch, or tensors, or are groups that share the batch of ranks that share tensors.

What is recomputed, cut and moved is chosen for each way by itself, and what ranks exchange by how
the step then plays. Not for what one rank does under a layout: see search.py.
"""

import math
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial

from steelyard.core.amounts import format_bytes, format_seconds
from steelyard.core.budget import Budget
from steelyard.core.codec import CODE_TRADES
from steelyard.core.collective import SLOTS
from steelyard.core.costs import Costs
from steelyard.core.errors import Infeasible, Mismatch
from steelyard.core.graph import path_matches
from steelyard.core.layout import ALONE, LAYOUT_TRADES, Layout
from steelyard.core.plan import Taken
from steelyard.core.program import Program
from steelyard.core.quad import Quad
from steelyard.core.rules import Rule
from steelyard.core.source import Source
from steelyard.core.trade import Left, Offer, Refusal, Trade, strike_on_ranks
from steelyard.exchange.statistics import is_synchronised
from steelyard.predict import peak_bytes, predict, rank_seconds, step_seconds
from steelyard.search.found import Found
from steelyard.search.gathers import ahead, together
from steelyard.search.pipelines import Pipelines
from steelyard.search.search import ALLOWS_NONE, Search
from steelyard.search.shares import Shares, unequal_shares, units_for
from steelyard.search.unlike import Unlike
from steelyard.search.wording import called, layers, slower, stages_refused, tensors, too_late

_BATCH, _TENSOR, _STATES, _OVERLAP = "shard_batch", "shard_tensor", "shard_states", "overlap"
_PIPELINE, _ROWS, _SLOTS = "shard_pipeline", "sparse_gradients", "pinned_transfer"
# How much is sent at once: what hides best depends on the model's layers and on the link.
_BUCKETS = tuple(2**10 * kib for kib in (64, 1024, 4096, 25600, 102400))
_THROUGH_SLOTS = "exchanges through slots"
# A way that holds this much less is worth a search of its own where memory is short.
_LEANER = 0.98
# What takes this many times as long in one runner may be the faster in another.
_RIVAL = 1.2
# Stages are worth it where they take no more than this of a step without: each of their actions
# waits for another rank, and what that takes is known least (docs/log.md, 2026-11-24: 1.05 to 1.3
# times what was said, where other steps took 0.98 to 1.17 times that).
_WORTH = 0.9
# And weights in shares where they take no more than this of a step without: what a rank does itself
# to send them is in no prediction (2026-11-27: 0.15 % was to be won, and 5 % were lost).
_WORTH_OF_STATES = 0.95


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
        of_a_host: int = 1,
        searching: Callable[[tuple[Rule, ...]], Search],
    ) -> None:
        """On some of the ranks: on one, or on all ``of_a_host``, and as many of others."""
        self._program, self.source, self.costs = program, source, costs
        self.trades = tuple(trades)
        self._searching = searching
        self._searches: dict[tuple[Rule, ...], Search] = {}
        self._ways: dict[Layout, list[Way]] = {}
        # What some ranks of a host have of it is more than what all of them have.
        divisors = [n for n in range(2, num_ranks + 1) if num_ranks % n == 0]
        self._counts = [1, *(n for n in divisors if n % of_a_host == 0)]
        batches, refusals = self._trade(_BATCH).offers(program, source)
        degrees = [1, *(o.rules[0].degree for o in batches if num_ranks % o.rules[0].degree == 0)]
        self.refusals = _never(refusals) or self._uneven(num_ranks, degrees)
        self._regions: dict[int, tuple[Offer, ...]] = {1: ()}
        for ranks in divisors:
            if self._are_alike(ranks, _TENSOR, f"parts on {ranks} ranks"):
                self._look_for_regions(ranks)
        self.pipelines = dict(self._look_for_stages(num_ranks, degrees))
        self.layouts = [
            Layout(batch=batch, tensor=tensor)
            for tensor in self._regions
            for batch in degrees
            if batch * tensor in self._counts
            and (tensor == 1 or self._unlike.is_alike(batch * tensor))
        ]
        if batches:
            self.layouts += self._unequal()

    @cached_property
    def _unlike(self) -> Unlike:
        return Unlike(self._program, self.costs)

    def _are_alike(self, ranks: int, trade: str, label: str) -> bool:
        """Whether as many ranks may do equal parts of what all wait for; else it is told."""
        if self._unlike.is_alike(ranks):
            return True
        reason = f"all would wait for the slowest: {self._unlike.said(ranks)}"
        self.refusals += (Refusal(trade=trade, label=label, reason=reason, left=Left.NEVER),)
        return False

    def _unequal(self) -> Iterator[Layout]:
        """The batch among ranks of unequal speed, in shares that they take as long for."""
        possible = self.source.divisors()

        def timed(shares: Shares) -> tuple[float, Sequence[float]]:
            rule = Rule(trade=_BATCH, degree=len(shares), bucket_bytes=_BUCKETS[-1], shares=shares)
            program = self.strike((rule,))
            seconds = step_seconds(program, self.costs).value
            return seconds, rank_seconds(program, self.costs)

        for ranks in self._counts[1:]:
            if ranks <= possible[-1] and not self._unlike.is_alike(ranks):
                units = units_for(ranks, possible)
                try:
                    shares = unequal_shares(units, self._unlike.whole_seconds[:ranks], timed)
                except Mismatch as odd:
                    self.refusals += self._never_unequal(ranks, odd.happened)
                    continue
                if shares is not None:
                    yield Layout(batch=ranks, shares=shares)

    def _look_for_regions(self, ranks: int) -> None:
        among = replace(self._program, layout=Layout(tensor=ranks))
        offers, refusals = self._trade(_TENSOR).offers(among, self.source)
        self.refusals = (*self.refusals, *_never(refusals))
        if offers:
            self._regions[ranks] = offers

    def _look_for_stages(
        self, num_ranks: int, degrees: Sequence[int]
    ) -> Iterator[tuple[Layout, Pipelines]]:
        """On so many ranks each, in each number of groups that share the batch."""
        if not any(trade.name == _PIPELINE for trade in self.trades):
            return
        laid = [
            Layout(pipeline=stages, batch=batch, tensor=tensor)
            for tensor in self._regions
            for batch in degrees
            for stages in range(2, num_ranks + 1)
        ]
        for layout in laid:
            ranks = layout.num_ranks
            if ranks not in self._counts:
                continue
            if not self._are_alike(ranks, _PIPELINE, layers(layout)):
                continue
            found = Pipelines(
                self._program,
                layout=layout,
                trades=self.trades,
                source=self.source,
                costs=self.costs,
                searching=self._search_by,
                cuts=partial(self._most_cut, layout.tensor),
            )
            self.refusals = (*self.refusals, *found.refusals)
            if found.offers:
                yield layout, found

    def _most_cut(self, ranks: int) -> tuple[tuple[Rule, ...], ...]:
        """Tensors as they are cut where that is fastest, nothing else being done, or leanest."""
        if ranks == 1:
            return ((),)
        ways = self.ways(Layout(tensor=ranks))
        fastest = min(ways, key=lambda way: (way.seconds, way.nbytes))
        leanest = min(ways, key=lambda way: (way.nbytes, way.seconds))
        chosen = fastest.rules, leanest.rules
        return tuple(tuple(rule for rule in rules if rule.trade == _TENSOR) for rules in chosen)

    def find(self, budget: Budget, *, barred: str = ALLOWS_NONE) -> Found:
        """The plan that is fastest, on as many ranks as that takes; the fewest of those."""
        best: tuple[Way, Found] | None = None
        tightest: Infeasible | None = None
        for way in self._most_promising(budget):
            if best is not None and way.seconds >= _seconds(best[1]):
                continue
            try:
                found = self._search_by(way.rules).find(budget, barred=barred)
            except Infeasible as infeasible:
                if tightest is None or _least(infeasible) < _least(tightest):
                    tightest = infeasible
                continue
            if best is None or _seconds(found) < _seconds(best[1]):
                best = way, found
        staged, refused, too_tight = self._in_stages(budget, None if best is None else best[1])
        if staged is not None:
            others = (self._why_not(x, staged) for x in self.layouts if x != ALONE)
            said = (*self.refusals, *others, *staged.refused, *refused)
            weighed = sum(refusal.left is Left.WHOLE for refusal in said) + len(staged.taken)
            return replace(staged, refused=said, num_offers=weighed)
        if best is not None:
            told = self._told(*best)
            more = sum(refusal.left is Left.WHOLE for refusal in refused)
            return replace(
                told, refused=(*told.refused, *refused), num_offers=told.num_offers + more
            )
        raise min((e for e in (tightest, *too_tight) if e is not None), key=_least)

    def rivals(self, found: Found, budget: Budget) -> Iterator[Found]:
        """What is hardly slower with nothing else done: on other ranks, or with other sizes of what
        is sent at once, or otherwise sent. For a runner whose own prices are known of single plans
        only."""
        own = {rule for rule in found.rules if rule.trade in LAYOUT_TRADES}
        ways = [way for layout in self.layouts for way in self.ways(layout)]
        known = {_kind(own)}
        for way in sorted(ways, key=lambda way: (way.seconds, way.nbytes)):
            if way.seconds > _RIVAL * _seconds(found) or _kind(way.rules) in known:
                continue
            known.add(_kind(way.rules))
            try:
                yield self._told(way, self._search_by(way.rules).find(budget))
            except Infeasible:
                continue  # it was one to compare with

    def _in_stages(
        self, budget: Budget, best: Found | None
    ) -> tuple[Found | None, list[Refusal], list[Infeasible]]:
        """What is faster with the layers on ranks, and why not else."""
        found: Found | None = None
        refused: list[Refusal] = []
        tight: list[Infeasible] = []
        for layout, pipelines in self.pipelines.items():
            fastest = found or best
            enough = math.inf
            if fastest is not None:
                enough = _seconds(fastest) * (1 if fastest is found else _WORTH)
            if fastest is not None and pipelines.least_seconds >= enough:
                refused.append(too_late(layout, pipelines.least_seconds, fastest))
                continue
            if not pipelines.ways:
                refused += pipelines.refusals
                continue
            try:
                staged = pipelines.find(budget, within_seconds=enough)
            except Infeasible as infeasible:
                tight.append(infeasible)
                refused.append(stages_refused(layout, infeasible.happened))
                continue
            if staged is not None:
                found = staged
            elif fastest is not None:
                refused.append(too_late(layout, pipelines.ways[0].seconds, fastest))
        return found, refused, tight

    def search_by(self, rules: Sequence[Rule]) -> Search | Pipelines:
        """The search of the step as these rules lay it."""
        if (laid := Layout.of(rules)) in self.pipelines:
            return self.pipelines[laid]
        return self._search_by(rules)

    def _search_by(self, rules: Sequence[Rule]) -> Search:
        layout = tuple(sorted(rule for rule in rules if rule.trade in LAYOUT_TRADES))
        known = self._searches.get(layout)
        if known is None:
            known = self._searches[layout] = self._searching(layout)
        return known

    def _most_promising(self, budget: Budget) -> list["Way"]:
        """What is fastest of itself first: where that fits, nothing slower is looked into."""
        found = [way for layout in self.layouts for way in self._worth_searching(layout, budget)]
        return sorted(found, key=lambda way: (way.seconds, way.layout.num_ranks))

    def _worth_searching(self, layout: Layout, budget: Budget) -> list["Way"]:
        """The fastest, nothing else being done; where that takes too much, the fastest of those
        that do not, and the leanest."""
        ways = sorted(self.ways(layout), key=lambda way: (way.seconds, way.nbytes))
        fastest, limit = ways[0], budget.memory_bytes or math.inf
        whole = next(way for way in ways if all(rule.trade != _STATES for rule in way.rules))
        if fastest.seconds > _WORTH_OF_STATES * whole.seconds and whole.nbytes <= limit:
            return [whole]
        if fastest.nbytes <= limit:
            return [fastest]
        fitting = [way for way in ways if way.nbytes <= limit]
        leanest = min(ways, key=lambda way: (way.nbytes, way.seconds))
        lean = [leanest] if leanest.nbytes <= _LEANER * fastest.nbytes else []
        return [*dict.fromkeys((fastest, *fitting[:1], *lean))]

    def ways(self, layout: Layout) -> list["Way"]:
        """With each bucket, each time to wait for one, and more and more of the tensors cut; with
        weights in shares too, where several have the same, and with rows of gradients in place of
        tables, where there are fewer; all of it through a link, or through memory that ranks
        share."""
        if layout not in self._ways:
            ways = [self.counted(rules) for rules in self._rules(layout)]
            ways += [*self._with_states(ways), *self._with_rows(ways)]
            ways += self._through_slots(ways)
            self._ways[layout] = ways
        return self._ways[layout]

    def _through_slots(self, ways: Sequence["Way"]) -> Iterator["Way"]:
        """The fastest with each size of what is sent at once, and the leanest, where there are
        slots."""
        if SLOTS not in self.costs.links or ways[0].layout == ALONE:
            return
        by_size: dict[int, Way] = {}
        for way in sorted(ways, key=lambda way: (way.seconds, way.nbytes)):
            by_size.setdefault(_at_once(way.rules), way)
        leanest = min(ways, key=lambda way: (way.nbytes, way.seconds))
        for way in dict.fromkeys((*by_size.values(), leanest)):
            yield self.counted((*way.rules, *self._slots_of(way.rules)))

    def _slots_of(self, rules: tuple[Rule, ...]) -> tuple[Rule, ...]:
        offers, _ = self._trade(_SLOTS).offers(self.strike(rules), self.source)
        return tuple(rule for offer in offers for rule in offer.rules)

    def _with_states(self, ways: Sequence["Way"]) -> Iterator["Way"]:
        """Added to the fastest and to the leanest."""
        if ways[0].layout.batch == 1:
            return
        fastest = min(ways, key=lambda way: (way.seconds, way.nbytes))
        leanest = min(ways, key=lambda way: (way.nbytes, way.seconds))
        for way in dict.fromkeys((fastest, leanest)):
            program = self.strike(way.rules)
            offers, _ = self._trade(_STATES).offers(program, self.source)
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

    def _with_rows(self, ways: Sequence["Way"]) -> Iterator["Way"]:
        """Of all tables that it is offered for."""
        offers, _ = self._rows_of(ways[0])
        rules = tuple(rule for offer in offers for rule in offer.rules)
        yield from (self.counted((*way.rules, *rules)) for way in ways if rules)

    def _rows_of(self, way: "Way") -> tuple[tuple[Offer, ...], tuple[Refusal, ...]]:
        """Of a step that lies so, and whose gradients go as a whole."""
        whole = tuple(rule for rule in way.rules if rule.trade not in (_ROWS, *CODE_TRADES))
        if way.layout != Layout(batch=way.layout.batch) or way.layout == ALONE:
            return (), ()
        return self._trade(_ROWS).offers(self.strike(whole), self.source)

    def _rules(self, layout: Layout) -> Iterator[tuple[Rule, ...]]:
        if layout.tensor == 1:
            yield from self._shared(layout) if layout.batch > 1 else [()]
            return
        # How gradients are sent is chosen as if each group were one rank.
        shared: tuple[Rule, ...] = ()
        if layout.batch > 1:
            ways = self.ways(replace(layout, tensor=1))
            # Which weights have shares is another question once they are cut, and asked then.
            of_whole = {_ROWS, _STATES}
            whole = [way for way in ways if of_whole.isdisjoint(rule.trade for rule in way.rules)]
            shared = self._fastest_of_groups(whole, layout.tensor).rules
        for cut in self._cuts(layout.tensor):
            if shared:
                yield *shared, *cut
                continue
            offers, _ = self._trade(_OVERLAP).offers(self.strike(cut), self.source)
            for offer in offers[:: max(len(offers) - 1, 1)]:
                yield *offer.rules, *cut

    def _fastest_of_groups(self, ways: Sequence["Way"], group: int) -> "Way":
        """Of ways to share the batch, where ``group`` ranks stand for each of theirs."""
        costs = self._costs_of_groups(group)
        if costs is self.costs:
            return min(ways, key=lambda way: (way.seconds, way.nbytes))
        seconds = {way: step_seconds(self.strike(way.rules), costs).value for way in ways}
        return min(ways, key=lambda way: (seconds[way], way.nbytes))

    def _costs_of_groups(self, group: int) -> Costs:
        """Of hosts that have several ranks, other links join groups than join as many ranks."""
        spread = self.costs.spread
        if spread is None or group == 1:
            return self.costs
        return replace(self.costs, spread=replace(spread, group=group))

    def _cuts(self, ranks: int) -> Iterator[tuple[Rule, ...]]:
        """The first offers, best first, and one more each time; no tensor is cut twice."""
        rules: tuple[Rule, ...] = ()
        for offer in self._regions[ranks]:
            if self._cut_by(rules).isdisjoint(self._cut_by(offer.rules)):
                rules = *rules, *offer.rules
                yield rules

    def _cut_by(self, rules: Iterable[Rule]) -> frozenset[str]:
        """The tensors of the model that these rules cut."""
        patterns = [rule.module for rule in rules if rule.trade == _TENSOR]
        names = (node.name.partition(":")[2] for node in self._program.graph.inputs())
        return frozenset(n for n in names if any(path_matches(n, p) for p in patterns))

    def _shared(self, layout: Layout) -> Iterator[tuple[Rule, ...]]:
        for nbytes in _BUCKETS:
            batch = Rule(
                trade=_BATCH, degree=layout.batch, bucket_bytes=nbytes, shares=layout.shares
            )
            offers, _ = self._trade(_OVERLAP).offers(self.strike((batch,)), self.source)
            # Of what is said to take and hold the same, that which waits for least comes first.
            for offer in reversed(offers):
                yield *offer.rules, batch

    def counted(self, rules: tuple[Rule, ...]) -> "Way":
        program = self.strike(rules)
        return Way(
            rules=rules,
            layout=program.layout,
            seconds=step_seconds(program, self.costs).value,
            nbytes=peak_bytes(program, self.costs),
        )

    def _told(self, way: "Way", found: Found) -> Found:
        """With what was decided here among what was taken and refused."""
        others = [x for x in self.layouts if x not in (ALONE, way.layout)]
        whole = [o for o in self._regions[way.layout.tensor] if not set(o.rules) <= set(way.rules)]
        refused = [*self.refusals, *(self._why_not(layout, found) for layout in others)]
        refused += [self._why_whole(offer, found, way) for offer in whole]
        rows, never = self._rows_of(way)
        refused += [*never, *self._why_not_rows(rows, found, way), *self._why_no_slots(way)]
        offers = len(self.layouts) - (ALONE in self.layouts) + len(whole) + len(rows)
        offers += way.layout != ALONE and SLOTS in self.costs.links
        offers += any(rule.trade == _STATES for rule in way.rules)
        return replace(
            found,
            taken=(*self.taken(way), *found.taken),
            refused=(*refused, *found.refused),
            num_offers=found.num_offers + offers,
        )

    def _never_unequal(self, ranks: int, reason: str) -> tuple[Refusal, ...]:
        label = f"among {ranks} ranks, unequally"
        return (Refusal(trade=_BATCH, label=label, reason=reason, left=Left.NEVER),)

    def _uneven(self, num_ranks: int, degrees: Sequence[int]) -> tuple[Refusal, ...]:
        """Of all the ranks there are, where the batch has no equal shares for them."""
        if num_ranks in degrees:
            return ()
        reason = f"the batch does not divide into {num_ranks} equal shares"
        label = f"among {num_ranks} ranks"
        return (Refusal(trade=_BATCH, label=label, reason=reason, left=Left.NEVER),)

    def taken(self, way: "Way") -> Iterator[Taken]:
        """Each way of sharing beside the step without it, nothing else being done to either."""
        of_batch = tuple(r for r in way.rules if r.trade == _BATCH)
        of_tensors = tuple(r for r in way.rules if r.trade == _TENSOR)
        of_states = tuple(r for r in way.rules if r.trade == _STATES)
        lag = max((r.lag for r in way.rules if r.trade == _OVERLAP), default=1)
        waiting = tuple(r for r in way.rules if r.trade == _OVERLAP)
        if of_batch:
            sent = f"{format_bytes(of_batch[0].bucket_bytes)} at a time"
            among = self._labelled(way.layout)
            if way.layout.shares:
                among += f" ({self._unlike.said(way.layout.batch)})"
            label = f"{among}, gradients {sent}, {lag} under way"
            if is_synchronised(self.strike(of_batch).graph):
                label += ", BatchNorm's statistics of all samples"
            costs = self._costs_of_groups(way.layout.tensor)
            yield self._gained(_BATCH, label, (), (*waiting, *of_batch), costs)
        before = (*waiting, *of_batch) if of_batch else ()
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

    def _slots_taken(self, way: "Way", slots: tuple[Rule, ...]) -> Taken:
        """Beside the same through the link: of a rank's own work, too, exchanges take less."""
        without = self.counted(tuple(rule for rule in way.rules if rule not in slots))
        return Taken(
            trade=_SLOTS,
            label=_THROUGH_SLOTS,
            rules=slots,
            buys_bytes=without.nbytes - way.nbytes,
            buys_seconds=max(0.0, without.seconds - way.seconds),
            pays_seconds=max(0.0, way.seconds - without.seconds),
        )

    def sent_otherwise(
        self, label: str, before: tuple[Rule, ...], rules: tuple[Rule, ...]
    ) -> Taken:
        """What it buys of communication and pays in computing, added to what was struck before."""
        struck = self.strike(before), self.strike((*before, *rules))
        without, with_it = (predict(program, self.costs).quad for program in struck)
        return Taken(
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
        costs: Costs | None = None,
    ) -> Taken:
        """``costs`` are of the batch among groups, where that is another price."""
        programs = self.strike(before), self.strike(after)
        without, with_it = (predict(program, costs or self.costs).quad for program in programs)
        quicker = without.computation_seconds.value - with_it.computation_seconds.value
        return Taken(
            trade=trade,
            label=label,
            rules=tuple(rule for rule in after if rule not in before),
            buys_bytes=round(without.memory_bytes.value - with_it.memory_bytes.value),
            buys_seconds=max(quicker, 0.0),
            pays_seconds=_exposed(with_it) - _exposed(without) + max(-quicker, 0.0),
        )

    def _why_not(self, layout: Layout, found: Found) -> Refusal:
        seconds = min(way.seconds for way in self.ways(layout))
        return Refusal(
            trade=_TENSOR if layout.tensor > 1 else _BATCH,
            label=self._labelled(layout),
            reason=slower(seconds, found) or "with it no faster plan fits the budget",
        )

    def _labelled(self, layout: Layout) -> str:
        """Equal shares are said to be, where others are weighed too."""
        if layout.batch == 1 or layout.shares or self._unlike.is_alike(layout.num_ranks):
            return called(layout)
        return f"{called(layout)}, in equal shares"

    def _why_whole(self, offer: Offer, found: Found, way: "Way") -> Refusal:
        """Of tensors that could be cut too, or otherwise, where others are."""
        if not self._cut_by(way.rules).isdisjoint(self._cut_by(offer.rules)):
            reason = "the same weights are cut otherwise"
        else:
            seconds = self.counted((*way.rules, *offer.rules)).seconds
            reason = slower(seconds, found, than=way.seconds) or "no faster plan was found with it"
        return Refusal(trade=_TENSOR, label=offer.label, reason=reason)

    def _why_not_rows(self, offers: Sequence[Offer], found: Found, way: "Way") -> Iterator[Refusal]:
        for offer in offers:
            if not set(offer.rules) <= set(way.rules):
                seconds = self.counted((*way.rules, *offer.rules)).seconds
                reason = slower(seconds, found, than=way.seconds) or "no faster plan has it"
                yield Refusal(trade=_ROWS, label=offer.label, reason=reason)

    def _why_no_slots(self, way: "Way") -> Iterator[Refusal]:
        if way.layout == ALONE or any(rule.trade == _SLOTS for rule in way.rules):
            return
        if SLOTS not in self.costs.links:
            reason = "these ranks are not known to share memory, or to reach one another's by RDMA"
            yield Refusal(trade=_SLOTS, label=_THROUGH_SLOTS, reason=reason, left=Left.NEVER)
        elif rules := self._slots_of(way.rules):
            tried = self.counted((*way.rules, *rules))
            said = f"{format_seconds(tried.seconds)} a step and {format_bytes(tried.nbytes)}"
            beside = f"{format_seconds(way.seconds)} and {format_bytes(way.nbytes)}"
            reason = f"would take ~{said}, without them ~{beside}"
            yield Refusal(trade=_SLOTS, label=_THROUGH_SLOTS, reason=reason)

    def _trade(self, name: str) -> Trade:
        return next(trade for trade in self.trades if trade.name == name)

    def strike(self, rules: Sequence[Rule]) -> Program:
        return strike_on_ranks(self._program, rules, trades=self.trades, source=self.source)


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """How the step may lie, and what it takes so, nothing else being done."""

    rules: tuple[Rule, ...]
    layout: Layout
    seconds: float
    nbytes: int


def _kind(rules: Iterable[Rule]) -> object:
    """What sets ways apart for whoever compares a few."""
    return Layout.of(rules), _at_once(rules), frozenset(rule.trade for rule in rules) - {_OVERLAP}


def _at_once(rules: Iterable[Rule]) -> int:
    return max((rule.bucket_bytes for rule in rules if rule.trade == _BATCH), default=0)


def _never(refusals: Iterable[Refusal]) -> tuple[Refusal, ...]:
    """Of what could not be offered at all."""
    return tuple(replace(refusal, left=Left.NEVER) for refusal in refusals)


def _seconds(found: Found) -> float:
    return found.prediction.quad.step_seconds.value


def _least(infeasible: Infeasible) -> int:
    return infeasible.least_bytes or sys.maxsize  # where it is time that is too short


def _exposed(quad: Quad) -> float:
    return quad.exposed_communication_seconds.value
