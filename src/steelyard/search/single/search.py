"""Which trades to apply: the fastest program within the budget, from one exploration of all.

Not for looking at single plans (explore.py) or for saying why (explain.py).
"""

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property

from steelyard.errors import Infeasible, Mismatch
from steelyard.ir.graph import Graph
from steelyard.ir.metrics import EXACT, UNKNOWN
from steelyard.ir.parallel_layout import LAYOUT_TRADES, ParallelLayout
from steelyard.ir.program import Program
from steelyard.ir.quantized_activation import settled
from steelyard.ir.rule import OFFLOAD_TRADES, CallSite, Rule, matching, rule_of, spot_of, to_rules
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
)
from steelyard.predict import peak_bytes, predict, step_seconds
from steelyard.predict.cost_table import CostTable
from steelyard.search.infeasible import beyond_budget, too_slow
from steelyard.search.pareto_front import ParetoFront, Point
from steelyard.search.result import Gap, SearchResult
from steelyard.search.single.evaluated_sets import Trials
from steelyard.search.single.explain import refused, taken
from steelyard.search.single.explore import Explored, again_rules, explore, few, reapplied, sketch
from steelyard.search.single.fast_estimator import FastEstimator
from steelyard.search.single.granularity import moved_states, numbers_of_slices, slices, splits
from steelyard.search.single.lower_bound import least_seconds
from steelyard.search.single.min_cut import MinCut
from steelyard.search.single.slicing_candidates import worth_slicing
from steelyard.search.single.variant import Variant
from steelyard.units import format_bytes

_POINTS = 16
# Plans that are looked at again with weights or gradients moved; each is written out whole.
_MOVED_POINTS = 8
_RECOMPUTE, _CHUNK, _QUANTIZE = "recompute", "chunk", "quantize_activations"
_ACCUMULATE = "accumulate"
_OFFLOAD, _STATE = "offload", "offload_state"
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
    """The fastest program within the budget; raises Infeasible where there is none."""
    return StepSearch(program, trades=trades, source=source, costs=costs).find(budget)


