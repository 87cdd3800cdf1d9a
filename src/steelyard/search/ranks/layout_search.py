"""Searches the number of ranks and the parallel layout of a step; each candidate has its own
search.

A layout is data-parallel, tensor-parallel, data-parallel over tensor-parallel groups, or a
pipeline. Recompute, micro-batches and offload are chosen for each candidate separately;
communication is chosen by its effect on the timeline. Not for the program of one rank in a layout:
see search/single/search.py.
"""

import copy
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial

from steelyard.errors import Infeasible, Mismatch
from steelyard.ir.parallel_layout import ALONE, ParallelLayout
from steelyard.ir.program import Program
from steelyard.ir.rule import BETWEEN_RANKS, Rule, of_kind
from steelyard.ir.rule_kinds import (
    BatchSharding,
    CollectiveOverlap,
    PipelineStageEnd,
    StateSharding,
    TensorSharding,
)
from steelyard.ir.step_source import StepSource
from steelyard.plans.budget import Budget
from steelyard.plans.trade import Offer, Rejection, Remaining, Trade, trade_of
from steelyard.predict import rank_seconds, step_seconds
from steelyard.predict.cost_table import CostTable
from steelyard.predict.rank_subsets import numbers_of_ranks
from steelyard.search.enumerate_layouts import degrees_on
from steelyard.search.layout_rules import batch_rules
from steelyard.search.ranks.batch_shares import Shares, near_equal_shares, unequal_shares, units_for
from steelyard.search.ranks.explain import LayoutExplanation
from steelyard.search.ranks.labels import (
    layers_label,
    pipeline_too_slow,
    rank_count_too_slow,
)
from steelyard.search.ranks.layout_candidates import (
    BUCKETS,
    LayoutCandidate,
    LayoutCandidates,
    bucket_bytes_of,
)
from steelyard.search.ranks.pipeline_search import PipelineSearch
from steelyard.search.ranks.rank_speeds import RankSpeeds
from steelyard.search.rejection import impossible, rejected
from steelyard.search.result import SearchResult
from steelyard.search.single.search import ALLOWS_NONE, StepSearch

# If memory is short, a candidate is also searched if its peak is below this share of the fastest
# candidate's peak.
_LEANER_RATIO = 0.98
# A candidate up to this many times slower in one runner may be the faster one in another.
_MAX_RIVAL_RATIO = 1.2
# A pipeline is used if its step takes at most this share of the step without one. Each of its
# actions waits for another rank, and these waits are predicted least accurately (docs/log.md,
# 2026-11-24: pipelines took 1.05 to 1.3 times the prediction, other steps 0.98 to 1.17 times).
_MAX_PIPELINE_RATIO = 0.9
# ZeRO-style sharded weights are used if the step takes at most this share of the step without them.
# The work that a rank itself does to send them is not predicted (2026-11-27: predicted 0.15 %
# faster, measured 5 % slower).
_MAX_STATES_RATIO = 0.95
# A share of the batch may take less time than its proportion by this much, because its data stays
# in caches.
_CACHE_SPEEDUP = 0.9


