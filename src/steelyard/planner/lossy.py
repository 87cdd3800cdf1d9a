"""Plans that may lose accuracy: selects activations to store in 8 bits, and accepts or rejects
plans.

The error of each quantized activation must be small, and the loss drift of a short probe must stay
within the budget. A probe does not guarantee the final accuracy. Not for running the probes: see
accuracy_probe.py.
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
from steelyard.ir.parallel_layout import ParallelLayout
from steelyard.ir.program import Program
from steelyard.ir.rule import BETWEEN_RANKS, CallSite, Rule, matching, of_kind, spot_of, trade_name
from steelyard.ir.rule_kinds import (
    GradientCompression,
    Recomputation,
    ValueCodec,
    ValueOffload,
)
from steelyard.measure.device_memory import free_bytes
from steelyard.planner.accuracy_probe import MORE_STEPS, STEPS, drift, losses, quantization_errors
from steelyard.planner.session import PlanningSession
from steelyard.plans.accuracy import Drift, beyond
from steelyard.plans.budget import Budget
from steelyard.plans.plan import Prediction
from steelyard.plans.trade import Rejection, Remaining, trade_of, value_codec
from steelyard.predict import peak_bytes
from steelyard.search import SearchResult, StepSearch
from steelyard.units import format_bytes

NOT_PROBED = "a step that cannot run here cannot be probed"
# A bell-shaped value loses 0.7 % of its norm. If a value loses more than this share, a few of its
# elements are far larger than the others, which are then left with a handful of codes.
_MAX_ERROR = 0.05
# Each round is one search and two short runs.
_MAX_ROUNDS = 4
_SHARE_OF_FREE_MEMORY = 0.5


@dataclass(kw_only=True, eq=False)
class LossyPlanner:
    """Plans one step that may lose accuracy; keeps its measurements."""

    session: PlanningSession
    _searches: dict[frozenset[CallSite], StepSearch] = field(default_factory=dict)
    _drifts: dict[tuple[Rule, ...], Drift] = field(default_factory=dict)
    # Losses of the exact twins, by rules and layout; several lossy plans may have the same twin.
    _losses: dict[tuple[tuple[Rule, ...], ParallelLayout], list[float]] = field(
        default_factory=dict
    )
    _search_of_budget: dict[Budget, StepSearch] = field(default_factory=dict)

    def find(self, budget: Budget) -> tuple[SearchResult, Prediction]:
        """Return the fastest plan whose probed drift is within the budget."""
        reason = self._why_not_needed(budget) or self.why_not_probed()
        if reason:
            return self._find_exact(budget, reason)
        found, predicted = self._probed(budget)
        return self._with_rejections(found), predicted

    def search_for(self, budget: Budget) -> StepSearch:
        """Return the search that was used for this budget."""
        return self._search_of_budget.get(budget, self.session.search)

    def why_not_probed(self) -> str:
        """Return the reason why this step cannot be probed in 8 bits; empty if it can."""
        session, source = self.session, self.session.source
        if trade_of(session.request.trades, ValueCodec) is None:
            return "a batch without values cannot be probed"
        if source.is_imagined or not session.request.cluster.is_here:
            return f"is lossy, and {NOT_PROBED}"
        if session.request.optimizer is None:
            return "is lossy, and without an optimizer the drift of the loss cannot be probed"
        if _torch.any_hooks(list(source.model.parameters())):
            return "is lossy, and a probe does not run the hooks of parameters"
        return ""

    def probe_drift(self, rules: Sequence[Rule], program: Program, allowed: float) -> Drift | str:
        """Return the loss drift of this plan relative to its exact twin, or why it cannot be
        probed.

        If the interval of a short probe contains ``allowed``, a longer probe decides.
        """
        found = self._drift_over(rules, program, STEPS)
        if isinstance(found, str) or found.keeps(allowed) or found.largest > allowed:
            return found
        return self._drift_over(rules, program, MORE_STEPS)

    def _drift_over(self, rules: Sequence[Rule], program: Program, steps: int) -> Drift | str:
        """Return the drift over the first ``steps`` steps, or why it cannot be probed."""
        key = tuple(sorted(rules))
        if key not in self._drifts or len(self._drifts[key].shares) < steps:
            layout = program.layout
            if layout != ParallelLayout(data=layout.data, shares=layout.shares):
                return "only plans whose ranks share nothing but the batch are probed"
            exact = self._exact_twin(rules)
            peaks = (peak_bytes(p, self.session.prices.costs) for p in (program, exact))
            needed = layout.num_ranks * max(peaks)
            free = int(
                _SHARE_OF_FREE_MEMORY * free_bytes(torch_device_of(self.session.source.model))
            )
            if needed > free:
                return (
                    f"a probe would take {format_bytes(needed)} of memory; {format_bytes(free)} is "
                    "allowed"
                )
            self.session.request.on_progress(f"probing {steps} steps with and without lossy trades")
            # Overlap and shared-memory transfer do not change the loss, so the twin only needs the
            # batch sharding.
            alone = tuple(r for r in _exact_rules(rules) if r.stage not in BETWEEN_RANKS)
            if len(self._losses.get((alone, layout), ())) < steps:
                self._losses[alone, layout] = self._losses_of(exact, steps)
            theirs = self._losses[alone, layout][:steps]
            if not all(map(math.isfinite, theirs)):
                return f"the loss is not finite within {steps} steps, even without lossy trades"
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
        """Return the plan without its 8-bit values, in the variant that needs the least memory.

        On one rank, recomputing everything that can be recomputed is an alternative: it gives the
        same bits, and may need less memory.
        """
        exact = _exact_rules(rules)
        if len(exact) < len(rules) and ParallelLayout.of(rules).num_ranks > 1:
            return self.session.apply_rules(exact)
        before = [r for r in exact if not isinstance(r, Recomputation)]
        recomputed = self.session.recomputed(before)
        costs = self.session.prices.costs
        return min(
            (self.session.apply_rules(exact), recomputed), key=lambda p: peak_bytes(p, costs)
        )

    def _why_not_needed(self, budget: Budget) -> str:
        """Return the reason why 8-bit values are not needed: they only save memory, never time."""
        if budget.memory_bytes is None:
            return "is lossy, and memory is not bounded"
        if self.session.search.untraded_bytes <= budget.memory_bytes:
            return "is lossy, and the step fits without it"
        return ""

    def _probed(self, budget: Budget) -> tuple[SearchResult, Prediction]:
        errors = self._errors
        allowed = frozenset(site for site, error in errors.items() if error <= _MAX_ERROR)
        reason = f"no value has an error below {_MAX_ERROR:.0%} in 8 bits"
        for number in range(_MAX_ROUNDS):
            if not allowed:
                break
            search = self._search(allowed)
            found = self._find_best(search, budget)
            sites = self._quantized_sites(found.program)
            if not sites and number:
                break
            if not sites:
                return found, found.prediction
            drift = self.probe_drift(found.rules, found.program, budget.accuracy_loss)
            if isinstance(drift, str):
                reason = f"is lossy, and {drift}"
                break
            if drift.keeps(budget.accuracy_loss):
                self._search_of_budget[budget] = search
                metrics = replace(found.prediction.metrics, accuracy_loss=str(drift))
                return found, replace(found.prediction, metrics=metrics)
            reason = beyond(drift, budget.accuracy_loss)
            # Drop the half with the largest errors, and all others with equally large errors.
            threshold = median(errors[site] for site in sites)
            allowed = frozenset(site for site in allowed if errors[site] < threshold)
        return self._find_exact(budget, reason)

    def _find_exact(self, budget: Budget, reason: str) -> tuple[SearchResult, Prediction]:
        self._search_of_budget[budget] = self.session.search
        found = self.session.search.find(budget, barred=reason)
        return found, found.prediction

    def _find_best(self, search: StepSearch, budget: Budget) -> SearchResult:
        """Return the faster of the lossy and the exact plan.

        The exact plan can be faster: if 8-bit values are allowed, values that are compared or
        sorted are not recomputed, and the same number of trials is spread over more choices.
        """
        try:
            found = search.find(budget)
        except Infeasible as least:
            try:
                return self.session.search.find(
                    budget, barred="no plan that uses it fits the budget"
                )
            except Infeasible as exact_least:
                # Report the smaller one of both minima.
                bytes_of = (least.least_bytes or 0, exact_least.least_bytes or 0)
                raise least if bytes_of[0] <= bytes_of[1] else exact_least from None
        try:
            exact = self.session.search.find(budget, barred="no plan that uses it is faster")
        except Infeasible:
            return found
        return min((exact, found), key=lambda f: f.prediction.metrics.step_seconds.value)

    def _search(self, allowed: frozenset[CallSite]) -> StepSearch:
        if allowed not in self._searches:
            self._searches[allowed] = self.session.searching(lossy=allowed)
        return self._searches[allowed]

    def _quantized_sites(self, program: Program) -> list[CallSite]:
        graph = program.graph
        sites = (spot_of(graph, graph.by_name[value]) for value in program.quantized)
        return [site for site in sites if site is not None]

    @cached_property
    def _errors(self) -> dict[CallSite, float]:
        """The relative error of each value that could be stored in 8 bits, by call site."""
        session = self.session
        session.request.on_progress("measuring the error of 8-bit values")
        graph = session.base.graph
        trade = value_codec(session.request.trades)
        offers, _ = trade.offers(session.base, session.source)
        offered = {rule for offer in offers for rule in of_kind(offer.rules, ValueCodec)}
        values = matching(graph, sorted(offered))
        found = quantization_errors(session.source, session.base, values, probe=trade.probe)
        sites = ((spot_of(graph, graph.by_name[v]), error) for v, error in found.items())
        return {
            site: error if math.isfinite(error) else math.inf
            for site, error in sites
            if site is not None
        }

    def _with_rejections(self, found: SearchResult) -> SearchResult:
        """Return the result with a rejection of the values whose error is too large."""
        too_large: dict[str, list[float]] = defaultdict(list)
        for site, error in sorted(self._errors.items(), key=lambda e: str(e[0])):
            if error > _MAX_ERROR:
                too_large[site.op].append(error)
        refusals = (
            Rejection(
                trade=trade_name(ValueCodec),
                label=f"{op} ({len(site_errors)})",
                reason=_error_text(site_errors),
                left=Remaining.NEVER,
            )
            for op, site_errors in too_large.items()
        )
        return replace(found, refused=(*found.refused, *refusals))


def _exact_rules(rules: Sequence[Rule]) -> tuple[Rule, ...]:
    """Return the rules that a plan and its exact twin have in common."""
    changed = (ValueCodec, ValueOffload, GradientCompression)
    return tuple(rule for rule in sorted(rules) if not isinstance(rule, changed))


def _error_text(site_errors: list[float]) -> str:
    if math.inf in site_errors:
        return "holds values that are not finite in 8 bits"
    most = f"at most {_MAX_ERROR:.0%} is allowed"
    return f"loses up to {_percent(max(site_errors))} of its norm in 8 bits; {most}"


def _percent(share: float) -> str:
    return f"{share * 100:.2g} %" if math.isfinite(share) else "to what is not finite"
