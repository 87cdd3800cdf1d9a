"""Chooses the trades to apply: the fastest program within the budget.

Not for exploring plans (variant_plans.py) or for explaining them (explain.py).
"""

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property

from steelyard.errors import Infeasible
from steelyard.ir.program import Program
from steelyard.ir.rule import (
    BETWEEN_RANKS,
    CallRule,
    CallSite,
    Rule,
    matching,
    of_kind,
    to_rules,
)
from steelyard.ir.rule_kinds import (
    Recomputation,
)
from steelyard.ir.step_source import StepSource
from steelyard.plans.budget import Budget, Effort
from steelyard.plans.offers import offers_of
from steelyard.plans.peak_memory import PeakMemory
from steelyard.plans.plan import FrontierPoint
from steelyard.plans.stop_request import StopRequest
from steelyard.plans.trade import (
    Offer,
    Rejection,
    Remaining,
    Trade,
    rule_type,
)
from steelyard.predict import micro_batch_overhead, peak_bytes, predict, step_seconds
from steelyard.predict.cost_table import CostTable
from steelyard.search.infeasible import beyond_budget, too_slow
from steelyard.search.pareto_front import Point
from steelyard.search.result import SearchResult
from steelyard.search.single.estimator.fast_estimator import FastEstimator
from steelyard.search.single.evaluated_sets import Trials
from steelyard.search.single.explain import explain_rejected, explain_selected
from steelyard.search.single.explore import ENOUGH, sketch
from steelyard.search.single.frontier import NUM_POINTS, frontier, gap, marginal_saving
from steelyard.search.single.plan_rules import recompute_rules
from steelyard.search.single.step_plans import Explored, spread
from steelyard.search.single.traded_step import TradedStep, rules_of
from steelyard.search.single.variant import PLAIN, Variant
from steelyard.search.single.variant_levels import VariantLevels
from steelyard.search.single.variant_plans import VariantPlans
from steelyard.units import format_bytes

_ROUNDING = 1e-9
ALLOWS_NONE = "is lossy and the accuracy budget is 0"


def search(
    program: Program,
    *,
    trades: Sequence[Trade],
    source: StepSource,
    costs: CostTable,
    budget: Budget,
) -> SearchResult:
    """Return the fastest program within the budget; raise Infeasible if there is none."""
    return StepSearch(program, trades=trades, source=source, costs=costs).find(budget)


