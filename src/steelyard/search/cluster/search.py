"""How a deep model's step lies on a declared cluster: tensor, pipeline and data degrees, states,
micro-batches and what is computed again, chosen together.

Every layout there is has a time that it cannot go below; they are looked into from the least of
these on, until what was found is no slower than what is left. Not for pricing one: see
predict/analytic/step.py. Not for clusters that are here: see search/ranks/layout_search.py.
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
from steelyard.ir.cluster_layout import Blocks, ClusterLayout, Formats
from steelyard.ir.graph import Graph
from steelyard.plans.budget import Budget
from steelyard.plans.plan import Prediction
from steelyard.predict.analytic.node_assignment import NodeAssignment, belonging
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
from steelyard.search.cluster.enumerate_layouts import layouts_of, tensor_degrees
from steelyard.search.cluster.policy_mixture import ALIKE
from steelyard.search.cluster.stage_assignment import (
    KEPT,
    ActivationPolicy,
    RecomputeSet,
    StageAssignment,
)
from steelyard.search.cluster.stage_devices import StageDevice, StageDevices
from steelyard.search.simplest_layout import burden, without_a_trade

_NEVER = float("inf")
_ROUNDING = 1e-9


class TemplateSource(Protocol):
    """A step at any micro-batch, and that of one of the ranks that share its tensors."""

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
class _WithSamples:
    """A source with a batch of another size."""

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
    """One layout with its stages: of each, what becomes of what blocks make, and in how many of
    them. ``least_seconds`` is what no plan in this layout goes below."""

    layout: ClusterLayout
    micro_batch: int
    stages: tuple[tuple[tuple[ActivationPolicy, int], ...], ...]
    step: AnalyticStep
    least_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class _LayoutCandidate:
    layout: ClusterLayout
    micro_batch: int
    least_seconds: float


Fits = Callable[[ClusterLayout], bool]


def _any(layout: ClusterLayout) -> bool:  # noqa: ARG001 - all are welcome
    return True


class ClusterSearch:
    """``again_of`` gives the sets of calls that are worth computing again, of a rank's graph."""

    def __init__(
        self,
        source: TemplateSource,
        cluster: Cluster,
        *,
        again_of: Callable[[BatchTemplate, CostTable], Sequence[RecomputeSet]],
    ) -> None:
        self._source, self._cluster, self._again_of = source, cluster, again_of
        self._places = StageDevices(cluster)
        self._stacks = {device: stack_on(device) for device in self._places.classes}
        self._sections: dict[tuple[int, int, RecomputeSet, Device], Sections] = {}
        self._blocks: dict[tuple[int, int, ActivationPolicy, Device], Section] = {}
        self._belonging: dict[tuple[int, RecomputeSet], NodeAssignment] = {}
        self._graphs: dict[tuple[int, int], Graph] = {}
        self._costs: dict[tuple[int, Device], CostTable] = {}
        self._sets: dict[int, tuple[RecomputeSet, ...]] = {}
        self._ways: dict[int, list[_LayoutCandidate]] = {}
        self._laid: dict[tuple[ClusterLayout, int, int], ClusterPlan | None] = {}

    def with_samples(self, samples: int) -> "ClusterSearch":
        """The same step on another global batch; what is known of parts of it is shared."""
        other = ClusterSearch(
            _WithSamples(source=self._source, num_samples=samples),
            self._cluster,
            again_of=self._again_of,
        )
        other._sections, other._graphs = self._sections, self._graphs
        other._costs, other._sets = self._costs, self._sets
        other._belonging, other._blocks = self._belonging, self._blocks
        return other

    def limit_bytes(self, budget: Budget) -> int:
        """No rank may hold more than its device has, whatever the budget says."""
        has = self._most_bytes
        return has if budget.memory_bytes is None else min(has, budget.memory_bytes)

    def fastest(
        self,
        num_ranks: int,
        limit_bytes: int,
        *,
        fits: Fits = _any,
        most_seconds: float = _NEVER,
    ) -> ClusterPlan | None:
        """Of the layouts that are about as fast as the fastest the simplest, without trades that it
        can do without; None where no layout of so many ranks fits. It takes ``most_seconds`` at
        most where any does.
        """
        found: list[ClusterPlan] = []
        least = _NEVER
        for way in self.ways(num_ranks):
            if way.least_seconds > least * (1 + ALIKE):
                break
            laid = self.laid(way, limit_bytes) if fits(way.layout) else None
            if laid is not None:
                found.append(laid)
                least = min(least, laid.step.step_seconds)
        alike = max(least, min(least * (1 + ALIKE), most_seconds))
        best = min(
            (laid for laid in found if laid.step.step_seconds <= alike),
            key=lambda laid: (burden(laid.layout, laid.stages), laid.step.step_seconds),
            default=None,
        )
        if best is None:
            return None
        return self._without_needless(best, limit_bytes, fits=fits, most_seconds=alike)

    def _without_needless(
        self, laid: ClusterPlan, limit_bytes: int, *, fits: Fits, most_seconds: float
    ) -> ClusterPlan:
        """Without each trade without which it fits as well and takes no more than so long."""
        for layout, stages in without_a_trade(laid.layout, laid.stages):
            if not fits(layout):
                continue
            simpler = replace(self.priced_as(layout, stages), least_seconds=laid.least_seconds)
            if simpler.step.step_seconds <= most_seconds and self.holds(simpler, limit_bytes):
                return self._without_needless(
                    simpler, limit_bytes, fits=fits, most_seconds=most_seconds
                )
        return self._without_overlap_in_vain(laid, fits)

    def _without_overlap_in_vain(self, laid: ClusterPlan, fits: Fits) -> ClusterPlan:
        """Overlap holds nothing and is what stock data parallelism does: it is left out only where
        it saves no time at all."""
        plain = replace(laid.layout, overlaps=False)
        if not laid.layout.overlaps or not fits(plain):
            return laid
        without = replace(self.priced_as(plain, laid.stages), least_seconds=laid.least_seconds)
        is_as_fast = without.step.step_seconds <= laid.step.step_seconds * (1 + _ROUNDING)
        return without if is_as_fast else laid

    def holds(self, laid: ClusterPlan, limit_bytes: int) -> bool:
        """Whether each stage has room where it lies, on its devices and in their hosts' memory."""
        places, on = self._places.of(laid.layout), self.on_places(laid)
        limits = self._limits_bytes(places, limit_bytes)
        near = all(s.nbytes <= most for s, most in zip(laid.step.stages, limits, strict=True))
        far = (on[n].far_bytes(n, stage) for n, stage in enumerate(self.held(laid)))
        hosts = (place.device.host_memory_bytes or 0 for place in places)
        return near and all(held <= has for held, has in zip(far, hosts, strict=True))

    def least_seconds(self, num_ranks: int, limit_bytes: int, best: ClusterPlan) -> float:
        """No plan on so many ranks is faster, of all that could be offered here."""
        least = best.least_seconds
        for way in self.ways(num_ranks):
            if way.least_seconds >= least:
                break
            laid = self.laid(way, limit_bytes)
            if laid is not None:
                least = min(least, laid.least_seconds)
        return least

    def leanest_bytes(self, num_ranks: int, *, fits: Fits = _any) -> int | None:
        """The least that any layout of so many ranks holds on its fullest rank."""
        ways = [way for way in self.ways(num_ranks) if fits(way.layout)]
        held = (self._least_bytes(way) for way in ways)
        return min(held, default=None)

    def ways(self, num_ranks: int) -> list[_LayoutCandidate]:
        """All layouts of so many ranks, what is fastest with all kept first."""
        if num_ranks not in self._ways:
            found = [
                _LayoutCandidate(
                    layout=layout,
                    micro_batch=samples,
                    least_seconds=self._least_with_all_kept(layout, samples),
                )
                for each, samples in layouts_of(
                    num_ranks,
                    tensor=self.tensor_degrees(),
                    samples=self._source.num_samples,
                    blocks=self.num_blocks,
                    is_whole=bool(self.why_indivisible),
                )
                for layout in [self._as_in_parts(each)]
            ]
            self._ways[num_ranks] = sorted(found, key=lambda way: way.least_seconds)
        return self._ways[num_ranks]

    def laid(self, way: _LayoutCandidate, limit_bytes: int) -> ClusterPlan | None:
        """The fastest that fits of this layout, with as little computed again as can be."""
        key = way.layout, way.micro_batch, limit_bytes
        if key not in self._laid:
            self._laid[key] = self._fitted(way, limit_bytes)
        return self._laid[key]

    def prediction(self, laid: ClusterPlan) -> Prediction:
        """All that is said of a layout with its stages."""
        doubt = self.doubt_of(laid.layout)
        return priced(self.on_places(laid), self.held(laid), doubt=doubt)

    def doubt_of(self, layout: ClusterLayout) -> float:
        """The share by which a step of this layout may take more or less than is predicted."""
        case = self.case_of(layout)
        known = [c.doubt_of(case) if c else DECLARED_DOUBT for c in self.calibrations.values()]
        return max(known)

    def case_of(self, layout: ClusterLayout) -> CalibrationCase:
        return CalibrationCase(
            kind=Parallelism.of(tensor=layout.tensor, pipeline=layout.pipeline),
            precision=self._precision,
            parameters=self._num_parameters,
            devices=layout.num_ranks,
        )

    @property
    def calibrations(self) -> Mapping[Device, Calibration | None]:
        """Of each class of device, what is known of predictions for it."""
        return {
            device: None if device.reached is None else device.reached.calibration
            for device in self._places.classes
        }

    @cached_property
    def _num_parameters(self) -> int:
        held = self._alone().model_memory(0, self.num_blocks).weight_bytes
        return held // max(1, self._source.formats.weight_bytes)

    @cached_property
    def _precision(self) -> str:
        """The format in which most FLOPs are computed."""
        flops = Counter[str]()
        for node in self._source.in_parts(1).graph.nodes:
            if node.flops:
                flops[node.outputs[0].dtype] += node.flops
        return max(flops, key=lambda dtype: flops[dtype], default="float32")

    def on_places(self, laid: ClusterPlan) -> list[LayoutCost]:
        """Of each of its stages, what says what it takes where it lies."""
        return self._on_places(laid.layout, laid.micro_batch)

    def held(self, laid: ClusterPlan) -> list[StageBlocks]:
        """The stages of a layout, with what their blocks take."""
        layout, samples = laid.layout, laid.micro_batch
        return [
            StageBlocks(
                blocks=tuple(
                    (self._block(layout.tensor, samples, fate, place.device), count)
                    for fate, count in stage
                )
            )
            for place, stage in zip(self._places.of(layout), laid.stages, strict=True)
        ]

    def priced_as(
        self, layout: ClusterLayout, stages: tuple[tuple[tuple[ActivationPolicy, int], ...], ...]
    ) -> ClusterPlan:
        """A layout that is given and not looked for; nothing is known of what could be faster."""
        layout = self._as_in_parts(layout)
        samples = self.num_samples // (layout.data * layout.micro_batches)
        unpriced = ClusterPlan(
            layout=layout,
            micro_batch=samples,
            stages=stages,
            step=AnalyticStep(pipeline_seconds=0, exposed_seconds=0, update_seconds=0, stages=()),
            least_seconds=0.0,
        )
        step = deep_step_of(self._on_places(layout, samples), self.held(unpriced))
        return replace(unpriced, step=step)

    def on_one(self) -> Prediction:
        """The whole batch on one device, whether it has the memory or not."""
        laid = self._alone()
        stages = [StageBlocks(blocks=((laid.block, self.num_blocks),))]
        return priced([laid], stages, doubt=self.doubt_of(ClusterLayout()))

    def fewest_ranks(self, limit_bytes: int) -> int:
        """No fewer hold the model with its gradients and states, however it lies."""
        far = self.leads_to_hosts(ClusterLayout())
        held = self._alone(far_states=far).model_memory(0, self.num_blocks).nbytes
        return max(1, -(-held // limit_bytes))

    def with_all_kept(self, laid: ClusterPlan) -> Prediction:
        """The same with nothing computed again, on stages of about equally many blocks."""
        stages = laid.layout.pipeline
        less, more = divmod(self.num_blocks, stages)
        counts = [less + (stage < more) for stage in range(stages)]
        return self.prediction(replace(laid, stages=tuple(((KEPT, count),) for count in counts)))

    @property
    def _most_bytes(self) -> int:
        return max(device.memory_bytes for device in self._places.classes)

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

    # --- what one layout takes

    def _least_with_all_kept(self, layout: ClusterLayout, samples: int) -> float:
        """The slowest stage takes its share of all at least, by how fast each is, and its share of
        blocks on the fastest."""
        laid = self._on_places(layout, samples)
        blocks, stages = self.num_blocks, layout.pipeline
        each = {on: on.in_turn(on.block) if blocks else 0.0 for on in dict.fromkeys(laid)}
        ends = {s: laid[s].ends_seconds(s) for s in _told_apart(stages)}
        inner = Counter(laid[1:-1])
        around = [
            *((laid[s], seconds) for s, seconds in ends.items()),
            *((on, count * on.ends_seconds(_inner(stages))) for on, count in inner.items()),
        ]
        quickest, most = min(each.values()), -(-blocks // stages)
        slowest = most * quickest + min(ends.values())
        if quickest:
            speed = sum(1 / each[on] for on in laid)
            slowest = max(slowest, (blocks + sum(t / each[on] for on, t in around)) / speed)
        total = blocks * quickest + sum(seconds for _, seconds in around)
        belt = layout.micro_batches * slowest + (total - slowest) / layout.virtual
        return belt + self._least_after(laid)

    def _least_after(self, laid: Sequence[LayoutCost]) -> float:
        """Some stage holds an equal share of the blocks, and exchanges and updates that."""
        blocks, layout = self.num_blocks, laid[0].layout
        inner, share = _inner(layout.pipeline), -(-blocks // layout.pipeline)
        most = blocks - layout.pipeline + 1
        several = dict.fromkeys(laid)
        exposed = min(
            on.exposed_seconds(inner, StageBlocks(blocks=((on.block, n),)))
            for on in several
            for n in (share, most)
        )
        return exposed + min(on.update_seconds(inner, share) for on in several)

    def _fitted(self, way: _LayoutCandidate, limit_bytes: int) -> ClusterPlan | None:
        """What the optimizer keeps goes to the hosts only where something has to."""
        near = self._divided(way, way.layout, limit_bytes)
        if near is not None and not any(fate != KEPT for stage in near.stages for fate, _ in stage):
            return near
        far = self.with_far_states(way, limit_bytes)
        if near is None or far is None:
            return near or far
        least = min(near.least_seconds, far.least_seconds)
        is_alike = near.step.step_seconds <= far.step.step_seconds * (1 + ALIKE)
        simple = [near, far] if is_alike else [far]
        best = min(simple, key=lambda laid: burden(laid.layout, laid.stages))
        return replace(best, least_seconds=least)

    def with_far_states(
        self, way: _LayoutCandidate | ClusterPlan, limit_bytes: int
    ) -> ClusterPlan | None:
        """None where that does not fit either, or where nothing leads to the hosts."""
        if not self.leads_to_hosts(way.layout):
            return None
        return self._divided(way, replace(way.layout, far_states=True), limit_bytes)

    def _divided(
        self, way: _LayoutCandidate | ClusterPlan, layout: ClusterLayout, limit_bytes: int
    ) -> ClusterPlan | None:
        """The blocks of a way to lie among its stages, with what becomes of what each makes."""
        samples = way.micro_batch
        if self._least_bytes_of(layout, samples) > limit_bytes:
            return None
        places, laid = self._places.of(layout), self._on_places(layout, samples)
        limits = self._limits_bytes(places, limit_bytes)
        hosts = [place.device.host_memory_bytes or 0 for place in places]
        device_of = dict(zip(laid, (place.device for place in places), strict=True))

        def work(limits: Sequence[float], fates: Sequence[ActivationPolicy]) -> StageAssignment:
            def kinds_on(on: LayoutCost) -> list[tuple[ActivationPolicy, Section]]:
                device = device_of[on]
                return [(f, self._block(layout.tensor, samples, f, device)) for f in fates]

            return StageAssignment(laid, limits, self.num_blocks, kinds_on, hosts)

        plain = work([_NEVER] * layout.pipeline, [KEPT])
        if plain.fit(limits):
            return self._laid_by(plain, laid, samples, limits)
        fates = [
            KEPT,
            *(ActivationPolicy(again=again) for again in self._sets_of(layout.tensor)[1:]),
        ]
        if self.leads_to_hosts(layout):
            fates += [replace(fate, moved=True) for fate in fates]
        return self._laid_by(work(limits, fates), laid, samples, limits)

    def _limits_bytes(self, places: Sequence[StageDevice], limit_bytes: int) -> list[int]:
        """More than any device has is asked for as if each had that much more."""
        more = max(0, limit_bytes - self._most_bytes)
        return [min(limit_bytes, place.memory_bytes + more) for place in places]

    def _laid_by(
        self,
        work: StageAssignment,
        laid: Sequence[LayoutCost],
        samples: int,
        limits: Sequence[float],
    ) -> ClusterPlan | None:
        stages = work.stages()
        if stages is None:
            return None
        held = [StageBlocks(blocks=tuple((s, n) for (_, s), n in stage if n)) for stage in stages]
        step = deep_step_of(laid, held)
        if any(s.nbytes > most for s, most in zip(step.stages, limits, strict=True)):
            return None
        after = self._least_after(laid)
        return ClusterPlan(
            layout=laid[0].layout,
            micro_batch=samples,
            stages=tuple(tuple((fate, n) for (fate, _), n in stage if n) for stage in stages),
            step=step,
            least_seconds=min(work.least_seconds() + after, step.step_seconds),
        )

    def _least_bytes(self, way: _LayoutCandidate) -> int:
        near = self._least_bytes_of(way.layout, way.micro_batch)
        if not self.leads_to_hosts(way.layout):
            return near
        return self._least_bytes_of(replace(way.layout, far_states=True), way.micro_batch)

    def _least_bytes_of(self, layout: ClusterLayout, samples: int) -> int:
        """Of either end, with as few blocks as it may hold and nothing kept of them; and of the
        stage that holds most of these."""
        laid = self._on_places(layout, samples)[0]
        most = -(-self.num_blocks // layout.pipeline)
        fewest = most if layout.virtual > 1 else min(1, most) if layout.pipeline > 1 else most
        inner = laid.model_memory(_inner(layout.pipeline), most).nbytes
        ends = (
            laid.model_memory(s, fewest).nbytes + laid.around_bytes(s) + laid.ending_bytes(s)
            for s in _told_apart(layout.pipeline)
        )
        return max(*ends, inner if layout.pipeline > 2 else 0)

    def _on_places(self, layout: ClusterLayout, samples: int) -> list[LayoutCost]:
        """Of each stage, what says what it takes where it lies."""
        places = self._places.of(layout)
        made = {place: self._on(place, layout, samples) for place in dict.fromkeys(places)}
        return [made[place] for place in places]

    def _on(self, place: StageDevice, layout: ClusterLayout, samples: int) -> LayoutCost:
        return LayoutCost(
            self._parts(layout.tensor, samples, (), place.device), self._cluster, layout,
            self._source.formats, self._stacks[place.device], device=place.device,
            place=place.stage,
        )  # fmt: skip

    def _alone(self, *, far_states: bool = False) -> LayoutCost:
        """On one device, the fastest."""
        alone = StageDevice(device=self._cluster.fastest, memory_bytes=0, stage=0)
        return self._on(alone, ClusterLayout(far_states=far_states), self._source.num_samples)

    def leads_to_hosts(self, layout: ClusterLayout) -> bool:
        """Whether each device that a layout lies on has memory behind it, and a way there."""
        devices = {place.device for place in self._places.of(layout)}
        return all(d.host_link is not None and d.host_memory_bytes for d in devices)

    def _block(self, tensor: int, samples: int, fate: ActivationPolicy, device: Device) -> Section:
        key = tensor, samples, fate, device
        if key not in self._blocks:
            block = self._parts(tensor, samples, fate.again, device).block
            if fate.moved:
                assert device.host_link is not None, "what is moved has a way"
                block = moved(block, device.host_link)
            self._blocks[key] = block
        return self._blocks[key]

    def _parts(self, tensor: int, samples: int, again: RecomputeSet, device: Device) -> Sections:
        key = tensor, samples, again, device
        if key not in self._sections:
            blocks = self._source.blocks
            self._sections[key] = sections(
                self._graph(tensor, samples),
                self.costs_of(tensor, device),
                self._as_in_parts(ClusterLayout(tensor=tensor, again=again)),
                blocks=blocks.path,
                first=blocks.first,
                stack=self._stacks[device],
                belongs=self._belonging_of(tensor, again),
            )
        return self._sections[key]

    def _as_in_parts(self, layout: ClusterLayout) -> ClusterLayout:
        """Sequence parallelism gathers anew for the backward pass what it gathered, and hands on
        parts (Korthikanti et al., 2022, section 4.2.2)."""
        along = self._source.is_sequence_parallel(layout.tensor)
        return replace(layout, gathers_again=along)

    def _belonging_of(self, tensor: int, again: RecomputeSet) -> NodeAssignment:
        key = tensor, again
        if key not in self._belonging:
            blocks = self._source.blocks
            layout = self._as_in_parts(ClusterLayout(tensor=tensor, again=again))
            graph = self._source.in_parts(tensor).graph
            self._belonging[key] = belonging(graph, layout, blocks=blocks.path, first=blocks.first)
        return self._belonging[key]

    def _graph(self, tensor: int, samples: int) -> Graph:
        if (tensor, samples) not in self._graphs:
            self._graphs[tensor, samples] = self._source.in_parts(tensor).at(samples)
        return self._graphs[tensor, samples]

    def costs_of(self, tensor: int, device: Device) -> CostTable:
        if (tensor, device) not in self._costs:
            first = self._places.first_of[device]
            layout = ClusterLayout(tensor=tensor)
            self._costs[tensor, device] = tensor_costs(self._cluster, layout, first=first)
        return self._costs[tensor, device]

    def _sets_of(self, tensor: int) -> tuple[RecomputeSet, ...]:
        """What is worth computing again on the fastest device is offered on each."""
        if tensor not in self._sets:
            sampled = self._source.in_parts(tensor)
            costs = self.costs_of(tensor, self._cluster.fastest)
            self._sets[tensor] = tuple(self._again_of(sampled, costs))
        return self._sets[tensor]


def _told_apart(stages: int) -> tuple[int, ...]:
    return (0,) if stages == 1 else (0, stages - 1)


def _inner(stages: int) -> int:
    """A stage that holds neither end, where there is one."""
    return 1 if stages > 2 else 0
