"""On how many of the ranks the step lies, and how: one search for each way, the fastest of them.

Ranks share the batch, or tensors, or are groups that share the batch of ranks that share tensors.

What is recomputed, cut and moved is chosen for each way by itself, and what ranks exchange by how
the step then plays. Not for what one rank does under a layout: see search/single/search.py.
"""

import copy
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial

from steelyard.errors import Infeasible, Mismatch
from steelyard.ir.parallel_layout import ALONE, LAYOUT_TRADES, ParallelLayout
from steelyard.ir.program import Program
from steelyard.ir.rule import Rule
from steelyard.ir.step_source import StepSource
from steelyard.plans.budget import Budget
from steelyard.plans.trade import Offer, Rejection, Remaining, Trade
from steelyard.predict import rank_seconds, step_seconds
from steelyard.predict.cost_table import CostTable
from steelyard.predict.rank_subsets import numbers_of_ranks
from steelyard.search.ranks.batch_shares import Shares, near_equal_shares, unequal_shares, units_for
from steelyard.search.ranks.explain import LayoutExplanation
from steelyard.search.ranks.labels import layers, stages_refused, too_few, too_late
from steelyard.search.ranks.layout_candidates import (
    BUCKETS,
    LayoutCandidate,
    LayoutCandidates,
    at_once,
)
from steelyard.search.ranks.pipeline_search import PipelineSearch
from steelyard.search.ranks.rank_speeds import RankSpeeds
from steelyard.search.result import SearchResult
from steelyard.search.single.search import ALLOWS_NONE, StepSearch

_BATCH, _TENSOR, _STATES, _OVERLAP = "shard_batch", "shard_tensor", "shard_states", "overlap"
_PIPELINE, _ROWS, _SLOTS = "shard_pipeline", "sparse_gradients", "shared_memory_transfer"
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
# A share may take so much less than its part of the whole, as it stays in caches.
_SMALLER = 0.9


