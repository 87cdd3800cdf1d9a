"""The cost models of the layouts of a step, from captures of a few of its blocks.

Not for choosing a layout: see search.py. Not for the cost of a stage: see predict/analytic/step.py.
"""

import copy
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol

from steelyard.hardware.cluster import Cluster
from steelyard.hardware.device import Device
from steelyard.hardware.software_stack import stack_on
from steelyard.ir.batch_template import BatchTemplate
from steelyard.ir.graph import Graph
from steelyard.ir.model_blocks import ActivationPolicy, Blocks, Formats
from steelyard.ir.parallel_layout import ParallelLayout
from steelyard.predict.analytic.node_assignment import NodeAssignment, assign_nodes
from steelyard.predict.analytic.offload import with_offload
from steelyard.predict.analytic.sections import Section, Sections, sections
from steelyard.predict.analytic.step import LayoutCost, tensor_costs
from steelyard.predict.cost_table import CostTable
from steelyard.search.cluster.stage_assignment import RecomputeSet
from steelyard.search.cluster.stage_devices import StageDevice, StageDevices


class TemplateSource(Protocol):
    """The captured step at any micro-batch size and tensor-parallel degree."""

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


class TemplatePricing:
    """The cost models of any layout of one step on one cluster, each of which is made once.

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
        self.source, self.cluster, self._find_recompute_sets = source, cluster, find_recompute_sets
        self.num_samples = source.num_samples
        self.stage_devices = StageDevices(cluster)
        self._stacks = {device: stack_on(device) for device in self.stage_devices.classes}
        self._sections: dict[tuple[int, int, RecomputeSet, Device], Sections] = {}
        self._blocks: dict[tuple[int, int, ActivationPolicy, Device], Section] = {}
        self._node_assignments: dict[tuple[int, RecomputeSet], NodeAssignment] = {}
        self._graphs: dict[tuple[int, int], Graph] = {}
        self._costs: dict[tuple[int, Device], CostTable] = {}
        self._recompute_sets: dict[int, tuple[RecomputeSet, ...]] = {}

    def with_samples(self, samples: int) -> "TemplatePricing":
        """Return the pricing for another global batch, with the caches of this one."""
        other = copy.copy(self)
        other.num_samples = samples
        return other

    @property
    def num_blocks(self) -> int:
        return self.source.blocks.count

    @property
    def num_parameters(self) -> int:
        nbytes = self.one_device_cost().model_memory(0, self.num_blocks).weight_bytes
        return nbytes // max(1, self.source.formats.weight_bytes)

    @property
    def precision(self) -> str:
        """The data type of most FLOPs."""
        flops = Counter[str]()
        for node in self.source.in_parts(1).graph.nodes:
            if node.flops:
                flops[node.outputs[0].dtype] += node.flops
        return max(flops, key=lambda dtype: flops[dtype], default="float32")

    @property
    def largest_device_bytes(self) -> int:
        return max(device.memory_bytes for device in self.stage_devices.classes)

    def limits_bytes(self, stage_devices: Sequence[StageDevice], limit_bytes: int) -> list[int]:
        """Return the memory limit of each stage.

        If the limit exceeds the largest device memory, every device gets the excess in addition.
        """
        more = max(0, limit_bytes - self.largest_device_bytes)
        return [
            min(limit_bytes, stage_device.memory_bytes + more) for stage_device in stage_devices
        ]

    def stage_costs(self, layout: ParallelLayout, samples: int) -> list[LayoutCost]:
        """Return the cost model of each stage on its device."""
        stage_devices = self.stage_devices.of(layout)
        cost_of = {
            stage_device: self._stage_cost(stage_device, layout, samples)
            for stage_device in dict.fromkeys(stage_devices)
        }
        return [cost_of[stage_device] for stage_device in stage_devices]

    def _stage_cost(self, target: StageDevice, layout: ParallelLayout, samples: int) -> LayoutCost:
        return LayoutCost(
            self._sections_of(layout.tensor, samples, (), target.device), self.cluster, layout,
            self.source.formats, self._stacks[target.device], device=target.device,
            place=target.stage,
        )  # fmt: skip

    def one_device_cost(self, *, offloads_state: bool = False) -> LayoutCost:
        """Return the cost model of the whole step on the fastest device."""
        alone = StageDevice(device=self.cluster.fastest, memory_bytes=0, stage=0)
        return self._stage_cost(
            alone, ParallelLayout(offloads_state=offloads_state), self.num_samples
        )

    def has_host_memory(self, layout: ParallelLayout) -> bool:
        """True if each device of the layout has host memory and a link to it."""
        devices = {stage_device.device for stage_device in self.stage_devices.of(layout)}
        return all(d.host_link is not None and d.host_memory_bytes for d in devices)

    def block(self, tensor: int, samples: int, policy: ActivationPolicy, device: Device) -> Section:
        key = tensor, samples, policy, device
        if key not in self._blocks:
            block = self._sections_of(tensor, samples, policy.recomputed, device).block
            if policy.is_offloaded:
                assert device.host_link is not None, "a device that offloads has a link to its host"
                block = with_offload(block, device.host_link)
            self._blocks[key] = block
        return self._blocks[key]

    def _sections_of(
        self, tensor: int, samples: int, recomputed: RecomputeSet, device: Device
    ) -> Sections:
        key = tensor, samples, recomputed, device
        if key not in self._sections:
            blocks = self.source.blocks
            self._sections[key] = sections(
                self._graph(tensor, samples),
                self.costs_of(tensor, device),
                self.with_sequence_parallel(ParallelLayout(tensor=tensor)),
                ActivationPolicy(recomputed=recomputed),
                blocks=blocks.path,
                first=blocks.first,
                stack=self._stacks[device],
                assigned=self._node_assignment(tensor, recomputed),
            )
        return self._sections[key]

    def with_sequence_parallel(self, layout: ParallelLayout) -> ParallelLayout:
        """Return the layout, with sequence parallelism if the model supports it.

        Sequence parallelism gathers activations again for the backward pass, and sends shards to
        the next stage (Korthikanti et al., 2022, section 4.2.2).
        """
        is_sequence_parallel = self.source.is_sequence_parallel(layout.tensor)
        return replace(layout, regathers_activations=is_sequence_parallel)

    def _node_assignment(self, tensor: int, recomputed: RecomputeSet) -> NodeAssignment:
        key = tensor, recomputed
        if key not in self._node_assignments:
            blocks = self.source.blocks
            layout = self.with_sequence_parallel(ParallelLayout(tensor=tensor))
            policy = ActivationPolicy(recomputed=recomputed)
            graph = self.source.in_parts(tensor).graph
            self._node_assignments[key] = assign_nodes(
                graph, layout, policy, blocks=blocks.path, first=blocks.first
            )
        return self._node_assignments[key]

    def _graph(self, tensor: int, samples: int) -> Graph:
        if (tensor, samples) not in self._graphs:
            self._graphs[tensor, samples] = self.source.in_parts(tensor).at(samples)
        return self._graphs[tensor, samples]

    def costs_of(self, tensor: int, device: Device) -> CostTable:
        if (tensor, device) not in self._costs:
            first = self.stage_devices.first_of[device]
            layout = ParallelLayout(tensor=tensor)
            self._costs[tensor, device] = tensor_costs(self.cluster, layout, first=first)
        return self._costs[tensor, device]

    def recompute_sets_of(self, tensor: int) -> tuple[RecomputeSet, ...]:
        """Return the sets of recomputed calls found for the fastest device; they are used on all
        devices.
        """
        if tensor not in self._recompute_sets:
            sampled = self.source.in_parts(tensor)
            costs = self.costs_of(tensor, self.cluster.fastest)
            self._recompute_sets[tensor] = tuple(self._find_recompute_sets(sampled, costs))
        return self._recompute_sets[tensor]
