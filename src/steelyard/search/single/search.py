"""Chooses the trades to apply: the fastest program within the budget, from one exploration.

Not for exploring plans (see explore.py) or for explaining them (see explain.py).
"""

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property

from steelyard.errors import Infeasible, Mismatch
from steelyard.ir.graph import Graph
from steelyard.ir.metrics import EXACT, UNKNOWN
from steelyard.ir.parallel_layout import ParallelLayout
from steelyard.ir.program import Program
from steelyard.ir.quantized_activation import settled
from steelyard.ir.rule import (
    BETWEEN_RANKS,
    CallRule,
    CallSite,
    Rule,
    RuleT,
    Stage,
    matching,
    of_kind,
    rule_of,
    spot_of,
    to_rules,
)
from steelyard.ir.rule_kinds import (
    MicroBatches,
    Recomputation,
    SlicedComputation,
    StateOffload,
    ValueCodec,
    ValueOffload,
)
from steelyard.ir.step_source import ShardedSource, StepSource
from steelyard.plans.budget import Budget
from steelyard.plans.offers import offers_of
from steelyard.plans.peak_memory import PeakMemory
from steelyard.plans.plan import FrontierPoint, NextCent
from steelyard.plans.trade import (
    Offer,
    Rejection,
    Remaining,
    Trade,
    apply_rules,
    apply_rules_on_ranks,
    rule_type,
    trade_of,
)
from steelyard.predict import peak_bytes, predict, step_seconds
from steelyard.predict.cost_table import CostTable
from steelyard.search.infeasible import beyond_budget, too_slow
from steelyard.search.pareto_front import ParetoFront, Point
from steelyard.search.result import Gap, SearchResult
from steelyard.search.single.evaluated_sets import Trials
from steelyard.search.single.explain import explain_rejected, explain_selected
from steelyard.search.single.explore import (
    Explored,
    explore,
    recompute_rules,
    reevaluate,
    sketch,
    spread,
)
from steelyard.search.single.fast_estimator import FastEstimator
from steelyard.search.single.granularity import (
    chunk_levels,
    micro_batch_counts,
    offload_levels,
    slice_counts,
)
from steelyard.search.single.lower_bound import least_seconds
from steelyard.search.single.min_cut import MinCut
from steelyard.search.single.slicing_candidates import worth_slicing
from steelyard.search.single.variant import Variant
from steelyard.units import format_bytes