class StepSearch:
    """One training step, explored once for all budgets; more micro-batches only when asked for.

    ``lossy`` are the values that a lossy trade may be applied on, by where they are made; without
    any, such trades are offered and refused for the reason that ``find`` is told. ``repeats``: a
    value may be made again more than once. ``layout``: rules that lay the step on several ranks;
    what is searched then is the program of one of them.
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
        # Of unequal shares of the batch the largest: memory is shortest there.
        rank, *others = ParallelLayout.of(layout).unequal_ranks
        self._whole = replace(program, rank=rank) if others else program
        self._whole_source = source
        self.layout = tuple(layout)
        self._trades = {trade.name: trade for trade in trades}
        self.program = self._apply(())
        self._source = ShardedSource(
            source=source, layout=self.program.layout, rank=self.program.rank
        )
        self._all_costs = costs = costs.on(self.program.layout.num_ranks)
        self._costs = costs.of_rank(self.program.rank) if layout else costs
        self._lossy = lossy
        self._oftener = repeats
        self.offers: list[Offer] = []
        self.refusals: list[Rejection] = []
        for trade in trades:
            if trade.name in LAYOUT_TRADES or (
                trade.name in OFFLOAD_TRADES and not costs.far_bytes
            ):
                continue  # nobody asked for it, or whoever did has chosen
            offers, refusals = trade.offers(self.program, self._source)
            if trade.is_exact:
                self.offers += offers
            elif lossy:
                able = self._allowed(self.program.graph, offers)
                self.offers += offers_of(trade.name, self.program.graph, able)
            self.refusals += [replace(refusal, left=Remaining.NEVER) for refusal in refusals]
        rules = [rule for offer in self.offers for rule in offer.rules]
        self._splits = splits([r.degree for r in rules if r.trade == _ACCUMULATE and r.degree > 1])
        self._streams = slices([r for r in rules if r.trade == _CHUNK])
        self._moving = [r for r in rules if r.trade == _STATE]
        self._is_brief = False
        self._explored: dict[Variant, Explored] = {}
        self._written: dict[Variant, list[tuple[frozenset[int], Program]]] = {}

    @cached_property
    def _states(self) -> tuple[tuple[Rule, ...], ...]:
        """What is moved of weights, gradients and what the optimizer keeps."""
        numbers = numbers_of_slices(self._moving)
        sliced = {rule: degrees for rule, degrees in numbers.items() if degrees[-1]}
        slices = self._fastest(sliced)
        rules = [replace(rule, degree=slices.get(rule, 0)) for rule in numbers]
        most = max((len(degrees) for degrees in sliced.values()), default=0)
        finer = [
            {rule: _finer(degrees, slices[rule], step) for rule, degrees in sliced.items()}
            for step in range(1, most)
        ]
        return moved_states(self.program, rules, finer)

    def _fastest(self, numbers: Mapping[Rule, Sequence[int]]) -> dict[Rule, int]:
        """Into how many slices each of these weights is parted so that most of its copying goes on
        while it is computed with; each in turn, beside the others."""
        slices = {rule: degrees[-1] for rule, degrees in numbers.items() if len(degrees) > 1}
        for rule in slices:
            tried = {}
            for degree in numbers[rule]:
                slices[rule] = degree
                program = self._apply([replace(r, degree=n) for r, n in slices.items()])
                tried[degree] = step_seconds(program, self._costs).value
            slices[rule] = min(tried, key=tried.__getitem__)
        return {rule: slices.get(rule, degrees[-1]) for rule, degrees in numbers.items()}

    def explored(self, variant: Variant = _PLAIN) -> Explored:
        """The plans of recomputation on this variant of the step."""
        known = self._explored.get(variant)
        if known is None:
            known = self._explored[variant] = self._explore(variant)
        return known

    def find(self, budget: Budget, *, barred: str = ALLOWS_NONE) -> SearchResult:
        """The plan for one budget, in the same words for any. ``barred`` says why no lossy trade
        may be applied, where none may."""
        if not self._is_brief and _PLAIN not in self._explored and self._is_kept_untraded(budget):
            return self._briefly.find(budget, barred=barred)
        variant, point = self._best(budget)
        self.explored(variant.at_home.whole)  # which what is taken is priced beside
        rules = self._rules(variant, point)
        program = self._apply_on_ranks(rules)
        prediction = predict(program, self._all_costs)
        explored = self._explored[variant]
        assert program.sibling_programs or prediction.peak.nbytes <= point.peak_bytes, (
            "the tally is off"
        )
        if budget.memory_bytes is not None and prediction.peak.nbytes > budget.memory_bytes:
            raise self._beyond(prediction.peak, budget, parts=variant.parts)
        slow = too_slow(prediction, budget)
        if slow is not None:
            raise slow
        least_variant, least = self._least()
        lossless = () if self._lossy else self._barred(variant, barred)
        return SearchResult(
            program=program,
            rules=rules,
            prediction=prediction,
            micro_batches=variant.parts,
            taken=taken(self._explored, variant, point),
            refused=(
                *self.refusals,
                *refused(self.offers, self._explored, variant, point, budget),
                *lossless,
            ),
            num_offers=len(self.offers) + len(lossless),
            frontier=self.frontier(),
            least=predict(self._apply(self._rules(least_variant, least)), self._costs).peak,
            least_within=self._least_within(),
            next_cent=self._next_cent(point, budget),
            gap=_gap(explored, point, budget, is_moved=variant.moves_in_passes),
        )

    @cached_property
    def _briefly(self) -> "StepSearch":
        """This search without its long exploration of plans that save memory, for budgets that ask
        for none of them."""
        brief = copy.copy(self)
        brief._is_brief = True
        brief._explored, brief._written = {}, {}
        return brief

    def _is_kept_untraded(self, budget: Budget) -> bool:
        """Whether the step keeps every bound of the budget with no trade applied: all that is left
        to win is time."""
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

    def _barred(self, variant: Variant, reason: str) -> tuple[Rejection, ...]:
        """The widest offer of each lossy trade, and what it would buy if it were the only trade.

        One look at the peak, for what is not to be applied is not worth exploring.
        """
        told = []
        for trade in self._trades.values():
            if trade.is_exact or trade.name in LAYOUT_TRADES:
                continue
            program = self._apply(variant.at_home.rules)
            offers, _ = trade.offers(program, self._source)
            if not offers:
                continue
            values = matching(program.graph, _rules_of(offers))
            rules = to_rules(program.graph, values, trade=trade.name)
            applied = trade.rewrite(program, rules, self._source)
            before, after = (peak_bytes(p, self._costs) for p in (program, applied))
            bought = "no memory at the peak"
            if after < before:
                bought = f"~{format_bytes(before - after)} of memory"
            widest = max(offers, key=lambda o: sum(r.count for r in o.rules))
            said = f"would alone buy {bought}, but {reason}"
            told.append(Rejection(trade=trade.name, label=widest.label, reason=said))
        return tuple(told)

    def least_bytes(self, *, enough_bytes: int) -> int:
        """The least memory of the whole batch; where some variant needs no more than is enough, of
        the first that does."""
        found = []
        for variant in self._levels_of(1):
            found.append(self.explored(variant).least.peak_bytes)
            if found[-1] <= enough_bytes:
                break
        return min(found)

    def plans_of_recomputation(self, parts: int, *, count: int) -> Iterator[tuple[Rule, ...]]:
        """What some plans of the step in so many parts make again, and do nothing besides."""
        program = self._apply(Variant(parts=parts).rules)
        sketched = sketch(program, self._costs, self._offered(_RECOMPUTE, program))
        for point in few(sketched.chain, count):
            if again := again_rules(program.graph, sketched.values(point)):
                yield again

    def explore_all(self) -> None:
        """Every variant that is ever looked at, for the whole curve."""
        for parts in (1, *self._splits):
            for variant in self._levels_of(parts):
                self.explored(variant)

    def _least_within(self) -> int:
        tried = {variant.parts for variant in self._explored}
        if self._is_brief:
            return max(tried)  # not even there all was tried
        return max(tried) if set(self._splits) - tried else 0

    def frontier(self, *, points: int = _POINTS) -> tuple[FrontierPoint, ...]:
        """The memory-time curve over all that was explored; more memory is never slower."""
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
            accuracy_loss=UNKNOWN if explored.coded(point) else EXACT,
            flops=explored.tally.flops_of(point.again),
            micro_batches=variant.parts,
            rules=self._rules(variant, point),
        )

    def _best(self, budget: Budget) -> tuple[Variant, Point]:
        """The fastest over all variants that could be it.

        Cutting the batch or slicing costs time even where nothing is recomputed, and from some
        number on the more the finer it is: once that alone is no faster than the best, finer cuts
        are not looked at.
        """
        limit = budget.memory_bytes
        best: tuple[Variant, Point] | None = None
        for variants in self._codec_fallbacks(budget):
            worth = False
            for variant in variants:
                if best is not None and self._is_idle(variant, best[1], limit):
                    continue
                explored = self.explored(variant)
                if best is not None and not _is_faster(explored.plain, best[1]):
                    continue
                worth = True
                point = explored.within(limit)
                if point is not None and (best is None or _is_faster(point, best[1])):
                    best = variant, point
            if not worth and variants[0].parts > 1:
                break
        if best is None:
            variant, least = self._least()
            program = self._apply(self._rules(variant, least))
            peak = predict(program, self._costs).peak
            raise self._beyond(peak, budget, parts=variant.parts)
        return best

    def _beyond(self, peak: PeakMemory, budget: Budget, *, parts: int) -> Infeasible:
        return beyond_budget(
            peak,
            budget,
            parts=parts,
            refusals=self.refusals,
            has_offload_memory=bool(self._costs.far_bytes),
            leaner_settings=self._source.leaner_settings(),
        )

    def _codec_fallbacks(self, budget: Budget) -> Iterator[tuple[Variant, ...]]:
        """Variants in the order in which they are looked at, those of one cut together.

        The same for every budget: or a larger one could be answered by a slower plan.
        """
        yield (_PLAIN,)
        if budget == Budget():
            return  # nothing is asked for, so nothing is traded
        is_kept = self._is_kept_untraded(budget)
        for parts in (1, *self._splits):
            if not is_kept:
                yield self._levels_of(parts)
                continue
            if parts > 1 and self._source.is_no_faster(micro_batches=parts):
                return
            near = (variant for variant in self._levels_of(parts) if not variant.states)
            yield tuple(near)

    def _levels_of(self, parts: int) -> tuple[Variant, ...]:
        """So many parts with each level of slices; of small parts some levels are the same."""
        levels = (
            replace(self._possible(parts, streams), states=states)
            for states in self._states
            for streams in self._streams
        )
        return tuple({variant.rules: variant for variant in levels}.values())

    def _is_idle(self, variant: Variant, best: Point, limit: int | None) -> bool:
        """What is no faster where memory is not bounded; else, of that, slices of parts or where no
        memory asks for them, and moved states: not worth exploring."""
        if limit is not None and not variant.states:
            is_asked = self.explored().plain.peak_bytes > limit
            if not variant.streams or (variant.parts == 1 and is_asked):
                return False
        program = self._apply(variant.rules)
        return step_seconds(program, self._costs).value >= best.seconds

    def _possible(self, parts: int, streams: tuple[Rule, ...]) -> Variant:
        """In slices where the parts can be sliced as the whole batch can: rows may be too few."""
        variant = Variant(parts=parts, streams=streams)
        if streams and variant not in self._explored:
            try:
                self._apply(variant.rules)
            except Mismatch:
                return variant.unsliced
        return variant

    def _least(self) -> tuple[Variant, Point]:
        leasts = [(variant, e.least) for variant, e in self._explored.items()]
        return min(leasts, key=lambda found: (found[1].peak_bytes, found[0]))

    def _curve(self) -> list[tuple[Variant, Point]]:
        """All variants that were explored, in one chain."""
        owner: dict[int, tuple[Variant, Point]] = {}
        archive = ParetoFront()
        for variant, explored in sorted(self._explored.items() or [(_PLAIN, self.explored())]):
            for point in explored.chain:
                if archive.add(point):
                    owner[id(point)] = variant, point
        return [owner[id(point)] for point in archive]

    def _next_cent(self, point: Point, budget: Budget) -> NextCent | None:
        """The steepest way up from here: most seconds for each further byte."""
        limit = budget.memory_bytes
        if limit is None:
            return None
        ways = [
            NextCent(more_bytes=p.peak_bytes - limit, saved_seconds=point.seconds - p.seconds)
            for _, p in self._curve()
            if p.peak_bytes > limit and p.seconds < point.seconds
        ]
        return max(ways, key=lambda w: (w.saved_seconds / w.more_bytes, w.more_bytes), default=None)

    def _explore(self, variant: Variant) -> Explored:
        program = self._apply(variant.rules)
        if variant.moves_in_passes:
            return self._with_moves(variant)
        if variant.states:
            return reapplied(program, self._costs, known=self.explored(variant.at_home))
        known = self.explored() if variant != _PLAIN and not self._is_brief else None
        again = self._offered(_RECOMPUTE, program)
        coded = self._offered(_QUANTIZE, program) if self._lossy else frozenset()
        if coded:
            again -= settled(program.graph)
            rules = to_rules(program.graph, coded, trade=_QUANTIZE)
            # So that what they cost is known.
            self._source.rewritten(
                self._trades[_QUANTIZE].rewrite(program, rules, self._source).graph
            )
        has_offload_memory = bool(self._costs.far_bytes)
        return explore(
            program,
            self._costs,
            again,
            self._offered(_OFFLOAD, program) if has_offload_memory else (),
            coded,
            self._sliceable(program) if has_offload_memory else {},
            known=known,
            thorough=variant.parts == 1,
            repeats=self._oftener,
            briefly=self._is_brief,
        )

    def _with_moves(self, variant: Variant) -> Explored:
        """Some plans of the same step with all near, each predicted anew: where weights come and go
        depends on what else runs."""
        home = self.explored(variant.at_home)
        archive = ParetoFront()
        for again, near in self._written_out(variant.at_home):
            program = self._trades[_STATE].rewrite(near, variant.states, self._source)
            if program.far_bytes <= self._costs.far_bytes:
                nbytes = peak_bytes(program, self._costs)
                seconds = step_seconds(program, self._costs).value
                archive.add(Point(peak_bytes=nbytes, seconds=seconds, again=again))
        return replace(home, chain=tuple(archive), groups=(), trials=len(archive))

    def _written_out(self, home: Variant) -> list[tuple[frozenset[int], Program]]:
        """A few of its plans, as choices and as programs."""
        if home not in self._written:
            explored = self.explored(home)
            points = few(explored.chain, _MOVED_POINTS)
            if any(rule.op == "gradient" and rule.degree for rule in self._moving):
                # The result of a product that reads slices is not made in slices.
                points += [explored.unsliced(p) for p in points if explored.in_slices(p)]
            found = []
            for point in points:
                again = explored.choice(point)
                own = self._own_rules(explored, replace(point, again=again))
                found.append((again, self._apply((*home.rules, *own))))
            self._written[home] = found
        return self._written[home]

    def _offered(self, trade: str, program: Program) -> frozenset[str]:
        """The values that this trade offers something for."""
        if trade not in self._trades:
            return frozenset()
        offers, _ = self._trades[trade].offers(program, self._source)
        if not self._trades[trade].is_exact:
            return self._allowed(program.graph, offers)
        return matching(program.graph, _rules_of(offers))

    def _sliceable(self, program: Program) -> dict[str, int]:
        """The values that may come back in slices, and in how many."""
        if _OFFLOAD not in self._trades:
            return {}
        offers, _ = self._trades[_OFFLOAD].offers(program, self._source)
        graph, rules = program.graph, [rule for rule in _rules_of(offers) if rule.degree]
        able = {value: rule.degree for value, rule in rule_of(graph, rules).items()}
        slices = worth_slicing(FastEstimator(program, self._costs, ()), able) if able else {}
        rules = [r for r in rules if rule_of(graph, [r]).keys() & slices.keys()]
        # So that what it costs to read them so is known.
        self._trades[_OFFLOAD].rewrite(program, rules, self._source)
        return slices

    def _allowed(self, graph: Graph, offers: Sequence[Offer]) -> frozenset[str]:
        """Of what a lossy trade offers: the values that may lose something."""
        values = matching(graph, _rules_of(offers))
        return frozenset(v for v in values if spot_of(graph, graph.by_name[v]) in self._lossy)

    def _rules(self, variant: Variant, point: Point) -> tuple[Rule, ...]:
        own = self._own_rules(self._explored[variant], point)
        return (*self.layout, *variant.rules, *own)

    def _own_rules(self, explored: Explored, point: Point) -> tuple[Rule, ...]:
        """What is recomputed, kept in 8 bits and moved within the variant."""
        graph = explored.tally.program.graph
        rules = again_rules(graph, explored.values(point))
        coded = to_rules(graph, explored.coded(point), trade=_QUANTIZE)
        moving = _moving(graph, explored.moved(point), explored.in_slices(point))
        return (*rules, *coded, *moving)

    def _apply(self, rules: Sequence[Rule]) -> Program:
        every = tuple(dict.fromkeys((*self.layout, *rules)))
        trades = tuple(self._trades.values())
        return apply_rules(self._whole, every, trades=trades, source=self._whole_source)

    def _apply_on_ranks(self, rules: Sequence[Rule]) -> Program:
        every = tuple(dict.fromkeys((*self.layout, *rules)))
        trades = tuple(self._trades.values())
        return apply_rules_on_ranks(self._whole, every, trades=trades, source=self._whole_source)


def _is_faster(one: Point, other: Point) -> bool:
    """By more than sums of seconds are rounded by: what only looks faster so wins nothing."""
    return one.seconds < other.seconds * (1 - _ROUNDING)


def _finer(degrees: Sequence[int], degree: int, step: int) -> int:
    """So many steps finer than this number of slices, as far as there are."""
    return degrees[min(degrees.index(degree) + step, len(degrees) - 1)]


def _moving(
    graph: Graph, moved: Mapping[str, tuple[int, int]], slices: Mapping[str, int]
) -> tuple[Rule, ...]:
    alike: dict[tuple[int, int, int], list[str]] = {}
    for value, times in moved.items():
        alike.setdefault((*times, slices.get(value, 0)), []).append(value)
    return tuple(
        rule
        for (lag, lead, count), values in sorted(alike.items())
        for rule in to_rules(graph, values, trade=_OFFLOAD, lag=lag, lead=lead, degree=count)
    )


def _rules_of(offers: Sequence[Offer]) -> list[Rule]:
    return sorted({rule for offer in offers for rule in offer.rules})


def _gap(explored: Explored, point: Point, budget: Budget, *, is_moved: bool) -> Gap | None:
    """None where no memory is bounded. With weights or gradients moved, the bound is the step in
    which nothing is: the tally knows no memory without them."""
    tally = explored.tally
    is_often = bool(tally.times_of(point.again))
    if budget.memory_bytes is None or not (tally.unit_of or tally.elsewhere()):
        return None
    least = min(tally.plain_seconds, point.seconds)
    # No plan takes less than one that makes nothing again and moves nothing; slices may be faster.
    is_plain = not point.again and not tally.quickened_seconds
    if not is_moved and not is_plain:
        least = least_seconds(
            tally,
            MinCut(tally),
            limit_bytes=budget.memory_bytes,
            within_seconds=point.seconds,
            repeats=is_often,
        )
    return Gap(
        step_seconds=point.seconds,
        least_seconds=least,
        is_often=is_often,
        has_offload_memory=bool(tally.far_value_on),
        has_codes=bool(tally.coded_value_on),
    )