class LayoutSearch:
    """The search over all layouts of a step on up to ``num_ranks`` ranks.

    ``searching`` creates the single-program search for the rules of a layout. These searches are
    cached for all budgets.
    """

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
        """Consider a single rank, or all ``of_a_host`` ranks on each of some hosts."""
        self._program = program
        self._make_search = searching
        self._searches: dict[tuple[Rule, ...], StepSearch] = {}
        self._rank_speeds = RankSpeeds(program, costs)
        self._regions: dict[int, tuple[Offer, ...]] = {1: ()}
        self.candidates = LayoutCandidates(
            program, trades=trades, source=source, costs=costs, regions=self._regions
        )
        self.explanation = LayoutExplanation(self.candidates, self._rank_speeds)
        self._num_ranks = num_ranks
        base_counts = {
            num_ranks,
            *costs.subsets,
            *([2] if num_ranks % 2 and of_a_host == 1 else []),
        }
        divisors = sorted({d for n in base_counts for d in range(2, n + 1) if n % d == 0})
        # A step never uses only some ranks of a host. Each of them would get more of the host than
        # in the measurements, which were made with all ranks running.
        self._rank_counts = [1, *(n for n in divisors if n % of_a_host == 0)]
        other_counts = numbers_of_ranks(num_ranks, of_a_host=of_a_host)
        self._other_rank_counts = [n for n in reversed(other_counts) if n not in self._rank_counts]
        batches, refusals = self.candidates.offers(BatchSharding, program)
        self._batch_degrees = [
            1,
            *(r.ranks for o in batches for r in of_kind(o.rules, BatchSharding)),
        ]
        degrees = [n for n in self._batch_degrees if n == 1 or n in divisors]
        self.refusals = _as_impossible(refusals)
        for ranks in divisors:
            if self._check_homogeneous(ranks, TensorSharding, f"sharded over {ranks} ranks"):
                self._find_regions(ranks)
        self.pipelines = dict(self._find_pipelines(num_ranks, degrees))
        self.layouts = [
            layout
            for layout in degrees_on(self._rank_counts, tensor=self._regions, data=degrees)
            if layout.tensor == 1 or self._rank_speeds.is_homogeneous(layout.num_ranks)
        ]
        if batches:
            self.layouts += self._unequal(self._rank_counts[1:])
        else:
            self._other_rank_counts = []

    def over(self, costs: CostTable, source: StepSource) -> "LayoutSearch":
        """Return the same search with candidates at the prices of other links."""
        other = copy.copy(self)
        other.candidates = self.candidates.over(costs, source)
        other.explanation = LayoutExplanation(other.candidates, self._rank_speeds)
        return other

    def _check_homogeneous(self, ranks: int, kind: type[Rule], label: str) -> bool:
        """True if ``ranks`` are equally fast, so that equal parts do not wait for a slow rank.

        Otherwise, a rejection is added.
        """
        if self._rank_speeds.is_homogeneous(ranks):
            return True
        reason = f"all ranks would wait for the slowest: {self._rank_speeds.describe(ranks)}"
        self.refusals += (impossible(kind, label, reason),)
        return False

    def _add_other_rank_counts(self) -> None:
        """Add layouts on numbers of ranks that do not divide the batch, the largest number first.

        Each needs a capture, which is skipped if computation alone takes longer than the fastest
        known step.
        """
        other_counts, self._other_rank_counts = self._other_rank_counts, []
        if not other_counts:
            return
        one_rank_seconds = step_seconds(self._program, self.candidates.costs).value
        best = min(
            candidate.seconds for layout in self.layouts for candidate in self.candidates.of(layout)
        )
        for ranks in other_counts:
            least = _CACHE_SPEEDUP * one_rank_seconds / self._rank_speeds.speed(ranks)
            if least >= best:
                self.refusals += (rank_count_too_slow(ranks, least / _CACHE_SPEEDUP, best),)
                continue
            if ranks in self._batch_degrees:
                self.layouts.append(ParallelLayout(data=ranks))
            unequal = [*self._unequal([ranks])]
            self.layouts += unequal
            tried_layouts = (
                [ParallelLayout(data=ranks)] if ranks in self._batch_degrees else unequal
            )
            seconds = [
                candidate.seconds
                for layout in tried_layouts
                for candidate in self.candidates.of(layout)
            ]
            best = min([best, *seconds])

    def _unequal(self, counts: Iterable[int]) -> Iterator[ParallelLayout]:
        """Yield data-parallel layouts with unequal shares of the batch.

        Ranks of unequal speed get shares that take the same time. Equal ranks whose number does not
        divide the batch get nearly equal shares.
        """
        possible = self.candidates.source.divisors()

        def shared(shares: Shares) -> Program:
            layout = ParallelLayout(data=len(shares), shares=shares)
            return self.candidates.apply_rules(
                batch_rules(layout, self.candidates.trades, bucket_bytes=BUCKETS[-1])
            )

        def timed(shares: Shares) -> tuple[float, Sequence[float]]:
            program = shared(shares)
            seconds = step_seconds(program, self.candidates.costs).value
            return seconds, rank_seconds(program, self.candidates.costs)

        for ranks in counts:
            if ranks > possible[-1]:
                if ranks == self._num_ranks:
                    reason = f"the batch has only {possible[-1]} samples"
                    self.refusals += (impossible(BatchSharding, f"among {ranks} ranks", reason),)
                continue
            is_homogeneous = self._rank_speeds.is_homogeneous(ranks)
            if is_homogeneous and ranks in self._batch_degrees:
                continue
            units = units_for(ranks, possible)
            try:
                if is_homogeneous:
                    shares = near_equal_shares(ranks, possible)
                    # Applying the rules checks that all ranks communicate in the same order. Prices
                    # are computed on demand.
                    if shares:
                        shared(shares)
                else:
                    shares = unequal_shares(
                        units, self._rank_speeds.full_step_seconds(ranks), timed
                    )
            except Mismatch as mismatch:
                label = f"among {ranks} ranks, unequally"
                self.refusals += (impossible(BatchSharding, label, mismatch.happened),)
                continue
            if shares is not None:
                yield ParallelLayout(data=ranks, shares=shares)

    def _find_regions(self, ranks: int) -> None:
        sharded = replace(self._program, layout=ParallelLayout(tensor=ranks))
        offers, refusals = self.candidates.offers(TensorSharding, sharded)
        self.refusals = (*self.refusals, *_as_impossible(refusals))
        if offers:
            self._regions[ranks] = offers

    def _find_pipelines(
        self, num_ranks: int, degrees: Sequence[int]
    ) -> Iterator[tuple[ParallelLayout, PipelineSearch]]:
        """Yield each feasible pipeline layout on up to ``num_ranks`` ranks with its search."""
        if trade_of(self.candidates.trades, PipelineStageEnd) is None:
            return
        stages = range(2, num_ranks + 1)
        for layout in degrees_on(
            self._rank_counts, tensor=(*self._regions,), data=degrees, pipeline=stages
        ):
            ranks = layout.num_ranks
            if not self._check_homogeneous(ranks, PipelineStageEnd, layers_label(layout)):
                continue
            found = PipelineSearch(
                self._program,
                layout=layout,
                trades=self.candidates.trades,
                source=self.candidates.source,
                costs=self.candidates.costs.on(ranks),
                searching=self._search_by,
                cuts=partial(self._sharding_variants, layout.tensor),
            )
            self.refusals = (*self.refusals, *found.refusals)
            if found.offers:
                yield layout, found

    def _sharding_variants(self, ranks: int) -> tuple[tuple[Rule, ...], ...]:
        """Return the sharding rules of the fastest tensor-parallel candidate and of the one with
        the least memory.
        """
        if ranks == 1:
            return ((),)
        candidates = self.candidates.of(ParallelLayout(tensor=ranks))
        fastest = min(candidates, key=lambda c: (c.seconds, c.nbytes))
        leanest = min(candidates, key=lambda c: (c.nbytes, c.seconds))
        chosen = fastest.rules, leanest.rules
        return tuple(of_kind(rules, TensorSharding) for rules in chosen)

    def find(self, budget: Budget, *, barred: str = ALLOWS_NONE) -> SearchResult:
        """Return the fastest plan on any number of ranks; if equally fast, the one with fewer
        ranks.
        """
        self._add_other_rank_counts()
        best: tuple[LayoutCandidate, SearchResult] | None = None
        tightest: Infeasible | None = None
        for candidate in self._most_promising(budget):
            if best is not None and candidate.seconds >= _seconds(best[1]):
                continue
            try:
                found = self._search_by(candidate.rules).find(budget, barred=barred)
            except Infeasible as infeasible:
                if tightest is None or _least(infeasible) < _least(tightest):
                    tightest = infeasible
                continue
            if best is None or _seconds(found) < _seconds(best[1]):
                best = candidate, found
        pipelined, refused, infeasible_pipelines = self._best_pipeline(
            budget, None if best is None else best[1]
        )
        if pipelined is not None:
            others = (self.explanation.why_not(x, pipelined) for x in self.layouts if x != ALONE)
            refusals = (*self.refusals, *others, *pipelined.refused, *refused)
            num_offers = sum(refusal.left is Remaining.WHOLE for refusal in refusals) + len(
                pipelined.taken
            )
            return replace(pipelined, refused=refusals, num_offers=num_offers)
        if best is not None:
            explained = self._explained(*best)
            more = sum(refusal.left is Remaining.WHOLE for refusal in refused)
            return replace(
                explained,
                refused=(*explained.refused, *refused),
                num_offers=explained.num_offers + more,
            )
        raise min((e for e in (tightest, *infeasible_pipelines) if e is not None), key=_least)

    def rivals(self, found: SearchResult, budget: Budget) -> Iterator[SearchResult]:
        """Yield plans of other candidates that are hardly slower than ``found``.

        They differ in ranks, bucket size or communication trades. A runner needs them if its own
        prices are only known for single plans.
        """
        layout_rules = {rule for rule in found.rules if rule.stage in BETWEEN_RANKS}
        candidates = [
            candidate for layout in self.layouts for candidate in self.candidates.of(layout)
        ]
        known = {_similarity_key(layout_rules)}
        for candidate in sorted(candidates, key=lambda c: (c.seconds, c.nbytes)):
            if (
                candidate.seconds > _MAX_RIVAL_RATIO * _seconds(found)
                or _similarity_key(candidate.rules) in known
            ):
                continue
            known.add(_similarity_key(candidate.rules))
            try:
                yield self._explained(candidate, self._search_by(candidate.rules).find(budget))
            except Infeasible:
                continue  # this plan is only used for comparison

    def _best_pipeline(
        self, budget: Budget, best: SearchResult | None
    ) -> tuple[SearchResult | None, list[Rejection], list[Infeasible]]:
        """Return the fastest pipeline plan that beats ``best``, and the reasons against others."""
        found: SearchResult | None = None
        refused: list[Rejection] = []
        infeasible_pipelines: list[Infeasible] = []
        for layout, pipeline_search in self.pipelines.items():
            fastest = found or best
            max_seconds = math.inf
            if fastest is not None:
                max_seconds = _seconds(fastest) * (1 if fastest is found else _MAX_PIPELINE_RATIO)
            if fastest is not None and pipeline_search.least_seconds >= max_seconds:
                refused.append(pipeline_too_slow(layout, pipeline_search.least_seconds, fastest))
                continue
            if not pipeline_search.candidates:
                refused += pipeline_search.refusals
                continue
            try:
                pipelined = pipeline_search.find(budget, within_seconds=max_seconds)
            except Infeasible as infeasible:
                infeasible_pipelines.append(infeasible)
                refused.append(
                    rejected(PipelineStageEnd, layers_label(layout), infeasible.happened)
                )
                continue
            if pipelined is not None:
                found = pipelined
            elif fastest is not None:
                refused.append(
                    pipeline_too_slow(layout, pipeline_search.candidates[0].seconds, fastest)
                )
        return found, refused, infeasible_pipelines

    def search_by(self, rules: Sequence[Rule]) -> StepSearch | PipelineSearch:
        """Return the search for the step under the layout of these rules."""
        if (layout := ParallelLayout.of(rules)) in self.pipelines:
            return self.pipelines[layout]
        return self._search_by(rules)

    def _search_by(self, rules: Sequence[Rule]) -> StepSearch:
        layout = tuple(sorted(rule for rule in rules if rule.stage in BETWEEN_RANKS))
        known = self._searches.get(layout)
        if known is None:
            known = self._searches[layout] = self._make_search(layout)
        return known

    def _most_promising(self, budget: Budget) -> list[LayoutCandidate]:
        """Return the candidates to search, fastest first.

        If the fastest one fits the budget, slower ones need not be searched.
        """
        found = [
            candidate
            for layout in self.layouts
            for candidate in self._worth_searching(layout, budget)
        ]
        return sorted(found, key=lambda candidate: (candidate.seconds, candidate.layout.num_ranks))

    def _worth_searching(self, layout: ParallelLayout, budget: Budget) -> list[LayoutCandidate]:
        """Return the candidates of ``layout`` that are worth a search of their own.

        This is the fastest candidate, or the fastest one without sharded states if these gain too
        little. If it exceeds the memory budget, the fastest one that fits and the one with the
        least memory are added.
        """
        candidates = sorted(self.candidates.of(layout), key=lambda c: (c.seconds, c.nbytes))
        fastest, limit = candidates[0], budget.memory_bytes or math.inf
        without_states = next(
            candidate for candidate in candidates if not of_kind(candidate.rules, StateSharding)
        )
        if (
            fastest.seconds > _MAX_STATES_RATIO * without_states.seconds
            and without_states.nbytes <= limit
        ):
            return [without_states]
        if fastest.nbytes <= limit:
            return [fastest]
        fitting = [candidate for candidate in candidates if candidate.nbytes <= limit]
        leanest = min(candidates, key=lambda c: (c.nbytes, c.seconds))
        lean = [leanest] if leanest.nbytes <= _LEANER_RATIO * fastest.nbytes else []
        return [*dict.fromkeys((fastest, *fitting[:1], *lean))]

    def _explained(self, candidate: LayoutCandidate, found: SearchResult) -> SearchResult:
        return self.explanation.explain(
            candidate, found, layouts=self.layouts, refusals=self.refusals
        )


def _similarity_key(rules: Iterable[Rule]) -> object:
    """Return a key that is equal for candidates too similar to be compared as rivals."""
    return (
        ParallelLayout.of(rules),
        bucket_bytes_of(rules),
        frozenset(r.trade for r in rules if not isinstance(r, CollectiveOverlap)),
    )


def _as_impossible(refusals: Iterable[Rejection]) -> tuple[Rejection, ...]:
    """Return the rejections marked as impossible, for offers that cannot be made at all."""
    return tuple(replace(refusal, left=Remaining.NEVER) for refusal in refusals)


def _seconds(found: SearchResult) -> float:
    return found.prediction.metrics.step_seconds.value


def _least(infeasible: Infeasible) -> int:
    return infeasible.least_bytes or sys.maxsize  # the time budget is too short
