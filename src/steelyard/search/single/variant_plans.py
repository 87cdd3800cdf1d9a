"""The plans of each variant of the step, explored on first use.

Not for choosing a variant: see search.py. Not for the search over one program: see explore.py.
"""

import math
from dataclasses import replace

from steelyard.ir.program import Program
from steelyard.ir.quantized_activation import settled
from steelyard.ir.rule import Rule, rule_of, to_rules
from steelyard.ir.rule_kinds import Recomputation, StateOffload, ValueCodec, ValueOffload
from steelyard.plans.stop_request import StopRequest
from steelyard.plans.trade import rule_type, trade_of
from steelyard.predict import peak_bytes, step_seconds
from steelyard.predict.cost_table import CostTable
from steelyard.search.pareto_front import ParetoFront, Point
from steelyard.search.single.estimator.fast_estimator import FastEstimator
from steelyard.search.single.explore import Exploration, reevaluate
from steelyard.search.single.plan_rules import plan_rules
from steelyard.search.single.slicing_candidates import worth_slicing
from steelyard.search.single.step_plans import Explored, spread
from steelyard.search.single.traded_step import TradedStep, rules_of
from steelyard.search.single.variant import PLAIN, Variant

# The number of plans that are tried with offloaded parameters or gradients; each is rewritten in
# full.
_STATE_POINTS = 8