_POINTS = 16
# The number of plans that are tried with offloaded parameters or gradients; each is rewritten in
# full.
_STATE_POINTS = 8
# The kinds of variants that have levels of their own; all others are tried in full or not at all.
_LEVELLED = (MicroBatches, SlicedComputation, StateOffload)
_PLAIN = Variant()
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
    """The search over one training step, explored once for all budgets.

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
    ) -> None:
        # With unequal shares of the batch, plan the rank with the largest share, because it has the
        # least free memory.
        rank, *others = ParallelLayout.of(layout).unequal_ranks
        self._base = replace(program, rank=rank) if others else program
        self._base_source = source
        self.layout = tuple(layout)
        self._trades = tuple(trades)
        self.program = self._apply(())
        self._source = ShardedSource(
            source=source, layout=self.program.layout, rank=self.program.rank
        )
        self._all_costs = costs = costs.on(self.program.layout.num_ranks)
        self._costs = costs.of_rank(self.program.rank) if layout else costs
        self._lossy = lossy
        self._allows_repeats = repeats
        self.offers: list[Offer] = []
        self.refusals: list[Rejection] = []
        for trade in trades:
            if trade.rule.stage in BETWEEN_RANKS or (
                trade.rule.needs_offload_memory and not costs.far_bytes
            ):
                continue  # not requested, or already decided by ``layout``
            offers, refusals = trade.offers(self.program, self._source)
            if trade.is_exact:
                self.offers += offers
            elif lossy and issubclass(trade.rule, CallRule):
                allowed = self._allowed_values(self.program.graph, offers)
                self.offers += offers_of(trade.rule, self.program.graph, allowed)
            self.refusals += [replace(refusal, left=Remaining.NEVER) for refusal in refusals]
        rules = [rule for offer in self.offers for rule in offer.rules]
        self._micro_batch_counts = micro_batch_counts(
            [r.micro_batches for r in of_kind(rules, MicroBatches) if r.micro_batches > 1]
        )
        self._chunk_levels = chunk_levels(of_kind(rules, SlicedComputation))
        self._state_rules = of_kind(rules, StateOffload)
        changes = {r for r in rules if r.stage is Stage.VARIANT and not isinstance(r, _LEVELLED)}
        self._change_levels = tuple(dict.fromkeys(((), tuple(sorted(changes)))))
        self._is_brief = False
        self._explored: dict[Variant, Explored] = {}
        self._applied: dict[Variant, list[tuple[frozenset[int], Program]]] = {}

    @cached_property
    def _state_levels(self) -> tuple[tuple[StateOffload, ...], ...]:
        """The levels of offloaded parameters, gradients and optimizer state to explore."""
        counts = slice_counts(self._state_rules)
        sliced = {rule: degrees for rule, degrees in counts.items() if degrees[-1]}
        chosen = self._fastest_slice_counts(sliced)
        rules = [replace(rule, slices=chosen.get(rule, 0)) for rule in counts]
        max_counts = max((len(degrees) for degrees in sliced.values()), default=0)
        finer = [
            {rule: _finer_count(degrees, chosen[rule], step) for rule, degrees in sliced.items()}
            for step in range(1, max_counts)
        ]
        return offload_levels(self.program, rules, finer)

    def _fastest_slice_counts(
        self, counts: Mapping[StateOffload, Sequence[int]]
    ) -> dict[StateOffload, int]:
        """Return, for each parameter, the number of slices that hides most of its transfers.

        The parameters are tried in turn, each with the current choices for the others.
        """
        chosen = {rule: degrees[-1] for rule, degrees in counts.items() if len(degrees) > 1}
        for rule in chosen:
            seconds_of = {}
            for degree in counts[rule]:
                chosen[rule] = degree
                program = self._apply([replace(r, slices=n) for r, n in chosen.items()])
                seconds_of[degree] = step_seconds(program, self._costs).value
            chosen[rule] = min(seconds_of, key=seconds_of.__getitem__)
        return {rule: chosen.get(rule, degrees[-1]) for rule, degrees in counts.items()}

    def explored(self, variant: Variant = _PLAIN) -> Explored:
        """Return the explored plans of this variant of the step."""
        known = self._explored.get(variant)
        if known is None:
            known = self._explored[variant] = self._explore(variant)
        return known

    def find(self, budget: Budget, *, barred: str = ALLOWS_NONE) -> SearchResult:
        """Return the plan for one budget.

        ``barred`` is the reason to refuse lossy trades, if none may be applied.
        """
        if (
            not self._is_brief
            and _PLAIN not in self._explored
            and self._meets_budget_untraded(budget)
        ):
            return self._brief_search.find(budget, barred=barred)
        variant, point = self._best(budget)
        self.explored(variant.unoffloaded.unsplit)  # the baseline of the explanation
        rules = self._rules(variant, point)
        program = self._apply_on_ranks(rules)
        prediction = predict(program, self._all_costs)
        explored = self._explored[variant]
        assert program.sibling_programs or prediction.peak.nbytes <= point.peak_bytes, (
            "the fast estimator disagrees with the predictor"
        )
        if budget.memory_bytes is not None and prediction.peak.nbytes > budget.memory_bytes:
            raise self._infeasible(prediction.peak, budget, parts=variant.parts)
        violation = too_slow(prediction, budget)
        if violation is not None:
            raise violation
        least_variant, least = self._least()
        lossy_rejections = () if self._lossy else self._lossy_rejections(variant, barred)
        return SearchResult(
            program=program,
            rules=rules,
            prediction=prediction,
            micro_batches=variant.parts,
            taken=explain_selected(self._explored, variant, point, self._trades),
            refused=(
                *self.refusals,
                *explain_rejected(self.offers, self._explored, variant, point, budget),
                *lossy_rejections,
            ),
            num_offers=len(self.offers) + len(lossy_rejections),
            frontier=self.frontier(),
            least=predict(self._apply(self._rules(least_variant, least)), self._costs).peak,
            least_within=self._least_within(),
            next_cent=self._marginal_saving(point, budget),
            gap=_gap(explored, point, budget, has_offloaded_states=variant.offloads_in_passes),
        )

    @cached_property
    def _brief_search(self) -> "StepSearch":
        """This search without the long exploration, for budgets that do not require saving
        memory.
        """
        brief = copy.copy(self)
        brief._is_brief = True
        brief._explored, brief._applied = {}, {}
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
        return too_slow(predict(self._apply_on_ranks(()), self._all_costs), budget) is None

    @cached_property
    def untraded_bytes(self) -> int:
        """The peak of the step with no trade applied."""
        return Trials(FastEstimator(self.program, self._costs, ())).plain.peak_bytes

    def _lossy_rejections(self, variant: Variant, reason: str) -> tuple[Rejection, ...]:
        """Return the widest offer of each lossy trade, with its saving if it were the only trade.

        One estimate of the peak is enough, because these trades are not applied.
        """
        rejections = []
        for trade in self._trades:
            if trade.is_exact or not issubclass(trade.rule, CallRule):
                continue
            program = self._apply(variant.unoffloaded.rules)
            offers, _ = trade.offers(program, self._source)
            if not offers:
                continue
            values = matching(program.graph, _rules_of(offers, CallRule))
            rules = to_rules(program.graph, values, trade.rule)
            applied = trade.rewrite(program, rules, self._source)
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
        for variant in self._variants_of(1):
            peaks.append(self.explored(variant).least.peak_bytes)
            if peaks[-1] <= enough_bytes:
                break
        return min(peaks)

    def plans_of_recomputation(self, parts: int, *, count: int) -> Iterator[tuple[Rule, ...]]:
        """Yield the recompute rules of some plans with ``parts`` micro-batches.

        These plans apply no other trades.
        """
        program = self._apply(self._split(parts))
        sketched = sketch(program, self._costs, self._offered(Recomputation, program))
        recompute = rule_type(self._trades, Recomputation)
        for point in spread(sketched.chain, count):
            if rules := recompute_rules(program.graph, sketched.recomputed(point), recompute):
                yield rules

    def explore_all(self) -> None:
        """Explore every variant that the search may use, for the whole curve."""
        for parts in (1, *self._micro_batch_counts):
            for variant in self._variants_of(parts):
                self.explored(variant)

    def _least_within(self) -> int:
        tried = {variant.parts for variant in self._explored}
        if self._is_brief:
            return max(tried)  # even these variants were not explored in full
        return max(tried) if set(self._micro_batch_counts) - tried else 0

    def frontier(self, *, points: int = _POINTS) -> tuple[FrontierPoint, ...]:
        """Return the memory-time curve over all explored plans; with more memory, a plan is never
        slower.
        """
        curve = self._curve()
        low, high = curve[0][1].peak_bytes, curve[-1][1].peak_bytes
        chosen: dict[int, tuple[Variant, Point]] = {}
        for step in range(points):
            limit = low + (high - low) * step // (points - 1)
            fitting = [at for at, (_, point) in enumerate(curve) if point.peak_bytes <= limit]
            chosen[fitting[-1]] = curve[fitting[-1]]
        return tuple(self._frontier_point(variant, point) for variant, point in chosen.values())

    def _frontier_point(self, variant: Variant, point: Point) -> FrontierPoint:
        explored = self._explored[variant]
        return FrontierPoint(
            memory_bytes=point.peak_bytes,
            step_seconds=point.seconds,
            accuracy_loss=UNKNOWN if explored.quantized(point) else EXACT,
            flops=explored.estimator.flops_of(point.choices),
            micro_batches=variant.parts,
            rules=self._rules(variant, point),
        )

    def _best(self, budget: Budget) -> tuple[Variant, Point]:
        """Return the fastest plan over all variants that could contain it.

        Splitting the batch or chunking costs time even if nothing is recomputed, and from some
        number on, finer splits cost more. Once a split alone takes as long as the best plan, finer
        splits are skipped.
        """
        limit = budget.memory_bytes
        best: tuple[Variant, Point] | None = None
        for variants in self._variant_groups(budget):
            is_finer_worthwhile = False
            for variant in variants:
                if best is not None and self._is_not_worth_exploring(variant, best[1], limit):
                    continue
                explored = self.explored(variant)
                if best is not None and not _is_faster(explored.plain, best[1]):
                    continue
                is_finer_worthwhile = True
                point = explored.within(limit)
                if point is not None and (best is None or _is_faster(point, best[1])):
                    best = variant, point
            if not is_finer_worthwhile and variants[0].parts > 1:
                break
        if best is None:
            variant, least = self._least()
            program = self._apply(self._rules(variant, least))
            peak = predict(program, self._costs).peak
            raise self._infeasible(peak, budget, parts=variant.parts)
        return best

    def _infeasible(self, peak: PeakMemory, budget: Budget, *, parts: int) -> Infeasible:
        return beyond_budget(
            peak,
            budget,
            parts=parts,
            refusals=self.refusals,
            has_offload_memory=bool(self._costs.far_bytes),
            leaner_settings=self._source.leaner_settings(),
        )

    def _variant_groups(self, budget: Budget) -> Iterator[tuple[Variant, ...]]:
        """Yield the variants in the order of the search, grouped by number of micro-batches.

        The order is the same for every budget; otherwise a larger budget could get a slower plan.
        """
        yield (_PLAIN,)
        if budget == Budget():
            return  # without bounds, no trade is needed
        is_met = self._meets_budget_untraded(budget)
        for parts in (1, *self._micro_batch_counts):
            if not is_met:
                yield self._variants_of(parts)
                continue
            if parts > 1 and self._source.is_no_faster(micro_batches=parts):
                return
            unoffloaded = (variant for variant in self._variants_of(parts) if not variant.states)
            yield tuple(unoffloaded)

    def _variants_of(self, parts: int) -> tuple[Variant, ...]:
        """Return the variants with this many micro-batches.

        With small micro-batches, some levels of chunks are the same.
        """
        variants = (
            replace(self._with_chunks(parts, chunks), states=states, changes=changes)
            for changes in self._change_levels
            for states in self._state_levels
            for chunks in self._chunk_levels
        )
        return tuple({variant.rules: variant for variant in variants}.values())

    def _is_not_worth_exploring(self, variant: Variant, best: Point, limit: int | None) -> bool:
        """True if the variant is optional and, before other trades, no faster than the best plan.

        Without a memory limit, every variant is optional. With a limit, these are optional:
        offloaded states, chunked micro-batches, and chunks if the plain step fits.
        """
        if limit is not None and not variant.states:
            exceeds_limit = self.explored().plain.peak_bytes > limit
            if not variant.chunks or (variant.parts == 1 and exceeds_limit):
                return False
        program = self._apply(variant.rules)
        return step_seconds(program, self._costs).value >= best.seconds

    def _with_chunks(self, parts: int, chunks: tuple[SlicedComputation, ...]) -> Variant:
        """Return the variant with chunks if its micro-batches can be chunked, otherwise without.

        A micro-batch may have too few rows.
        """
        variant = Variant(split=self._split(parts), chunks=chunks)
        if chunks and variant not in self._explored:
            try:
                self._apply(variant.rules)
            except Mismatch:
                return variant.unchunked
        return variant

    def _least(self) -> tuple[Variant, Point]:
        leasts = [(variant, e.least) for variant, e in self._explored.items()]
        return min(leasts, key=lambda found: (found[1].peak_bytes, found[0]))

    def _curve(self) -> list[tuple[Variant, Point]]:
        """Return the Pareto front over all explored variants."""
        owner: dict[int, tuple[Variant, Point]] = {}
        archive = ParetoFront()
        for variant, explored in sorted(self._explored.items() or [(_PLAIN, self.explored())]):
            for point in explored.chain:
                if archive.add(point):
                    owner[id(point)] = variant, point
        return [owner[id(point)] for point in archive]

    def _marginal_saving(self, point: Point, budget: Budget) -> NextCent | None:
        """Return the largest saving of seconds per byte above the memory limit."""
        limit = budget.memory_bytes
        if limit is None:
            return None
        candidates = [
            NextCent(more_bytes=p.peak_bytes - limit, saved_seconds=point.seconds - p.seconds)
            for _, p in self._curve()
            if p.peak_bytes > limit and p.seconds < point.seconds
        ]
        return max(
            candidates, key=lambda c: (c.saved_seconds / c.more_bytes, c.more_bytes), default=None
        )

    def _explore(self, variant: Variant) -> Explored:
        program = self._apply(variant.rules)
        if variant.offloads_in_passes:
            return self._explore_with_offloaded_states(variant)
        if variant.states:
            return reevaluate(program, self._costs, known=self.explored(variant.unoffloaded))
        known = self.explored() if variant != _PLAIN and not self._is_brief else None
        recomputable = self._offered(Recomputation, program)
        quantizable = self._offered(ValueCodec, program) if self._lossy else frozenset()
        if quantizable:
            recomputable -= settled(program.graph)
            rules = to_rules(program.graph, quantizable, rule_type(self._trades, ValueCodec))
            # This makes the source price the codec operators.
            self._source.rewritten(self._rewrite(ValueCodec, program, rules).graph)
        has_offload_memory = bool(self._costs.far_bytes)
        return explore(
            program,
            self._costs,
            recomputable,
            self._offered(ValueOffload, program) if has_offload_memory else (),
            quantizable,
            self._sliceable(program) if has_offload_memory else {},
            known=known,
            thorough=variant.parts == 1,
            repeats=self._allows_repeats,
            known_plans_only=self._is_brief,
        )

    def _explore_with_offloaded_states(self, variant: Variant) -> Explored:
        """Offload states in some plans of the same step, and predict each plan again.

        The timing of parameter transfers depends on everything else that runs.
        """
        unoffloaded = self.explored(variant.unoffloaded)
        archive = ParetoFront()
        for choices, resident in self._applied_plans(variant.unoffloaded):
            program = self._rewrite(StateOffload, resident, variant.states)
            if program.far_bytes <= self._costs.far_bytes:
                nbytes = peak_bytes(program, self._costs)
                seconds = step_seconds(program, self._costs).value
                archive.add(Point(peak_bytes=nbytes, seconds=seconds, choices=choices))
        return replace(unoffloaded, chain=tuple(archive), groups=(), trials=len(archive))

    def _applied_plans(self, variant: Variant) -> list[tuple[frozenset[int], Program]]:
        """Return a few plans of the variant, as choices and as programs."""
        if variant not in self._applied:
            explored = self.explored(variant)
            points = spread(explored.chain, _STATE_POINTS)
            if any(rule.what == "gradient" and rule.slices for rule in self._state_rules):
                # A product that reads slices cannot make its result in slices, so try whole reads.
                points += [explored.unsliced(p) for p in points if explored.slice_counts(p)]
            found = []
            for point in points:
                choices = explored.choices_of(point)
                rules = self._plan_rules(explored, replace(point, choices=choices))
                found.append((choices, self._apply((*variant.rules, *rules))))
            self._applied[variant] = found
        return self._applied[variant]

    def _split(self, parts: int) -> tuple[MicroBatches, ...]:
        """Return the rules of a step in this many micro-batches."""
        split = rule_type(self._trades, MicroBatches) if parts > 1 else None
        return (split(micro_batches=parts),) if split is not None else ()

    def _rewrite(self, kind: type[Rule], program: Program, rules: Sequence[Rule]) -> Program:
        """Return the program after the rules that are of this trade's kind."""
        trade = trade_of(self._trades, kind)
        assert trade is not None or not rules
        return program if trade is None else trade.rewrite(program, rules, self._source)

    def _offered(self, kind: type[CallRule], program: Program) -> frozenset[str]:
        """Return the values for which the trade of this kind has offers."""
        trade = trade_of(self._trades, kind)
        if trade is None:
            return frozenset()
        offers, _ = trade.offers(program, self._source)
        if not trade.is_exact:
            return self._allowed_values(program.graph, offers)
        return matching(program.graph, _rules_of(offers, CallRule))

    def _sliceable(self, program: Program) -> dict[str, int]:
        """Return the values that may be fetched in slices, with the number of slices of each."""
        trade = trade_of(self._trades, ValueOffload)
        if trade is None:
            return {}
        offers, _ = trade.offers(program, self._source)
        graph = program.graph
        rules = [rule for rule in _rules_of(offers, ValueOffload) if rule.slices]
        counts = {value: rule.slices for value, rule in rule_of(graph, rules).items()}
        worthwhile = (
            worth_slicing(FastEstimator(program, self._costs, ()), counts) if counts else {}
        )
        rules = [r for r in rules if rule_of(graph, [r]).keys() & worthwhile.keys()]
        # This makes the source price the sliced reads.
        trade.rewrite(program, rules, self._source)
        return worthwhile

    def _allowed_values(self, graph: Graph, offers: Sequence[Offer]) -> frozenset[str]:
        """Return the values that a lossy trade offers and that may be changed."""
        values = matching(graph, _rules_of(offers, CallRule))
        return frozenset(v for v in values if spot_of(graph, graph.by_name[v]) in self._lossy)

    def _rules(self, variant: Variant, point: Point) -> tuple[Rule, ...]:
        plan_rules = self._plan_rules(self._explored[variant], point)
        return (*self.layout, *variant.rules, *plan_rules)

    def _plan_rules(self, explored: Explored, point: Point) -> tuple[Rule, ...]:
        """Return the rules for recompute, 8-bit quantization and offload within the variant."""
        graph = explored.estimator.program.graph
        recomputed, quantized = explored.recomputed(point), explored.quantized(point)
        offloaded, rules = explored.offloaded(point), list[Rule]()
        if recomputed:
            rules += recompute_rules(graph, recomputed, rule_type(self._trades, Recomputation))
        if quantized:
            rules += to_rules(graph, quantized, rule_type(self._trades, ValueCodec))
        if offloaded:
            offload, counts = rule_type(self._trades, ValueOffload), explored.slice_counts(point)
            rules += _offload_rules(graph, offloaded, counts, offload)
        return tuple(rules)

    def _apply(self, rules: Sequence[Rule]) -> Program:
        all_rules = tuple(dict.fromkeys((*self.layout, *rules)))
        return apply_rules(self._base, all_rules, trades=self._trades, source=self._base_source)

    def _apply_on_ranks(self, rules: Sequence[Rule]) -> Program:
        all_rules = tuple(dict.fromkeys((*self.layout, *rules)))
        return apply_rules_on_ranks(
            self._base, all_rules, trades=self._trades, source=self._base_source
        )


