"""Plans that may lose accuracy: which values may be kept in 8 bits, and whether a plan is believed.

A value must be near enough to itself, and a plan's loss must not drift further in a probe than the
budget allows. What is found is of the probe: nobody promises a final accuracy. Not for running
anything: see accuracy_probe.py.
"""

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from statistics import median

from steelyard import _torch
from steelyard.comm.devices import torch_device_of
from steelyard.errors import Infeasible
from steelyard.ir.gradient_codec import CODE_TRADES
from steelyard.ir.parallel_layout import LAYOUT_TRADES, ParallelLayout
from steelyard.ir.program import Program
from steelyard.ir.rule import CallSite, Rule, matching, spot_of
from steelyard.measure.device_memory import free_bytes
from steelyard.planner.accuracy_probe import MORE_STEPS, STEPS, coding_errors, drift, losses
from steelyard.planner.session import PlanningSession
from steelyard.plans.accuracy import Drift, beyond
from steelyard.plans.budget import Budget
from steelyard.plans.plan import Prediction
from steelyard.plans.trade import Rejection, Remaining
from steelyard.predict import peak_bytes
from steelyard.search import SearchResult, StepSearch
from steelyard.units import format_bytes

QUANTIZE = "quantize_activations"
NOT_PROBED = "a step that cannot be run here cannot be probed"
# A bell-shaped value loses 0.7 % of its norm. What loses more than this has few values that are
# far larger than the others, which then share a handful of codes.
_MOST_ERROR = 0.05
# Each is a search and two short runs.
_ROUNDS = 4
_SHARE_OF_FREE_MEMORY = 0.5