class VariantPlans:
    """The plans of each variant; ``known`` are those found so far.

    With ``repeats``, a value may be recomputed more than once. ``slices_gradients`` says that a
    gradient can be offloaded in slices. If ``is_brief``, only sweeps and
    baseline plans are tried, for a budget that needs none of them.
    """

    def __init__(
        self,
        step: TradedStep,
        costs: CostTable,
        *,
        repeats: bool,
        slices_gradients: bool,
        is_brief: bool = False,
    ) -> None:
        self._step, self._costs = step, costs
        self._allows_repeats, self._slices_gradients = repeats, slices_gradients
        self.is_brief = is_brief
        self.known: dict[Variant, Explored] = {}
        self._explorations: dict[Variant, Exploration] = {}
        self._applied: dict[Variant, list[tuple[frozenset[int], Program]]] = {}

    def explored(self, variant: Variant = PLAIN, stop: StopRequest | None = None) -> Explored:
        """Return the plans of this variant, explored for all amounts of memory."""
        if variant.states:
            if variant not in self.known:
                self.known[variant] = self._explore_with_states(variant)
            return self.known[variant]
        exploration = self._exploration(variant)
        if not self.is_brief:
            exploration.complete(self._refreshed(PLAIN) if variant != PLAIN else None, stop)
        return self._refreshed(variant)

    def explored_within(
        self,
        limit_bytes: int,
        variant: Variant,
        stop: StopRequest,
        *,
        to_beat_seconds: float = math.inf,
    ) -> Explored:
        """Return the plans of this variant, explored around one amount of memory.

        Variants with offloaded states are made from all plans of the variant without them. A
        variant that cannot be considerably faster than ``to_beat_seconds`` is explored briefly.
        """
        if variant.states or self.is_brief:
            return self.explored(variant, stop)
        exploration = self._exploration(variant)
        exploration.improve(limit_bytes, stop, to_beat_seconds=to_beat_seconds)
        return self._refreshed(variant)

    def forget_outdated(self) -> None:
        """Forget the plans of variants that were calibrated after they were explored."""
        for variant, explored in [*self.known.items()]:
            if not explored.estimator.is_calibrated_as(self._costs):
                del self.known[variant]
                self._explorations.pop(variant, None)
                self._applied.pop(variant, None)

    def incomplete(self) -> list[Variant]:
        """Return the known variants that were not explored for all amounts of memory."""
        return [v for v, exploration in self._explorations.items() if not exploration.is_complete]

    def lower_bound(self, limit_bytes: int, variant: Variant) -> float:
        """Return a lower bound on the seconds of all plans of this variant within the limit."""
        return self._exploration(variant).lower_bound(limit_bytes)

    def _exploration(self, variant: Variant) -> Exploration:
        if variant not in self._explorations:
            self._explorations[variant] = self._explore(variant)
        return self._explorations[variant]

    def _refreshed(self, variant: Variant) -> Explored:
        known, exploration = self.known.get(variant), self._explorations[variant]
        if known is None or known.trials != exploration.num_tried:
            self.known[variant] = exploration.explored()
        return self.known[variant]

    def brief(self) -> "VariantPlans":
        """Return plans of the same step that are explored briefly; none is explored yet."""
        return VariantPlans(
            self._step,
            self._costs,
            repeats=self._allows_repeats,
            slices_gradients=self._slices_gradients,
            is_brief=True,
        )

    def rules(self, variant: Variant, point: Point) -> tuple[Rule, ...]:
        """Return all rules of this plan of the variant."""
        rules = plan_rules(self.known[variant], point, self._step.trades)
        return (*self._step.layout, *variant.rules, *rules)

    def least(self) -> tuple[Variant, Point]:
        """Return the explored plan with the least memory."""
        leasts = [(variant, e.least) for variant, e in self.known.items()]
        return min(leasts, key=lambda found: (found[1].peak_bytes, found[0]))

    def _explore(self, variant: Variant) -> Exploration:
        program = self._step.apply(variant.rules)
        is_seeded = variant != PLAIN and not self.is_brief
        if is_seeded:
            self._exploration(PLAIN)
        recomputable = self._step.offered(Recomputation, program)
        quantizable = self._step.offered(ValueCodec, program) if self._step.lossy else frozenset()
        if quantizable:
            recomputable -= settled(program.graph)
            rules = to_rules(program.graph, quantizable, rule_type(self._step.trades, ValueCodec))
            # This makes the source price the codec operators.
            self._step.source.rewritten(self._step.rewrite(ValueCodec, program, rules).graph)
        has_offload_memory = bool(self._costs.offload_bytes)
        return Exploration(
            program,
            self._costs,
            recomputable,
            self._step.offered(ValueOffload, program) if has_offload_memory else (),
            quantizable,
            self._sliceable(program) if has_offload_memory else {},
            known=self._refreshed(PLAIN) if is_seeded else None,
            thorough=variant.parts == 1,
            repeats=self._allows_repeats,
        )

    def _explore_with_states(self, variant: Variant) -> Explored:
        if variant.offloads_in_passes:
            return self._explore_with_offloaded_states(variant)
        program = self._step.apply(variant.rules)
        return reevaluate(program, self._costs, known=self.explored(variant.unoffloaded))

    def _explore_with_offloaded_states(self, variant: Variant) -> Explored:
        """Offload states in some plans of the same step, and predict each plan again.

        The timing of parameter transfers depends on everything else that runs.
        """
        unoffloaded = self.explored(variant.unoffloaded)
        archive = ParetoFront()
        for choices, resident in self._applied_plans(variant.unoffloaded):
            program = self._step.rewrite(StateOffload, resident, variant.states)
            if program.offload_bytes <= self._costs.offload_bytes:
                nbytes = peak_bytes(program, self._costs)
                seconds = step_seconds(program, self._costs).value
                archive.add(Point(peak_bytes=nbytes, seconds=seconds, choices=choices))
        return replace(unoffloaded, chain=tuple(archive), groups=(), trials=len(archive))

    def _applied_plans(self, variant: Variant) -> list[tuple[frozenset[int], Program]]:
        """Return a few plans of the variant, as choices and as programs."""
        if variant not in self._applied:
            explored = self.explored(variant)
            points = spread(explored.chain, _STATE_POINTS)
            if self._slices_gradients:
                # A product that reads slices cannot make its result in slices, so try whole reads.
                points += [explored.unsliced(p) for p in points if explored.slice_counts(p)]
            found = []
            for point in points:
                choices = explored.choices_of(point)
                rules = plan_rules(explored, replace(point, choices=choices), self._step.trades)
                found.append((choices, self._step.apply((*variant.rules, *rules))))
            self._applied[variant] = found
        return self._applied[variant]

    def _sliceable(self, program: Program) -> dict[str, int]:
        """Return the values that may be fetched in slices, with the number of slices of each."""
        trade = trade_of(self._step.trades, ValueOffload)
        if trade is None:
            return {}
        offers, _ = trade.offers(program, self._step.source)
        graph = program.graph
        rules = [rule for rule in rules_of(offers, ValueOffload) if rule.slices]
        counts = {value: rule.slices for value, rule in rule_of(graph, rules).items()}
        worthwhile = (
            worth_slicing(FastEstimator(program, self._costs, ()), counts) if counts else {}
        )
        rules = [r for r in rules if rule_of(graph, [r]).keys() & worthwhile.keys()]
        # This makes the source price the sliced reads.
        trade.rewrite(program, rules, self._step.source)
        return worthwhile