def _is_faster(one: Point, other: Point) -> bool:
    """True if the difference exceeds the rounding error of summed seconds.

    A smaller difference is no gain.
    """
    return one.seconds < other.seconds * (1 - _ROUNDING)


def _finer_count(degrees: Sequence[int], degree: int, step: int) -> int:
    """Return the number of slices ``step`` positions finer, or the finest."""
    return degrees[min(degrees.index(degree) + step, len(degrees) - 1)]


def _offload_rules(
    graph: Graph,
    offloaded: Mapping[str, tuple[int, int]],
    slices: Mapping[str, int],
    offload: type[ValueOffload],
) -> tuple[ValueOffload, ...]:
    by_timing: dict[tuple[int, int, int], list[str]] = {}
    for value, lag_and_lead in offloaded.items():
        by_timing.setdefault((*lag_and_lead, slices.get(value, 0)), []).append(value)
    return tuple(
        rule
        for (lag, lead, count), values in sorted(by_timing.items())
        for rule in to_rules(graph, values, offload, lag=lag, lead=lead, slices=count)
    )


def _rules_of(offers: Sequence[Offer], kind: type[RuleT]) -> list[RuleT]:
    return sorted({rule for offer in offers for rule in of_kind(offer.rules, kind)})


def _gap(
    explored: Explored, point: Point, budget: Budget, *, has_offloaded_states: bool
) -> Gap | None:
    """Return the gap to the lower bound; None if memory is not bounded.

    With offloaded parameters or gradients, the bound is the time of the plain step, because the
    estimator does not model memory without them.
    """
    estimator = explored.estimator
    is_often = bool(estimator.times_of(point.choices))
    if budget.memory_bytes is None or not (estimator.unit_of or estimator.eviction_choices()):
        return None
    least = min(estimator.plain_seconds, point.seconds)
    # No plan is faster than the step without recompute and offload, except through faster sliced
    # products.
    is_plain = not point.choices and not estimator.slicing_gain_seconds
    if not has_offloaded_states and not is_plain:
        least = least_seconds(
            estimator,
            MinCut(estimator),
            limit_bytes=budget.memory_bytes,
            within_seconds=point.seconds,
            repeats=is_often,
        )
    return Gap(
        step_seconds=point.seconds,
        least_seconds=least,
        is_often=is_often,
        has_offload_memory=bool(estimator.offloadable),
        has_codes=bool(estimator.quantizable),
    )