class LayoutSearch:
    """``searching`` makes the search for some rules of a layout; they are kept for all budgets."""

    def __init__(
        self,
        program: Program,
        *,
        trades: Sequence[Trade],
        source: StepSource,
        costs: CostTable,
        num_ranks: int,
        of_a_host: int = 1,
        searching: Callable[[tuple[Rule, ...]], StepSearch],
    ) -> None:
        """On some of the ranks: on one, or on all ``of_a_host``, and as many of others."""
        self._program = program
        self._searching = searching
        self._searches: dict[tuple[Rule, ...], StepSearch] = {}
        self._unlike = RankSpeeds(program, costs)
        self._regions: dict[int, tuple[Offer, ...]] = {1: ()}
        self.ways = LayoutCandidates(
            program, trades=trades, source=source, costs=costs, regions=self._regions
        )
        self.told = LayoutExplanation(self.ways, self._unlike)
        self._num_ranks = num_ranks
        named = {num_ranks, *costs.subsets, *([2] if num_ranks % 2 and of_a_host == 1 else [])}
        divisors = sorted({d for n in named for d in range(2, n + 1) if n % d == 0})
        # What some ranks of a host have of it is more than what all of them have.
        self._counts = [1, *(n for n in divisors if n % of_a_host == 0)]
        others = numbers_of_ranks(num_ranks, of_a_host=of_a_host)
        self._others = [n for n in reversed(others) if n not in self._counts]
        batches, refusals = self.ways.trade(_BATCH).offers(program, source)
        self._degrees = [1, *(o.rules[0].degree for o in batches)]
        degrees = [n for n in self._degrees if n == 1 or n in divisors]
        self.refusals = _never(refusals)
        for ranks in divisors:
            if self._are_alike(ranks, _TENSOR, f"parts on {ranks} ranks"):
                self._look_for_regions(ranks)
        self.pipelines = dict(self._look_for_stages(num_ranks, degrees))
        self.layouts = [
            ParallelLayout(batch=batch, tensor=tensor)
            for tensor in self._regions
            for batch in degrees
            if batch * tensor in self._counts
            and (tensor == 1 or self._unlike.is_alike(batch * tensor))
        ]
        if batches:
            self.layouts += self._unequal(self._counts[1:])
        else:
            self._others = []

    def over(self, costs: CostTable, source: StepSource) -> "LayoutSearch":
        """The same, with ways at the prices of other links."""
        other = copy.copy(self)
        other.ways = self.ways.over(costs, source)
        other.told = LayoutExplanation(other.ways, self._unlike)
        return other

    def _are_alike(self, ranks: int, trade: str, label: str) -> bool:
        """Whether as many ranks may do equal parts of what all wait for; else it is told."""
        if self._unlike.is_alike(ranks):
            return True
        reason = f"all would wait for the slowest: {self._unlike.said(ranks)}"
        self.refusals += (Rejection(trade=trade, label=label, reason=reason, left=Remaining.NEVER),)
        return False

    def _look_at_others(self) -> None:
        """Numbers of ranks that are no divisors, the largest first. Each is a capture, which is not
        made where computing alone would take longer than the fastest step that is known."""
        others, self._others = self._others, []
        if not others:
            return
        alone = step_seconds(self._program, self.ways.costs).value
        best = min(way.seconds for layout in self.layouts for way in self.ways.of(layout))
        for ranks in others:
            least = _SMALLER * alone / self._unlike.speed(ranks)
            if least >= best:
                self.refusals += (too_few(ranks, least / _SMALLER, best),)
                continue
            if ranks in self._degrees:
                self.layouts.append(ParallelLayout(batch=ranks))
            unequal = [*self._unequal([ranks])]
            self.layouts += unequal
            tried = [ParallelLayout(batch=ranks)] if ranks in self._degrees else unequal
            seconds = [way.seconds for layout in tried for way in self.ways.of(layout)]
            best = min([best, *seconds])

    def _unequal(self, counts: Iterable[int]) -> Iterator[ParallelLayout]:
        """The batch among ranks of unequal speed, in shares that they take as long for; and among
        equal ranks that have no equal shares of it, in shares that are nearly equal."""
        possible = self.ways.source.divisors()

        def of_batch(shares: Shares) -> Rule:
            return Rule(trade=_BATCH, degree=len(shares), bucket_bytes=BUCKETS[-1], shares=shares)

        def timed(shares: Shares) -> tuple[float, Sequence[float]]:
            program = self.ways.apply_rules((of_batch(shares),))
            seconds = step_seconds(program, self.ways.costs).value
            return seconds, rank_seconds(program, self.ways.costs)

        for ranks in counts:
            if ranks > possible[-1]:
                if ranks == self._num_ranks:
                    reason = f"the batch has {possible[-1]} examples"
                    self.refusals += self._never_shared(f"among {ranks} ranks", reason)
                continue
            is_alike = self._unlike.is_alike(ranks)
            if is_alike and ranks in self._degrees:
                continue
            units = units_for(ranks, possible)
            try:
                if is_alike:
                    shares = near_equal_shares(ranks, possible)
                    # Whether ranks would exchange in one order; the rest is counted when asked for.
                    self.ways.apply_rules((of_batch(shares),) if shares else ())
                else:
                    shares = unequal_shares(units, self._unlike.whole_seconds(ranks), timed)
            except Mismatch as odd:
                label = f"among {ranks} ranks, unequally"
                self.refusals += self._never_shared(label, odd.happened)
                continue
            if shares is not None:
                yield ParallelLayout(batch=ranks, shares=shares)

    def _look_for_regions(self, ranks: int) -> None:
        among = replace(self._program, layout=ParallelLayout(tensor=ranks))
        offers, refusals = self.ways.trade(_TENSOR).offers(among, self.ways.source)
        self.refusals = (*self.refusals, *_never(refusals))
        if offers:
            self._regions[ranks] = offers

    def _look_for_stages(
        self, num_ranks: int, degrees: Sequence[int]
    ) -> Iterator[tuple[ParallelLayout, PipelineSearch]]:
        """On so many ranks each, in each number of groups that share the batch."""
        if not any(trade.name == _PIPELINE for trade in self.ways.trades):
            return
        laid = [
            ParallelLayout(pipeline=stages, batch=batch, tensor=tensor)
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
            found = PipelineSearch(
                self._program,
                layout=layout,
                trades=self.ways.trades,
                source=self.ways.source,
                costs=self.ways.costs.on(ranks),
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
        ways = self.ways.of(ParallelLayout(tensor=ranks))
        fastest = min(ways, key=lambda way: (way.seconds, way.nbytes))
        leanest = min(ways, key=lambda way: (way.nbytes, way.seconds))
        chosen = fastest.rules, leanest.rules
        return tuple(tuple(rule for rule in rules if rule.trade == _TENSOR) for rules in chosen)

    def find(self, budget: Budget, *, barred: str = ALLOWS_NONE) -> SearchResult:
        """The plan that is fastest, on as many ranks as that takes; the fewest of those."""
        self._look_at_others()
        best: tuple[LayoutCandidate, SearchResult] | None = None
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
            others = (self.told.why_not(x, staged) for x in self.layouts if x != ALONE)
            said = (*self.refusals, *others, *staged.refused, *refused)
            weighed = sum(refusal.left is Remaining.WHOLE for refusal in said) + len(staged.taken)
            return replace(staged, refused=said, num_offers=weighed)
        if best is not None:
            told = self._told(*best)
            more = sum(refusal.left is Remaining.WHOLE for refusal in refused)
            return replace(
                told, refused=(*told.refused, *refused), num_offers=told.num_offers + more
            )
        raise min((e for e in (tightest, *too_tight) if e is not None), key=_least)

    def rivals(self, found: SearchResult, budget: Budget) -> Iterator[SearchResult]:
        """What is hardly slower with nothing else done: on other ranks, or with other sizes of what
        is sent at once, or otherwise sent. For a runner whose own prices are known of single plans
        only."""
        own = {rule for rule in found.rules if rule.trade in LAYOUT_TRADES}
        ways = [way for layout in self.layouts for way in self.ways.of(layout)]
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
        self, budget: Budget, best: SearchResult | None
    ) -> tuple[SearchResult | None, list[Rejection], list[Infeasible]]:
        """What is faster with the layers on ranks, and why not else."""
        found: SearchResult | None = None
        refused: list[Rejection] = []
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

    def search_by(self, rules: Sequence[Rule]) -> StepSearch | PipelineSearch:
        """The search of the step as these rules lay it."""
        if (laid := ParallelLayout.of(rules)) in self.pipelines:
            return self.pipelines[laid]
        return self._search_by(rules)

    def _search_by(self, rules: Sequence[Rule]) -> StepSearch:
        layout = tuple(sorted(rule for rule in rules if rule.trade in LAYOUT_TRADES))
        known = self._searches.get(layout)
        if known is None:
            known = self._searches[layout] = self._searching(layout)
        return known

    def _most_promising(self, budget: Budget) -> list[LayoutCandidate]:
        """What is fastest of itself first: where that fits, nothing slower is looked into."""
        found = [way for layout in self.layouts for way in self._worth_searching(layout, budget)]
        return sorted(found, key=lambda way: (way.seconds, way.layout.num_ranks))

    def _worth_searching(self, layout: ParallelLayout, budget: Budget) -> list[LayoutCandidate]:
        """The fastest, nothing else being done; where that takes too much, the fastest of those
        that do not, and the leanest."""
        ways = sorted(self.ways.of(layout), key=lambda way: (way.seconds, way.nbytes))
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

    def _told(self, way: LayoutCandidate, found: SearchResult) -> SearchResult:
        return self.told.of(way, found, layouts=self.layouts, refusals=self.refusals)

    def _never_shared(self, label: str, reason: str) -> tuple[Rejection, ...]:
        return (Rejection(trade=_BATCH, label=label, reason=reason, left=Remaining.NEVER),)


def _kind(rules: Iterable[Rule]) -> object:
    """What sets ways apart for whoever compares a few."""
    return (
        ParallelLayout.of(rules),
        at_once(rules),
        frozenset(rule.trade for rule in rules) - {_OVERLAP},
    )


def _never(refusals: Iterable[Rejection]) -> tuple[Rejection, ...]:
    """Of what could not be offered at all."""
    return tuple(replace(refusal, left=Remaining.NEVER) for refusal in refusals)


def _seconds(found: SearchResult) -> float:
    return found.prediction.metrics.step_seconds.value


def _least(infeasible: Infeasible) -> int:
    return infeasible.least_bytes or sys.maxsize  # where it is time that is too short