class StepSearch:
    """The search over one training step; each budget adds to the plans that are known.

    More micro-batches are explored only on demand. ``lossy`` are the call sites of the values that
    a lossy trade may change. If there are none, lossy trades are offered, but refused for the
    reason given to ``find``. With ``repeats``, a value may be recomputed more than once. ``layout``
    are rules that shard the step over several ranks; the search then plans the program of one of
    them.
    """

    def __init__(
        self,
        program: Program,
        *,
        trades: Sequence[Trade],
        source: StepSource,
        costs: CostTable,
        lossy: frozenset[CallSite] = frozenset(),
        repeats: bool = True,
        layout: Sequence[Rule] = (),
        effort: Effort = Effort.NORMAL,
    ) -> None:
        self._effort = effort
        self._calibrated = {1}  # numbers of micro-batches
        self._step = TradedStep(program, trades=trades, source=source, lossy=lossy, layout=layout)
        self.layout, self.program = self._step.layout, self._step.program
        self._all_costs = costs = costs.on(self.program.layout.num_ranks)
        self._costs = costs.of_rank(self.program.rank) if layout else costs
        self.offers: list[Offer] = []
        self.refusals: list[Rejection] = []
        for trade in trades:
            if trade.rule.stage in BETWEEN_RANKS or (
                trade.rule.needs_offload_memory and not costs.offload_bytes
            ):
                continue  # not requested, or already decided by ``layout``
            offers, refusals = trade.offers(self.program, self._step.source)
            if trade.is_exact:
                self.offers += offers
            elif lossy and issubclass(trade.rule, CallRule):
                allowed = self._step.allowed_values(self.program.graph, offers)
                self.offers += offers_of(trade.rule, self.program.graph, allowed)
            self.refusals += [replace(refusal, left=Remaining.NEVER) for refusal in refusals]
        rules = [rule for offer in self.offers for rule in offer.rules]
        self._levels = VariantLevels(self._step, self._costs, rules)
        self._plans = VariantPlans(
            self._step,
            self._costs,
            repeats=repeats,
            slices_gradients=self._levels.slices_gradients,
        )

    def explored(self, variant: Variant = PLAIN) -> Explored:
        """Return the explored plans of this variant of the step."""
        return self._plans.explored(variant)

    def find(
        self,
        budget: Budget,
        *,
        barred: str = ALLOWS_NONE,
        on_better: Callable[[float], None] = lambda _: None,
        stop: StopRequest | None = None,
    ) -> SearchResult:
        """Return the plan for one budget.

        ``barred`` is the reason to refuse lossy trades, if none may be applied. ``on_better`` is
        called with the step seconds of each plan that is the best so far. ``stop`` ends the search
        with that plan.
        """
        stop = stop or StopRequest()
        if (
            not self._plans.is_brief
            and PLAIN not in self._plans.known
            and self._meets_budget_untraded(budget)
        ):
            return self._brief_search.find(budget, barred=barred)
        variant, point = self._best_calibrated(budget, on_better, stop)
        self._explored(variant.unoffloaded.unsplit, budget, stop)  # the baseline of the explanation
        rules = self._plans.rules(variant, point)
        program = self._step.apply_on_ranks(rules)
        prediction = predict(program, self._all_costs)
        explored = self._plans.known[variant]
        assert program.sibling_programs or prediction.peak.nbytes <= point.peak_bytes, (
            "the fast estimator disagrees with the predictor"
        )
        if budget.memory_bytes is not None and prediction.peak.nbytes > budget.memory_bytes:
            raise self._infeasible(prediction.peak, budget, parts=variant.parts)
        violation = too_slow(prediction, budget)
        if violation is not None:
            raise violation
        least = predict(self._step.apply(self._plans.rules(*self._plans.least())), self._costs)
        lossy_rejections = () if self._step.lossy else self._lossy_rejections(variant, barred)
        return SearchResult(
            program=program,
            rules=rules,
            prediction=prediction,
            micro_batches=variant.parts,
            taken=explain_selected(self._plans.known, variant, point, self._step.trades),
            refused=(
                *self.refusals,
                *explain_rejected(self.offers, self._plans.known, variant, point, budget),
                *lossy_rejections,
            ),
            num_offers=len(self.offers) + len(lossy_rejections),
            frontier=self.frontier(),
            least=least.peak,
            least_within=self._least_within(),
            next_cent=marginal_saving(self._plans, point, budget),
            gap=gap(explored, point, budget, has_offloaded_states=variant.offloads_in_passes),
            is_stopped=stop.is_granted,
        )

    @cached_property
    def _brief_search(self) -> "StepSearch":
        """This search without the long exploration, for budgets that do not require saving
        memory.
        """
        brief = copy.copy(self)
        brief._plans = self._plans.brief()
        return brief

    def _meets_budget_untraded(self, budget: Budget) -> bool:
        """True if the step meets every bound of the budget without any trade.

        Trades can then only save time.
        """
        limit = budget.memory_bytes
        if limit is not None and self.untraded_bytes > limit:
            return False
        if not budget.bounds_time:
            return True
        return too_slow(predict(self._step.apply_on_ranks(()), self._all_costs), budget) is None

    @cached_property
    def untraded_bytes(self) -> int:
        """The peak of the step with no trade applied."""
        return Trials(FastEstimator(self.program, self._costs, ())).plain.peak_bytes

    def _lossy_rejections(self, variant: Variant, reason: str) -> tuple[Rejection, ...]:
        """Return the widest offer of each lossy trade, with its saving if it were the only trade.

        One estimate of the peak is enough, because these trades are not applied.
        """
        rejections = []
        for trade in self._step.trades:
            if trade.is_exact or not issubclass(trade.rule, CallRule):
                continue
            program = self._step.apply(variant.unoffloaded.rules)
            offers, _ = trade.offers(program, self._step.source)
            if not offers:
                continue
            values = matching(program.graph, rules_of(offers, CallRule))
            rules = to_rules(program.graph, values, trade.rule)
            applied = trade.rewrite(program, rules, self._step.source)
            before, after = (peak_bytes(p, self._costs) for p in (program, applied))
            saving = "no peak memory"
            if after < before:
                saving = f"~{format_bytes(before - after)}"
            widest = max(offers, key=lambda o: sum(r.count for r in of_kind(o.rules, CallRule)))
            text = f"alone would save {saving}, but {reason}"
            rejections.append(Rejection(trade=trade.name, label=widest.label, reason=text))
        return tuple(rejections)

    def least_bytes(self, *, enough_bytes: int) -> int:
        """Return the least memory with which the whole batch can run.

        The search ends early at the first variant that needs at most ``enough_bytes``.
        """
        peaks = []
        for variant in self._levels.of(1):
            peaks.append(self.explored(variant).least.peak_bytes)
            if peaks[-1] <= enough_bytes:
                break
        return min(peaks)

    def plans_of_recomputation(self, parts: int, *, count: int) -> Iterator[tuple[Rule, ...]]:
        """Yield the recompute rules of some plans with ``parts`` micro-batches.

        These plans apply no other trades.
        """
        program = self._step.apply(self._step.split(parts))
        sketched = sketch(program, self._costs, self._step.offered(Recomputation, program))
        recompute = rule_type(self._step.trades, Recomputation)
        for point in spread(sketched.chain, count):
            if rules := recompute_rules(program.graph, sketched.recomputed(point), recompute):
                yield rules

    def explore_all(self) -> None:
        """Explore every variant that the search may use, for the whole curve."""
        for parts in (1, *self._levels.micro_batch_counts):
            self._calibrate(parts)
            for variant in self._levels.of(parts):
                self.explored(variant)

    def _least_within(self) -> int:
        tried = {variant.parts for variant in self._plans.known}
        if self._plans.is_brief or self._plans.incomplete():
            return max(tried)  # even these variants were not explored in full
        return max(tried) if set(self._levels.micro_batch_counts) - tried else 0

    def frontier(self, *, points: int = NUM_POINTS) -> tuple[FrontierPoint, ...]:
        """Return the memory-time curve over all explored plans; with more memory, a plan is never
        slower.
        """
        return frontier(self._plans, points=points)

    def _explored(
        self, variant: Variant, budget: Budget, stop: StopRequest, best: Point | None = None
    ) -> Explored:
        """Return the plans of this variant, explored as far as the budget requires.

        A variant that cannot be considerably faster than ``best`` is explored briefly.
        """
        limit = budget.memory_bytes
        if limit is None or self._effort is Effort.FULL:
            return self._plans.explored(variant, stop)
        to_beat = math.inf if best is None else best.seconds * (1 - self._doubt(variant))
        return self._plans.explored_within(limit, variant, stop, to_beat_seconds=to_beat)

    def _best_calibrated(
        self, budget: Budget, on_better: Callable[[float], None], stop: StopRequest
    ) -> tuple[Variant, Point]:
        """Return the fastest plan; if it is in micro-batches, these are calibrated.

        Calibrating runs whole steps, so it is left out for splits that lose by the times of their
        operators. A calibration may make a split lose that was the best, so the choice is repeated.
        """
        while True:
            best = self._best(budget, on_better, stop)
            if best is None or self._is_final(best[0], stop):
                best = self._best_of_all(best, budget, stop)
                if self._is_final(best[0], stop):
                    return best
            self._calibrate(best[0].parts)

    def _is_final(self, variant: Variant, stop: StopRequest) -> bool:
        return variant.parts in self._calibrated or stop.is_granted

    def _calibrate(self, parts: int) -> None:
        self._step.source.calibrate_split(micro_batches=parts)
        self._calibrated.add(parts)
        self._plans.forget_outdated()

    def _best(
        self, budget: Budget, on_better: Callable[[float], None], stop: StopRequest
    ) -> tuple[Variant, Point] | None:
        """Return the fastest plan over all variants that could contain it; None if none fits.

        Splitting the batch or chunking costs time even if nothing is recomputed, and from some
        number on, finer splits cost more. Once a split alone takes as long as the best plan, or the
        best plan takes hardly longer than the step without trades, finer splits are skipped.
        """
        limit = budget.memory_bytes
        is_met = budget != Budget() and self._meets_budget_untraded(budget)
        best: tuple[Variant, Point] | None = None
        self._plans.forget_outdated()
        for number, variants in enumerate(self._variant_groups(budget, is_met=is_met)):
            if self._effort is Effort.FULL:
                self._calibrate(variants[0].parts)
            is_finer_worthwhile = False
            for variant in variants:
                if best is not None and self._is_not_worth_exploring(variant, best[1], limit):
                    continue
                if stop.is_granted and best is not None:
                    return best
                explored = self._explored(variant, budget, stop, None if best is None else best[1])
                if best is not None and not _is_faster(explored.plain, best[1]):
                    continue
                is_finer_worthwhile = True
                point = explored.within(limit)
                if point is not None and self._is_better(variant, point, best):
                    best = variant, point
                    stop.is_possible = True
                    on_better(point.seconds)
            if not is_finer_worthwhile and variants[0].parts > 1:
                break
            if is_met or best is None or not number:
                continue  # a chunk may be faster than the step without trades
            if self._is_hardly_slower(best[1], variants):
                break
        return best

    def _best_of_all(
        self, best: tuple[Variant, Point] | None, budget: Budget, stop: StopRequest
    ) -> tuple[Variant, Point]:
        """Return the fastest plan after exploring further; raise Infeasible if there is none."""
        limit = budget.memory_bytes
        if limit is not None and (best is None or self._effort is not Effort.QUICK):
            best = self._explored_further(best, limit, stop)
        if best is None:
            variant, least = self._plans.least()
            program = self._step.apply(self._plans.rules(variant, least))
            peak = predict(program, self._costs).peak
            raise self._infeasible(peak, budget, parts=variant.parts)
        return best

    def _is_better(
        self, variant: Variant, point: Point, best: tuple[Variant, Point] | None
    ) -> bool:
        """True if the plan is faster than the best one so far.

        Micro-batches whose times are not calibrated have to be considerably faster.
        """
        if best is None:
            return True
        return point.seconds < best[1].seconds * (1 - max(self._doubt(variant), _ROUNDING))

    def _doubt(self, variant: Variant) -> float:
        """The relative doubt of the variant's times."""
        source = self._step.source
        is_certain = variant.parts in self._calibrated or source.is_split_calibrated(
            micro_batches=variant.parts
        )
        return 0.0 if is_certain else source.split_doubt

    def _is_hardly_slower(self, best: Point, variants: Sequence[Variant]) -> bool:
        """True if the plan takes hardly longer than these variants would in more micro-batches,
        with no other trade.

        More micro-batches do the same work in smaller operators, and add up gradients more often.
        """
        known = [self._plans.known[variant] for variant in variants if variant in self._plans.known]
        if self._effort is Effort.FULL or not known:
            return False
        fastest = min(explored.plain.seconds for explored in known)
        overhead = micro_batch_overhead(self.program, self._costs)
        least_gain = max(ENOUGH, self._step.source.split_doubt)
        return best.seconds <= (1 + least_gain) * (fastest + overhead)

    def _explored_further(
        self, best: tuple[Variant, Point] | None, limit: int, stop: StopRequest
    ) -> tuple[Variant, Point] | None:
        """Explore in full each variant that may contain a considerably faster plan.

        If no plan fits yet, this is every variant.
        """
        for variant in self._plans.incomplete():
            if best is not None:
                if stop.is_granted:
                    return best
                bound = self._plans.lower_bound(limit, variant)
                if best[1].seconds <= (1 + ENOUGH) * bound:
                    continue
            point = self._plans.explored(variant, stop).within(limit)
            if point is not None and (best is None or _is_faster(point, best[1])):
                best = variant, point
                stop.is_possible = True
        return best

    def _infeasible(self, peak: PeakMemory, budget: Budget, *, parts: int) -> Infeasible:
        return beyond_budget(
            peak,
            budget,
            parts=parts,
            refusals=self.refusals,
            has_offload_memory=bool(self._costs.offload_bytes),
            leaner_settings=self._step.source.leaner_settings(),
        )

    def _variant_groups(self, budget: Budget, *, is_met: bool) -> Iterator[tuple[Variant, ...]]:
        """Yield the variants in the order of the search, grouped by number of micro-batches.

        ``is_met`` says that the step meets the budget without trades, so that they can only save
        time.
        """
        yield (PLAIN,)
        if budget == Budget():
            return  # without bounds, no trade is needed
        for parts in (1, *self._levels.micro_batch_counts):
            if not is_met:
                yield self._levels.of(parts)
                continue
            if parts > 1 and self._step.source.is_no_faster(micro_batches=parts):
                return
            unoffloaded = (variant for variant in self._levels.of(parts) if not variant.states)
            yield tuple(unoffloaded)

    def _is_not_worth_exploring(self, variant: Variant, best: Point, limit: int | None) -> bool:
        """True if the variant is optional and, before other trades, no faster than the best plan.

        Without a memory limit, every variant is optional. With a limit, these are optional:
        offloaded states, chunked micro-batches, and chunks if the plain step fits.
        """
        if limit is not None and not variant.states:
            exceeds_limit = self._plans.known[PLAIN].plain.peak_bytes > limit
            if not variant.chunks or (variant.parts == 1 and exceeds_limit):
                return False
        program = self._step.apply(variant.rules)
        return step_seconds(program, self._costs).value >= best.seconds


def _is_faster(one: Point, other: Point) -> bool:
    """True if the difference exceeds the rounding error of summed seconds.

    A smaller difference is no gain.
    """
    return one.seconds < other.seconds * (1 - _ROUNDING)
