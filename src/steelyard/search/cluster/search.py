"""The search for the parallel layout of a deep model on a declared cluster.

Tensor, pipeline and data degrees, ZeRO stage, micro-batches, recompute and offload are chosen
together. Each layout has a lower bound on its step time. Layouts are searched in the order of their
bounds until the best plan is no slower than the next bound. Not for pricing a layout: see
predict/analytic/step.py. Not for clusters that run the step: see search/ranks/layout_search.py.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Protocol

from steelyard.hardware.calibration import DECLARED_DOUBT, Calibration, CalibrationCase, Parallelism
from steelyard.hardware.cluster import Cluster
from steelyard.hardware.device import Device
from steelyard.hardware.software_stack import stack_on
from steelyard.ir.batch_template import BatchTemplate
from steelyard.ir.graph import Graph
from steelyard.ir.model_blocks import SAVE_ALL, ActivationPolicy, Blocks, Formats
from steelyard.ir.parallel_layout import ParallelLayout
from steelyard.plans.budget import Budget
from steelyard.plans.plan import Prediction
from steelyard.predict.analytic.node_assignment import NodeAssignment, assign_nodes
from steelyard.predict.analytic.offload import moved
from steelyard.predict.analytic.prediction import priced
from steelyard.predict.analytic.sections import Section, Sections, sections
from steelyard.predict.analytic.step import (
    AnalyticStep,
    LayoutCost,
    StageBlocks,
    deep_step_of,
    tensor_costs,
)
from steelyard.predict.cost_table import CostTable
from steelyard.predict.pipeline.duration import (
    least_interleaved_seconds,
    least_pipeline_seconds,
)
from steelyard.search.cluster.policy_mixture import ALIKE
from steelyard.search.cluster.stage_assignment import RecomputeSet, StageAssignment
from steelyard.search.cluster.stage_devices import StageDevice, StageDevices
from steelyard.search.enumerate_layouts import layouts_of, tensor_degrees
from steelyard.search.simplest_layout import burden, without_a_trade

_NEVER = float("inf")
_ROUNDING = 1e-9


class TemplateSource(Protocol):
    """The captured step at any micro-batch size and tensor parallel degree."""

    @property
    def num_samples(self) -> int: ...
    @property
    def why_indivisible(self) -> str: ...
    @property
    def blocks(self) -> Blocks: ...
    @property
    def formats(self) -> Formats: ...
    def in_parts(self, tensor: int) -> BatchTemplate: ...
    def is_sequence_parallel(self, tensor: int) -> bool: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class _ResizedSource:
    """A source with another global batch size."""

    source: TemplateSource
    num_samples: int

    @property
    def why_indivisible(self) -> str:
        return self.source.why_indivisible

    @property
    def blocks(self) -> Blocks:
        return self.source.blocks

    @property
    def formats(self) -> Formats:
        return self.source.formats

    def in_parts(self, tensor: int) -> BatchTemplate:
        return self.source.in_parts(tensor)

    def is_sequence_parallel(self, tensor: int) -> bool:
        return self.source.is_sequence_parallel(tensor)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterPlan:
    """A layout with the activation policies of its blocks, and the predicted step.

    ``stages`` lists for each stage the policies and the number of blocks with each.
    ``least_seconds`` is a lower bound on the step time of all plans of this layout.
    """

    layout: ParallelLayout
    micro_batch: int
    stages: tuple[tuple[tuple[ActivationPolicy, int], ...], ...]
    step: AnalyticStep
    least_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class _LayoutCandidate:
    layout: ParallelLayout
    micro_batch: int
    least_seconds: float


Fits = Callable[[ParallelLayout], bool]


def _any(layout: ParallelLayout) -> bool:  # noqa: ARG001 - every layout fits
    return True


class ClusterSearch:
    """The search over the layouts of one step on one cluster.

    ``again_of`` returns the recompute sets worth trying for a rank's graph.
    """

    def __init__(
        self,
        source: TemplateSource,
        cluster: Cluster,
        *,
        again_of: Callable[[BatchTemplate, CostTable], Sequence[RecomputeSet]],
    ) -> None:
        self._source, self._cluster, self._again_of = source, cluster, again_of
        self._stage_devices = StageDevices(cluster)
        self._stacks = {device: stack_on(device) for device in self._stage_devices.classes}
        self._sections: dict[tuple[int, int, RecomputeSet, Device], Sections] = {}
        self._blocks: dict[tuple[int, int, ActivationPolicy, Device], Section] = {}
        self._node_assignments: dict[tuple[int, RecomputeSet], NodeAssignment] = {}
        self._graphs: dict[tuple[int, int], Graph] = {}
        self._costs: dict[tuple[int, Device], CostTable] = {}
        self._recompute_sets: dict[int, tuple[RecomputeSet, ...]] = {}
        self._candidates: dict[int, list[_LayoutCandidate]] = {}
        self._plans: dict[tuple[ParallelLayout, int, int], ClusterPlan | None] = {}

    def with_samples(self, samples: int) -> "ClusterSearch":
        """Return a search for another global batch that shares the caches of this one."""
        other = ClusterSearch(
            _ResizedSource(source=self._source, num_samples=samples),
            self._cluster,
            again_of=self._again_of,
        )
        other._sections, other._graphs = self._sections, self._graphs
        other._costs, other._recompute_sets = self._costs, self._recompute_sets
        other._node_assignments, other._blocks = self._node_assignments, self._blocks
        return other

    def limit_bytes(self, budget: Budget) -> int:
        """Return the memory limit per rank: the budget, at most the largest device memory."""
        device_bytes = self._largest_device_bytes
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

        Trades that gain nothing are removed. The plan takes at most ``most_seconds`` if any does.
        Returns None if no layout on this many ranks fits.
        """
        found: list[ClusterPlan] = []
        least = _NEVER
        for candidate in self.ways(num_ranks):
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
        """Remove trades without which the plan fits and takes at most ``most_seconds``."""
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

        Overlap needs no memory and is the default of stock data parallelism, so a small gain is
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
        stage_devices, costs = self._stage_devices.of(plan.layout), self.stage_costs(plan)
        limits = self._limits_bytes(stage_devices, limit_bytes)
        resident = all(s.nbytes <= most for s, most in zip(plan.step.stages, limits, strict=True))
        offloaded = (
            costs[n].far_bytes(n, stage) for n, stage in enumerate(self.stage_blocks(plan))
        )
        hosts = (stage_device.device.host_memory_bytes or 0 for stage_device in stage_devices)
        return resident and all(
            nbytes <= limit for nbytes, limit in zip(offloaded, hosts, strict=True)
        )

    def least_seconds(self, num_ranks: int, limit_bytes: int, best: ClusterPlan) -> float:
        """Return a lower bound on the step time of all plans on this many ranks."""
        least = best.least_seconds
        for candidate in self.ways(num_ranks):
            if candidate.least_seconds >= least:
                break
            plan = self.plan_layout(candidate, limit_bytes)
            if plan is not None:
                least = min(least, plan.least_seconds)
        return least

    def leanest_bytes(self, num_ranks: int, *, fits: Fits = _any) -> int | None:
        """Return the least peak of any layout on this many ranks, on its fullest rank."""
        candidates = [candidate for candidate in self.ways(num_ranks) if fits(candidate.layout)]
        peaks = (self._least_bytes(candidate) for candidate in candidates)
        return min(peaks, default=None)

    def ways(self, num_ranks: int) -> list[_LayoutCandidate]:
        """Return all layouts on this many ranks, by their lower bound without recompute."""
        if num_ranks not in self._candidates:
            found = [
                _LayoutCandidate(
                    layout=layout,
                    micro_batch=samples,
                    least_seconds=self._least_seconds_saving_all(layout, samples),
                )
                for base, samples in layouts_of(
                    num_ranks,
                    tensor=self.tensor_degrees(),
                    samples=self._source.num_samples,
                    blocks=self.num_blocks,
                    is_indivisible=bool(self.why_indivisible),
                )
                for layout in [self._with_sequence_parallel(base)]
            ]
            self._candidates[num_ranks] = sorted(
                found, key=lambda candidate: candidate.least_seconds
            )
        return self._candidates[num_ranks]

    def plan_layout(self, candidate: _LayoutCandidate, limit_bytes: int) -> ClusterPlan | None:
        """Return the fastest plan of this layout that fits, or None."""
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
            precision=self._precision,
            parameters=self._num_parameters,
            devices=layout.num_ranks,
        )

    @property
    def calibrations(self) -> Mapping[Device, Calibration | None]:
        """The calibration of predictions for each class of device, or None."""
        return {
            device: None if device.reached is None else device.reached.calibration
            for device in self._stage_devices.classes
        }

    @cached_property
    def _num_parameters(self) -> int:
        nbytes = self._one_device_cost().model_memory(0, self.num_blocks).weight_bytes
        return nbytes // max(1, self._source.formats.weight_bytes)

    @cached_property
    def _precision(self) -> str:
        """The data type of most FLOPs."""
        flops = Counter[str]()
        for node in self._source.in_parts(1).graph.nodes:
            if node.flops:
                flops[node.outputs[0].dtype] += node.flops
        return max(flops, key=lambda dtype: flops[dtype], default="float32")

    def stage_costs(self, plan: ClusterPlan) -> list[LayoutCost]:
        """Return the cost model of each stage on the device it is assigned to."""
        return self._stage_costs(plan.layout, plan.micro_batch)

    def stage_blocks(self, plan: ClusterPlan) -> list[StageBlocks]:
        """Return the priced blocks of each stage of a plan."""
        layout, samples = plan.layout, plan.micro_batch
        return [
            StageBlocks(
                blocks=tuple(
                    (self._block(layout.tensor, samples, policy, stage_device.device), count)
                    for policy, count in stage
                )
            )
            for stage_device, stage in zip(self._stage_devices.of(layout), plan.stages, strict=True)
        ]

    def price_layout(
        self, layout: ParallelLayout, stages: tuple[tuple[tuple[ActivationPolicy, int], ...], ...]
    ) -> ClusterPlan:
        """Return the plan with the given layout and stages, without a lower bound."""
        layout = self._with_sequence_parallel(layout)
        samples = self.num_samples // (layout.data * layout.micro_batches)
        unpriced = ClusterPlan(
            layout=layout,
            micro_batch=samples,
            stages=stages,
            step=AnalyticStep(pipeline_seconds=0, exposed_seconds=0, update_seconds=0, stages=()),
            least_seconds=0.0,
        )
        step = deep_step_of(self._stage_costs(layout, samples), self.stage_blocks(unpriced))
        return replace(unpriced, step=step)

    def on_one(self) -> Prediction:
        """Return the prediction for the whole batch on one device, regardless of its memory."""
        cost = self._one_device_cost()
        stages = [StageBlocks(blocks=((cost.block, self.num_blocks),))]
        return priced([cost], stages, doubt=self.doubt_of(ParallelLayout()))

    def fewest_ranks(self, limit_bytes: int) -> int:
        """Return a lower bound on the ranks needed for weights, gradients and optimizer state."""
        can_offload = self.has_host_memory(ParallelLayout())
        nbytes = (
            self._one_device_cost(offloads_state=can_offload)
            .model_memory(0, self.num_blocks)
            .nbytes
        )
        return max(1, -(-nbytes // limit_bytes))

    def predict_saving_all(self, plan: ClusterPlan) -> Prediction:
        """Return the prediction for the layout with all activations saved and balanced stages."""
        stages = plan.layout.pipeline
        less, more = divmod(self.num_blocks, stages)
        counts = [less + (stage < more) for stage in range(stages)]
        return self.prediction(
            replace(plan, stages=tuple(((SAVE_ALL, count),) for count in counts))
        )

    @property
    def _largest_device_bytes(self) -> int:
        return max(device.memory_bytes for device in self._stage_devices.classes)

    @property
    def num_samples(self) -> int:
        return self._source.num_samples

    @property
    def num_devices(self) -> int:
        return self._cluster.num_devices

    @property
    def num_blocks(self) -> int:
        return self._source.blocks.count

    @property
    def why_indivisible(self) -> str:
        return self._source.why_indivisible

    def tensor_degrees(self) -> list[int]:
        return tensor_degrees(self._cluster.tree)

    # --- the costs of one layout

    def _least_seconds_saving_all(self, layout: ParallelLayout, samples: int) -> float:
        """Return a lower bound on the step time of the layout without recompute.

        The slowest stage takes at least its share of the total work at the combined speed of all
        stages, and at least its share of blocks on the fastest stage.
        """
        stage_costs = self._stage_costs(layout, samples)
        blocks, stages = self.num_blocks, layout.pipeline
        block_seconds = {
            cost: cost.in_turn(cost.block) if blocks else 0.0 for cost in dict.fromkeys(stage_costs)
        }
        ends = {s: stage_costs[s].ends_seconds(s) for s in _end_stages(stages)}
        inner = Counter(stage_costs[1:-1])
        around = [
            *((stage_costs[s], seconds) for s, seconds in ends.items()),
            *(
                (cost, count * cost.ends_seconds(_inner_stage(stages)))
                for cost, count in inner.items()
            ),
        ]
        fastest_block, most = min(block_seconds.values()), -(-blocks // stages)
        slowest = most * fastest_block + min(ends.values())
        if fastest_block:
            speed = sum(1 / block_seconds[cost] for cost in stage_costs)
            slowest = max(
                slowest, (blocks + sum(t / block_seconds[cost] for cost, t in around)) / speed
            )
        total = blocks * fastest_block + sum(seconds for _, seconds in around)
        pipeline = self._least_pipeline_seconds(stage_costs, block_seconds, slowest, total)
        return pipeline + self._least_after(stage_costs)

    def _least_pipeline_seconds(
        self,
        stage_costs: Sequence[LayoutCost],
        block_seconds: Mapping[LayoutCost, float],
        slowest: float,
        total: float,
    ) -> float:
        layout = stage_costs[0].layout
        if layout.virtual == 1:
            return least_pipeline_seconds(layout, slowest=slowest, total=total)
        each = self.num_blocks // layout.pipeline
        last = each * block_seconds[stage_costs[-1]] + stage_costs[-1].ends_seconds(
            layout.pipeline - 1
        )
        return least_interleaved_seconds(
            layout,
            slowest=slowest,
            last=last,
            first_runs=sum(each * block_seconds[cost] for cost in stage_costs[:-1])
            / layout.virtual,
        )

    def _least_after(self, stage_costs: Sequence[LayoutCost]) -> float:
        """Return a lower bound on the seconds after the pipeline: gradient exchange and update.

        Some stage has at least an equal share of the blocks to exchange and update.
        """
        blocks, layout = self.num_blocks, stage_costs[0].layout
        inner, share = _inner_stage(layout.pipeline), -(-blocks // layout.pipeline)
        most = blocks - layout.pipeline + 1
        distinct_costs = dict.fromkeys(stage_costs)
        exposed = min(
            cost.exposed_seconds(inner, StageBlocks(blocks=((cost.block, n),)))
            for cost in distinct_costs
            for n in (share, most)
        )
        return exposed + min(cost.update_seconds(inner, share) for cost in distinct_costs)

    def _best_plan(self, candidate: _LayoutCandidate, limit_bytes: int) -> ClusterPlan | None:
        """Return the fastest plan, with offloaded optimizer state only if memory is short."""
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
        self, candidate: _LayoutCandidate | ClusterPlan, limit_bytes: int
    ) -> ClusterPlan | None:
        """Return the plan with offloaded optimizer state, or None if it does not fit.

        Returns None as well if a device has no host memory or no link to it.
        """
        if not self.has_host_memory(candidate.layout):
            return None
        return self._assigned_plan(
            candidate, replace(candidate.layout, offloads_state=True), limit_bytes
        )

    def _assigned_plan(
        self, candidate: _LayoutCandidate | ClusterPlan, layout: ParallelLayout, limit_bytes: int
    ) -> ClusterPlan | None:
        """Return the plan with blocks and activation policies assigned to stages, or None."""
        samples = candidate.micro_batch
        if self._least_bytes_of(layout, samples) > limit_bytes:
            return None
        stage_devices, stage_costs = (
            self._stage_devices.of(layout),
            self._stage_costs(layout, samples),
        )
        limits = self._limits_bytes(stage_devices, limit_bytes)
        hosts = [stage_device.device.host_memory_bytes or 0 for stage_device in stage_devices]
        device_of = dict(
            zip(stage_costs, (stage_device.device for stage_device in stage_devices), strict=True)
        )

        def assignment(
            limits: Sequence[float], policies: Sequence[ActivationPolicy]
        ) -> StageAssignment:
            def kinds_on(cost: LayoutCost) -> list[tuple[ActivationPolicy, Section]]:
                device = device_of[cost]
                return [(f, self._block(layout.tensor, samples, f, device)) for f in policies]

            return StageAssignment(stage_costs, limits, self.num_blocks, kinds_on, hosts)

        plain = assignment([_NEVER] * layout.pipeline, [SAVE_ALL])
        if plain.fit(limits):
            return self._plan_of(plain, stage_costs, samples, limits)
        policies = [
            SAVE_ALL,
            *(
                ActivationPolicy(recomputed=recomputed)
                for recomputed in self._recompute_sets_of(layout.tensor)[1:]
            ),
        ]
        if self.has_host_memory(layout):
            policies += [replace(policy, is_offloaded=True) for policy in policies]
        return self._plan_of(assignment(limits, policies), stage_costs, samples, limits)

    def _limits_bytes(self, stage_devices: Sequence[StageDevice], limit_bytes: int) -> list[int]:
        """Return the memory limit of each stage.

        A limit above the largest device adds the excess to every device.
        """
        more = max(0, limit_bytes - self._largest_device_bytes)
        return [
            min(limit_bytes, stage_device.memory_bytes + more) for stage_device in stage_devices
        ]

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
        step = deep_step_of(stage_costs, stage_blocks)
        if any(s.nbytes > most for s, most in zip(step.stages, limits, strict=True)):
            return None
        after = self._least_after(stage_costs)
        return ClusterPlan(
            layout=stage_costs[0].layout,
            micro_batch=samples,
            stages=tuple(tuple((policy, n) for (policy, _), n in stage if n) for stage in stages),
            step=step,
            least_seconds=min(assignment.least_seconds() + after, step.step_seconds),
        )

    def _least_bytes(self, candidate: _LayoutCandidate) -> int:
        resident = self._least_bytes_of(candidate.layout, candidate.micro_batch)
        if not self.has_host_memory(candidate.layout):
            return resident
        return self._least_bytes_of(
            replace(candidate.layout, offloads_state=True), candidate.micro_batch
        )

    def _least_bytes_of(self, layout: ParallelLayout, samples: int) -> int:
        """Return a lower bound on the peak of the fullest rank, with no saved activations.

        The first and last stages have the fewest possible blocks, some inner stage the most.
        """
        cost = self._stage_costs(layout, samples)[0]
        most = -(-self.num_blocks // layout.pipeline)
        fewest = most if layout.virtual > 1 else min(1, most) if layout.pipeline > 1 else most
        inner = cost.model_memory(_inner_stage(layout.pipeline), most).nbytes
        ends = (
            cost.model_memory(s, fewest).nbytes + cost.around_bytes(s) + cost.ending_bytes(s)
            for s in _end_stages(layout.pipeline)
        )
        return max(*ends, inner if layout.pipeline > 2 else 0)

    def _stage_costs(self, layout: ParallelLayout, samples: int) -> list[LayoutCost]:
        """Return the cost model of each stage on the device it is assigned to."""
        stage_devices = self._stage_devices.of(layout)
        cost_of = {
            stage_device: self._stage_cost(stage_device, layout, samples)
            for stage_device in dict.fromkeys(stage_devices)
        }
        return [cost_of[stage_device] for stage_device in stage_devices]

    def _stage_cost(self, target: StageDevice, layout: ParallelLayout, samples: int) -> LayoutCost:
        return LayoutCost(
            self._sections_of(layout.tensor, samples, (), target.device), self._cluster, layout,
            self._source.formats, self._stacks[target.device], device=target.device,
            place=target.stage,
        )  # fmt: skip

    def _one_device_cost(self, *, offloads_state: bool = False) -> LayoutCost:
        """Return the cost model of the whole step on the fastest device."""
        alone = StageDevice(device=self._cluster.fastest, memory_bytes=0, stage=0)
        return self._stage_cost(
            alone, ParallelLayout(offloads_state=offloads_state), self._source.num_samples
        )

    def has_host_memory(self, layout: ParallelLayout) -> bool:
        """True if each device of the layout has host memory and a link to it."""
        devices = {stage_device.device for stage_device in self._stage_devices.of(layout)}
        return all(d.host_link is not None and d.host_memory_bytes for d in devices)

    def _block(
        self, tensor: int, samples: int, policy: ActivationPolicy, device: Device
    ) -> Section:
        key = tensor, samples, policy, device
        if key not in self._blocks:
            block = self._sections_of(tensor, samples, policy.recomputed, device).block
            if policy.is_offloaded:
                assert device.host_link is not None, "offloaded states have a link to the host"
                block = moved(block, device.host_link)
            self._blocks[key] = block
        return self._blocks[key]

    def _sections_of(
        self, tensor: int, samples: int, recomputed: RecomputeSet, device: Device
    ) -> Sections:
        key = tensor, samples, recomputed, device
        if key not in self._sections:
            blocks = self._source.blocks
            self._sections[key] = sections(
                self._graph(tensor, samples),
                self.costs_of(tensor, device),
                self._with_sequence_parallel(ParallelLayout(tensor=tensor)),
                ActivationPolicy(recomputed=recomputed),
                blocks=blocks.path,
                first=blocks.first,
                stack=self._stacks[device],
                assigned=self._node_assignment(tensor, recomputed),
            )
        return self._sections[key]

    def _with_sequence_parallel(self, layout: ParallelLayout) -> ParallelLayout:
        """Return the layout with sequence parallelism if the model supports it.

        Sequence parallelism gathers activations again for the backward pass, and sends shards to
        the next stage (Korthikanti et al., 2022, section 4.2.2).
        """
        is_sequence_parallel = self._source.is_sequence_parallel(layout.tensor)
        return replace(layout, regathers_activations=is_sequence_parallel)

    def _node_assignment(self, tensor: int, recomputed: RecomputeSet) -> NodeAssignment:
        key = tensor, recomputed
        if key not in self._node_assignments:
            blocks = self._source.blocks
            layout = self._with_sequence_parallel(ParallelLayout(tensor=tensor))
            policy = ActivationPolicy(recomputed=recomputed)
            graph = self._source.in_parts(tensor).graph
            self._node_assignments[key] = assign_nodes(
                graph, layout, policy, blocks=blocks.path, first=blocks.first
            )
        return self._node_assignments[key]

    def _graph(self, tensor: int, samples: int) -> Graph:
        if (tensor, samples) not in self._graphs:
            self._graphs[tensor, samples] = self._source.in_parts(tensor).at(samples)
        return self._graphs[tensor, samples]

    def costs_of(self, tensor: int, device: Device) -> CostTable:
        if (tensor, device) not in self._costs:
            first = self._stage_devices.first_of[device]
            layout = ParallelLayout(tensor=tensor)
            self._costs[tensor, device] = tensor_costs(self._cluster, layout, first=first)
        return self._costs[tensor, device]

    def _recompute_sets_of(self, tensor: int) -> tuple[RecomputeSet, ...]:
        """Return the recompute sets found for the fastest device, which are used on all devices."""
        if tensor not in self._recompute_sets:
            sampled = self._source.in_parts(tensor)
            costs = self.costs_of(tensor, self._cluster.fastest)
            self._recompute_sets[tensor] = tuple(self._again_of(sampled, costs))
        return self._recompute_sets[tensor]


def _end_stages(stages: int) -> tuple[int, ...]:
    return (0,) if stages == 1 else (0, stages - 1)


def _inner_stage(stages: int) -> int:
    """Return a stage that is neither first nor last, or 0 if there is none."""
    return 1 if stages > 2 else 0