@dataclass(kw_only=True, eq=False)
class LossyPlanner:
    """The plans of one step where accuracy may be lost; what was measured is kept."""

    session: PlanningSession
    _searches: dict[frozenset[CallSite], StepSearch] = field(default_factory=dict)
    _drifts: dict[tuple[Rule, ...], Drift] = field(default_factory=dict)
    # Of steps in which nothing is in few bits; several plans may be held against the same.
    _losses: dict[tuple[Rule, ...], list[float]] = field(default_factory=dict)
    _answered: dict[Budget, StepSearch] = field(default_factory=dict)

    def find(self, budget: Budget) -> tuple[SearchResult, Prediction]:
        """The fastest plan whose drift was seen to be within the budget."""
        barred = self._why_no_need(budget) or self.why_not_probed()
        if barred:
            return self._exactly(budget, barred)
        found, predicted = self._probed(budget)
        return self._told(found), predicted

    def search_for(self, budget: Budget) -> StepSearch:
        """The search that answered this."""
        return self._answered.get(budget, self.session.search)

    def why_not_probed(self) -> str:
        """Why nobody could say what 8 bits do to this step; empty where it can be tried."""
        session, source = self.session, self.session.source
        if QUANTIZE not in {trade.name for trade in session.request.trades}:
            return "a batch that is only imagined cannot be probed"
        if source.is_imagined or not session.request.cluster.is_here:
            return f"is lossy, and {NOT_PROBED}"
        if session.request.optimizer is None:
            return "is lossy, and without an optimizer there is no drift of the loss to probe"
        if _torch.any_hooks(list(source.model.parameters())):
            return "is lossy, and a probe would not run the hooks of the parameters"
        return ""

    def drift_of(self, rules: Sequence[Rule], program: Program, allowed: float) -> Drift | str:
        """The drift of this plan beside the same without few bits; or why that cannot be seen.

        Where the interval of a short probe contains what is ``allowed``, a longer one decides.
        """
        found = self._drift_within(rules, program, STEPS)
        if isinstance(found, str) or found.keeps(allowed) or found.largest > allowed:
            return found
        return self._drift_within(rules, program, MORE_STEPS)

    def _drift_within(self, rules: Sequence[Rule], program: Program, steps: int) -> Drift | str:
        """As far as the first ``steps`` steps show it."""
        key = tuple(sorted(rules))
        if key not in self._drifts or len(self._drifts[key].shares) < steps:
            layout = program.layout
            if layout != ParallelLayout(batch=layout.batch, shares=layout.shares):
                return "only ranks that share the batch, and nothing else, are probed"
            exact = self._exact_twin(rules)
            peaks = (peak_bytes(p, self.session.prices.costs) for p in (program, exact))
            needed = layout.num_ranks * max(peaks)
            free = int(
                _SHARE_OF_FREE_MEMORY * free_bytes(torch_device_of(self.session.source.model))
            )
            if needed > free:
                return f"a probe would take {format_bytes(needed)}, and may {format_bytes(free)}"
            self.session.request.on_progress(f"probing {steps} steps in few bits, and without")
            # Neither which gradients go at once nor when they are waited for changes a loss.
            laid = Rule(trade="shard_batch", degree=layout.batch, shares=layout.shares)
            plain = *(r for r in _kept(rules) if r.trade not in LAYOUT_TRADES), laid
            if len(self._losses.get(plain, ())) < steps:
                self._losses[plain] = self._losses_of(exact, steps)
            theirs = self._losses[plain][:steps]
            if not all(map(math.isfinite, theirs)):
                return f"within {steps} steps the loss is not finite, even without"
            ours = self._losses_of(program, steps)
            self._drifts[key] = drift(ours, theirs, source=self.session.source)
        return self._drifts[key]

    def _losses_of(self, program: Program, steps: int) -> list[float]:
        request = self.session.request
        assert request.optimizer is not None
        offload_memory = request.cluster.offload_memory
        return losses(
            self.session.source,
            program,
            optimizer=request.optimizer,
            offload_memory=offload_memory,
            steps=steps,
        )

    def _exact_twin(self, rules: Sequence[Rule]) -> Program:
        """The plan without its 8 bits, or, to the same bits in less memory, with all that can be
        computed again instead of what waits elsewhere."""
        kept = _kept(rules)
        if len(kept) < len(rules) and ParallelLayout.of(rules).num_ranks > 1:
            return self.session.apply_rules(kept)
        before = [r for r in kept if r.trade != "recompute"]
        again = self.session.recomputed(before)
        costs = self.session.prices.costs
        return min((self.session.apply_rules(kept), again), key=lambda p: peak_bytes(p, costs))

    def _why_no_need(self, budget: Budget) -> str:
        """8 bits buy nothing but memory, and never time."""
        if budget.memory_bytes is None:
            return "is lossy, and memory is not bounded"
        if self.session.search.untraded_bytes <= budget.memory_bytes:
            return "is lossy, and the step fits without it"
        return ""

    def _probed(self, budget: Budget) -> tuple[SearchResult, Prediction]:
        errors = self._errors
        allowed = frozenset(spot for spot, error in errors.items() if error <= _MOST_ERROR)
        barred = f"no value is within {_MOST_ERROR:.0%} of itself in 8 bits"
        for number in range(_ROUNDS):
            if not allowed:
                break
            search = self._search(allowed)
            found = self._at_best(search, budget)
            coded = self._spots(found.program)
            if not coded and number:
                break
            if not coded:
                return found, found.prediction
            seen = self.drift_of(found.rules, found.program, budget.accuracy_loss)
            if isinstance(seen, str):
                barred = f"is lossy, and {seen}"
                break
            if seen.keeps(budget.accuracy_loss):
                self._answered[budget] = search
                metrics = replace(found.prediction.metrics, accuracy_loss=str(seen))
                return found, replace(found.prediction, metrics=metrics)
            barred = beyond(seen, budget.accuracy_loss)
            # Those that lose most are given up, and whatever loses as much.
            bound = median(errors[spot] for spot in coded)
            allowed = frozenset(spot for spot in allowed if errors[spot] < bound)
        return self._exactly(budget, barred)

    def _exactly(self, budget: Budget, barred: str) -> tuple[SearchResult, Prediction]:
        self._answered[budget] = self.session.search
        found = self.session.search.find(budget, barred=barred)
        return found, found.prediction

    def _at_best(self, search: StepSearch, budget: Budget) -> SearchResult:
        """An exact plan is taken where it is no slower.

        Beside 8 bits, what is compared or sorted is not computed again, and the same number of
        trials goes over more choices.
        """
        try:
            found = search.find(budget)
        except Infeasible as least:
            try:
                return self.session.search.find(budget, barred="with it no plan fits the budget")
            except Infeasible as exact_least:
                # What is said to be the least is the least of both.
                bytes_of = (least.least_bytes or 0, exact_least.least_bytes or 0)
                raise least if bytes_of[0] <= bytes_of[1] else exact_least from None
        try:
            exact = self.session.search.find(budget, barred="with it no plan is faster")
        except Infeasible:
            return found
        return min((exact, found), key=lambda f: f.prediction.metrics.step_seconds.value)

    def _search(self, allowed: frozenset[CallSite]) -> StepSearch:
        if allowed not in self._searches:
            self._searches[allowed] = self.session.searching(lossy=allowed)
        return self._searches[allowed]

    def _spots(self, program: Program) -> list[CallSite]:
        graph = program.graph
        spots = (spot_of(graph, graph.by_name[value]) for value in program.coded)
        return [spot for spot in spots if spot is not None]

    @cached_property
    def _errors(self) -> dict[CallSite, float]:
        """By where it is made: what each value that could be kept in 8 bits would lose."""
        session = self.session
        session.request.on_progress("measuring what 8 bits lose")
        graph = session.base.graph
        (trade,) = (t for t in session.request.trades if t.name == QUANTIZE)
        offers, _ = trade.offers(session.base, session.source)
        values = matching(graph, sorted({r for o in offers for r in o.rules}))
        found = coding_errors(session.source, session.base, values)
        spots = ((spot_of(graph, graph.by_name[v]), error) for v, error in found.items())
        return {
            spot: error if math.isfinite(error) else math.inf
            for spot, error in spots
            if spot is not None
        }

    def _told(self, found: SearchResult) -> SearchResult:
        """With the values that are too far from themselves."""
        bad: dict[str, list[float]] = defaultdict(list)
        for spot, error in sorted(self._errors.items(), key=lambda e: str(e[0])):
            if error > _MOST_ERROR:
                bad[spot.op].append(error)
        refusals = (
            Rejection(
                trade=QUANTIZE,
                label=f"{op} ({len(lost)})",
                reason=_too_far(lost),
                left=Remaining.NEVER,
            )
            for op, lost in bad.items()
        )
        return replace(found, refused=(*found.refused, *refusals))


def _kept(rules: Sequence[Rule]) -> tuple[Rule, ...]:
    """Of a plan, what its twin without few bits has too."""
    return tuple(r for r in sorted(rules) if r.trade not in (QUANTIZE, "offload", *CODE_TRADES))


def _too_far(lost: list[float]) -> str:
    if math.inf in lost:
        return "holds something that is not finite in 8 bits"
    most = f"at most {_MOST_ERROR:.0%} may be lost"
    return f"loses up to {_percent(max(lost))} of its norm in 8 bits, and {most}"


def _percent(share: float) -> str:
    return f"{share * 100:.2g} %" if math.isfinite(share) else "to what is not finite"
