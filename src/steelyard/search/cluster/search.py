"""The search for the parallel layout of a deep model on a declared cluster.

Tensor, pipeline and data degrees, ZeRO stage, micro-batches, recompute and offload are chosen
together. Each layout has a lower bound on its step time. Layouts are searched in the order of their
bounds until the best plan is no slower than the next bound. Not for pricing a layout: see
predict/analytic/step.py. Not for ranks of this machine: see search/ranks/layout_search.py.
"""

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from steelyard.hardware.calibration import DECLARED_DOUBT, Calibration, CalibrationCase, Parallelism
from steelyard.hardware.cluster import Cluster
from steelyard.hardware.device import Device
from steelyard.ir.batch_template import BatchTemplate
from steelyard.ir.model_blocks import SAVE_ALL, ActivationPolicy
from steelyard.ir.parallel_layout import ParallelLayout
from steelyard.plans.budget import Budget
from steelyard.plans.plan import Prediction
from steelyard.predict.analytic.prediction import priced
from steelyard.predict.analytic.sections import Section
from steelyard.predict.analytic.step import (
    AnalyticStep,
    LayoutCost,
    StageBlocks,
    analytic_step,
)
from steelyard.predict.cost_table import CostTable
from steelyard.search.cluster.layout_bounds import (
    least_peak_bytes,
    least_seconds_after,
    least_step_seconds,
)
from steelyard.search.cluster.policy_mixture import ALIKE
from steelyard.search.cluster.stage_assignment import RecomputeSet, StageAssignment
from steelyard.search.cluster.template_pricing import TemplatePricing, TemplateSource
from steelyard.search.enumerate_layouts import layouts_of, tensor_degrees
from steelyard.search.simplest_layout import burden, without_a_trade

_NEVER = float("inf")
_ROUNDING = 1e-9


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterPlan:
    """A layout with the activation policies of its blocks, and the predicted step.

    For each stage, ``stages`` lists the policies with their numbers of blocks. ``least_seconds`` is
    a lower bound on the step time of all plans of this layout.
    """

    layout: ParallelLayout
    micro_batch: int
    stages: tuple[tuple[tuple[ActivationPolicy, int], ...], ...]
    step: AnalyticStep
    least_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterCandidate:
    layout: ParallelLayout
    micro_batch: int
    least_seconds: float


Fits = Callable[[ParallelLayout], bool]


def _any(layout: ParallelLayout) -> bool:  # noqa: ARG001 - every layout fits
    return True


class ClusterSearch:
    """The search over the layouts of one step on one cluster.

    ``find_recompute_sets`` returns the sets of recomputed calls that are worth trying for a rank's
    graph.
    """

    def __init__(
        self,
        source: TemplateSource,
        cluster: Cluster,
        *,
        find_recompute_sets: Callable[[BatchTemplate, CostTable], Sequence[RecomputeSet]],
    ) -> None:
        self.pricing = TemplatePricing(source, cluster, find_recompute_sets=find_recompute_sets)
        self._candidates: dict[int, list[ClusterCandidate]] = {}
        self._plans: dict[tuple[ParallelLayout, int, int], ClusterPlan | None] = {}

    def with_samples(self, samples: int) -> "ClusterSearch":
        """Return a search for another global batch, which shares the prices of this one."""
        other = copy.copy(self)
        other.pricing = self.pricing.with_samples(samples)
        other._candidates, other._plans = {}, {}
        return other

    def limit_bytes(self, budget: Budget) -> int:
        """Return the memory limit for each rank: the budget, but no more than the largest device
        memory.
        """
        device_bytes = self.pricing.largest_device_bytes
        return (
            device_bytes if budget.memory_bytes is None else min(device_bytes, budget.memory_bytes)
        )

    def fastest(
        self,
        num_ranks: int,
        limit_bytes: int,
        *,
        fits: Fits = _any,
        most_seconds: float = _NEVER,
    ) -> ClusterPlan | None:
        """Return the simplest of the plans that are about as fast as the fastest.

        Trades that gain nothing are removed. The plan takes at most ``most_seconds``, if there is
        such a plan. None is returned if no layout on this many ranks fits.
        """
        found: list[ClusterPlan] = []
        least = _NEVER
        for candidate in self.candidates(num_ranks):
            if candidate.least_seconds > least * (1 + ALIKE):
                break
            plan = self.plan_layout(candidate, limit_bytes) if fits(candidate.layout) else None
            if plan is not None:
                found.append(plan)
                least = min(least, plan.step.step_seconds)
        max_seconds = max(least, min(least * (1 + ALIKE), most_seconds))
        best = min(
            (plan for plan in found if plan.step.step_seconds <= max_seconds),
            key=lambda plan: (burden(plan.layout, plan.stages), plan.step.step_seconds),
            default=None,
        )
        if best is None:
            return None
        return self._without_useless_trades(best, limit_bytes, fits=fits, most_seconds=max_seconds)

    def _without_useless_trades(
        self, plan: ClusterPlan, limit_bytes: int, *, fits: Fits, most_seconds: float
    ) -> ClusterPlan:
        """Remove trades if the plan fits, and takes at most ``most_seconds``, without them."""
        for layout, stages in without_a_trade(plan.layout, plan.stages):
            if not fits(layout):
                continue
            simpler = replace(self.price_layout(layout, stages), least_seconds=plan.least_seconds)
            if simpler.step.step_seconds <= most_seconds and self.fits_memory(simpler, limit_bytes):
                return self._without_useless_trades(
                    simpler, limit_bytes, fits=fits, most_seconds=most_seconds
                )
        return self._without_useless_overlap(plan, fits)

    def _without_useless_overlap(self, plan: ClusterPlan, fits: Fits) -> ClusterPlan:
        """Remove overlap if it saves no time at all.

        Overlap needs no memory and is the default in the usual data parallelism, so a small gain is
        enough to keep it.
        """
        plain = replace(plan.layout, overlaps=False)
        if not plan.layout.overlaps or not fits(plain):
            return plan
        without = replace(self.price_layout(plain, plan.stages), least_seconds=plan.least_seconds)
        is_as_fast = without.step.step_seconds <= plan.step.step_seconds * (1 + _ROUNDING)
        return without if is_as_fast else plan

    def fits_memory(self, plan: ClusterPlan, limit_bytes: int) -> bool:
        """True if each stage fits the memory of its devices and of their hosts."""
        stage_devices, costs = self.pricing.stage_devices.of(plan.layout), self.stage_costs(plan)
        limits = self.pricing.limits_bytes(stage_devices, limit_bytes)
        resident = all(s.nbytes <= most for s, most in zip(plan.step.stages, limits, strict=True))
        offloaded = (
            costs[n].offloaded_bytes(n, stage) for n, stage in enumerate(self.stage_blocks(plan))
        )
        hosts = (stage_device.device.host_memory_bytes or 0 for stage_device in stage_devices)
        return resident and all(
            nbytes <= limit for nbytes, limit in zip(offloaded, hosts, strict=True)
        )

    def least_seconds(self, num_ranks: int, limit_bytes: int, best: ClusterPlan) -> float:
        """Return a lower bound on the step time of all plans on this many ranks."""
        least = best.least_seconds
        for candidate in self.candidates(num_ranks):
            if candidate.least_seconds >= least:
                break
            plan = self.plan_layout(candidate, limit_bytes)
            if plan is not None:
                least = min(least, plan.least_seconds)
        return least

    def leanest_bytes(self, num_ranks: int, *, fits: Fits = _any) -> int | None:
        """Return a lower bound on the peak of the fullest rank, over all layouts on this many
        ranks.
        """
        found = [candidate for candidate in self.candidates(num_ranks) if fits(candidate.layout)]
        peaks = (self.least_bytes(candidate) for candidate in found)
        return min(peaks, default=None)

    def candidates(self, num_ranks: int) -> list[ClusterCandidate]:
        """Return all layouts on this many ranks, sorted by their lower bound without recompute."""
        if num_ranks not in self._candidates:
            found = [
                ClusterCandidate(
                    layout=layout,
                    micro_batch=samples,
                    least_seconds=least_step_seconds(
                        self.pricing.stage_costs(layout, samples), self.num_blocks
                    ),
                )
                for base, samples in layouts_of(
                    num_ranks,
                    tensor=self.tensor_degrees(),
                    samples=self.pricing.num_samples,
                    blocks=self.num_blocks,
                    is_indivisible=bool(self.why_indivisible),
                )
                for layout in [self.pricing.with_sequence_parallel(base)]
            ]
            self._candidates[num_ranks] = sorted(
                found, key=lambda candidate: candidate.least_seconds
            )
        return self._candidates[num_ranks]

    def plan_layout(self, candidate: ClusterCandidate, limit_bytes: int) -> ClusterPlan | None:
        """Return the fastest plan with this layout that fits, or None."""
        key = candidate.layout, candidate.micro_batch, limit_bytes
        if key not in self._plans:
            self._plans[key] = self._best_plan(candidate, limit_bytes)
        return self._plans[key]

    def prediction(self, plan: ClusterPlan) -> Prediction:
        """Return the full prediction for a plan."""
        doubt = self.doubt_of(plan.layout)
        return priced(self.stage_costs(plan), self.stage_blocks(plan), doubt=doubt)

    def doubt_of(self, layout: ParallelLayout) -> float:
        """Return the relative error of predicted step times for this layout."""
        case = self.case_of(layout)
        known = [c.doubt_of(case) if c else DECLARED_DOUBT for c in self.calibrations.values()]
        return max(known)

    def case_of(self, layout: ParallelLayout) -> CalibrationCase:
        return CalibrationCase(
            kind=Parallelism.of(tensor=layout.tensor, pipeline=layout.pipeline),
            precision=self.pricing.precision,
            parameters=self.pricing.num_parameters,
            devices=layout.num_ranks,
        )

    @property
    def calibrations(self) -> Mapping[Device, Calibration | None]:
        """The calibration of predictions for each class of device, or None."""
        return {
            device: None if device.reached is None else device.reached.calibration
            for device in self.pricing.stage_devices.classes
        }

    def stage_costs(self, plan: ClusterPlan) -> list[LayoutCost]:
        """Return the cost model of each stage on its device."""
        return self.pricing.stage_costs(plan.layout, plan.micro_batch)

    def stage_blocks(self, plan: ClusterPlan) -> list[StageBlocks]:
        """Return the priced blocks of each stage of a plan."""
        layout, samples = plan.layout, plan.micro_batch
        return [
            StageBlocks(
                blocks=tuple(
                    (self.pricing.block(layout.tensor, samples, policy, stage_device.device), count)
                    for policy, count in stage
                )
            )
            for stage_device, stage in zip(
                self.pricing.stage_devices.of(layout), plan.stages, strict=True
            )
        ]

    def price_layout(
        self, layout: ParallelLayout, stages: tuple[tuple[tuple[ActivationPolicy, int], ...], ...]
    ) -> ClusterPlan:
        """Return the plan with the given layout and stages, without a lower bound."""
        layout = self.pricing.with_sequence_parallel(layout)
        samples = self.num_samples // (layout.data * layout.micro_batches)
        unpriced = ClusterPlan(
            layout=layout,
            micro_batch=samples,
            stages=stages,
            step=AnalyticStep(pipeline_seconds=0, exposed_seconds=0, update_seconds=0, stages=()),
            least_seconds=0.0,
        )
        step = analytic_step(self.pricing.stage_costs(layout, samples), self.stage_blocks(unpriced))
        return replace(unpriced, step=step)

    def on_one(self) -> Prediction:
        """Return the prediction for the whole batch on one device, regardless of its memory."""
        cost = self.pricing.one_device_cost()
        stages = [StageBlocks(blocks=((cost.block, self.num_blocks),))]
        return priced([cost], stages, doubt=self.doubt_of(ParallelLayout()))

    def fewest_ranks(self, limit_bytes: int) -> int:
        """Return a lower bound on the number of ranks for weights, gradients and optimizer
        state.
        """
        can_offload = self.pricing.has_host_memory(ParallelLayout())
        nbytes = (
            self.pricing.one_device_cost(offloads_state=can_offload)
            .model_memory(0, self.num_blocks)
            .nbytes
        )
        return max(1, -(-nbytes // limit_bytes))

    def predict_saving_all(self, plan: ClusterPlan) -> Prediction:
        """Return the prediction for the layout if all activations are saved and stages are
        balanced.
        """
        stages = plan.layout.pipeline
        less, more = divmod(self.num_blocks, stages)
        counts = [less + (stage < more) for stage in range(stages)]
        return self.prediction(
            replace(plan, stages=tuple(((SAVE_ALL, count),) for count in counts))
        )

    @property
    def num_samples(self) -> int:
        return self.pricing.num_samples

    @property
    def num_devices(self) -> int:
        return self.pricing.cluster.num_devices

    @property
    def num_blocks(self) -> int:
        return self.pricing.num_blocks

    @property
    def why_indivisible(self) -> str:
        return self.pricing.source.why_indivisible

    def tensor_degrees(self) -> list[int]:
        return tensor_degrees(self.pricing.cluster.tree)

    def _best_plan(self, candidate: ClusterCandidate, limit_bytes: int) -> ClusterPlan | None:
        """Return the fastest plan; optimizer state is offloaded only if memory is short."""
        resident = self._assigned_plan(candidate, candidate.layout, limit_bytes)
        if resident is not None and not any(
            policy != SAVE_ALL for stage in resident.stages for policy, _ in stage
        ):
            return resident
        offloaded = self.with_offloaded_states(candidate, limit_bytes)
        if resident is None or offloaded is None:
            return resident or offloaded
        least = min(resident.least_seconds, offloaded.least_seconds)
        is_as_fast = resident.step.step_seconds <= offloaded.step.step_seconds * (1 + ALIKE)
        simple = [resident, offloaded] if is_as_fast else [offloaded]
        best = min(simple, key=lambda plan: burden(plan.layout, plan.stages))
        return replace(best, least_seconds=least)

    def with_offloaded_states(
        self, candidate: ClusterCandidate | ClusterPlan, limit_bytes: int
    ) -> ClusterPlan | None:
        """Return the plan with offloaded optimizer state, or None if it does not fit.

        None is also returned if a device has no host memory or no link to it.
        """
        if not self.pricing.has_host_memory(candidate.layout):
            return None
        return self._assigned_plan(
            candidate, replace(candidate.layout, offloads_state=True), limit_bytes
        )

    def _assigned_plan(
        self, candidate: ClusterCandidate | ClusterPlan, layout: ParallelLayout, limit_bytes: int
    ) -> ClusterPlan | None:
        """Return the plan with blocks and activation policies assigned to stages, or None."""
        samples = candidate.micro_batch
        if self._least_bytes_of(layout, samples) > limit_bytes:
            return None
        stage_devices, stage_costs = (
            self.pricing.stage_devices.of(layout),
            self.pricing.stage_costs(layout, samples),
        )
        limits = self.pricing.limits_bytes(stage_devices, limit_bytes)
        hosts = [stage_device.device.host_memory_bytes or 0 for stage_device in stage_devices]
        device_of = dict(
            zip(stage_costs, (stage_device.device for stage_device in stage_devices), strict=True)
        )

        def assignment(
            limits: Sequence[float], policies: Sequence[ActivationPolicy]
        ) -> StageAssignment:
            def kinds_on(cost: LayoutCost) -> list[tuple[ActivationPolicy, Section]]:
                device = device_of[cost]
                return [
                    (f, self.pricing.block(layout.tensor, samples, f, device)) for f in policies
                ]

            return StageAssignment(stage_costs, limits, self.num_blocks, kinds_on, hosts)

        plain = assignment([_NEVER] * layout.pipeline, [SAVE_ALL])
        if plain.fit(limits):
            return self._plan_of(plain, stage_costs, samples, limits)
        policies = [
            SAVE_ALL,
            *(
                ActivationPolicy(recomputed=recomputed)
                for recomputed in self.pricing.recompute_sets_of(layout.tensor)[1:]
            ),
        ]
        if self.pricing.has_host_memory(layout):
            policies += [replace(policy, is_offloaded=True) for policy in policies]
        return self._plan_of(assignment(limits, policies), stage_costs, samples, limits)

    def _plan_of(
        self,
        assignment: StageAssignment,
        stage_costs: Sequence[LayoutCost],
        samples: int,
        limits: Sequence[float],
    ) -> ClusterPlan | None:
        stages = assignment.stages()
        if stages is None:
            return None
        stage_blocks = [
            StageBlocks(blocks=tuple((s, n) for (_, s), n in stage if n)) for stage in stages
        ]
        step = analytic_step(stage_costs, stage_blocks)
        if any(s.nbytes > most for s, most in zip(step.stages, limits, strict=True)):
            return None
        after = least_seconds_after(stage_costs, self.num_blocks)
        return ClusterPlan(
            layout=stage_costs[0].layout,
            micro_batch=samples,
            stages=tuple(tuple((policy, n) for (policy, _), n in stage if n) for stage in stages),
            step=step,
            least_seconds=min(assignment.least_seconds() + after, step.step_seconds),
        )

    def least_bytes(self, candidate: ClusterCandidate) -> int:
        """Return a lower bound on the peak of the layout, with offloaded state if that is
        possible.
        """
        layout = candidate.layout
        if self.pricing.has_host_memory(layout):
            layout = replace(layout, offloads_state=True)
        return self._least_bytes_of(layout, candidate.micro_batch)

    def _least_bytes_of(self, layout: ParallelLayout, samples: int) -> int:
        return least_peak_bytes(self.pricing.stage_costs(layout, samples)[0], self.num_blocks)
