"""A deep model's step for clusters that are not here: three of its blocks, at any micro-batch.

Captured once, without values, at a number of samples that tells where samples are. Whether samples
see each other is judged by the operators alone. Not for steps that are run: see capture/step.py.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import nn

from steelyard import _torch
from steelyard.capture.batch.splitting import batch_size, entries, why_indivisible
from steelyard.capture.deep.truncate import BlockRange, cut_to
from steelyard.capture.deep.truncated_model import provably_cut
from steelyard.capture.spmd.partition import partition
from steelyard.capture.spmd.sequence_parallel import sequence_placements
from steelyard.capture.spmd.shardable_regions import regions
from steelyard.capture.step import CapturedStep
from steelyard.capture.tracing.joint_graph import Loss
from steelyard.capture.tracing.optimizer import OptimizerFactory
from steelyard.ir.batch_template import BatchTemplate, telling_number
from steelyard.ir.cluster_layout import Blocks, Formats
from steelyard.ir.collective import NCCL
from steelyard.ir.graph import Graph, Role
from steelyard.ir.parallel_layout import TENSOR
from steelyard.ir.placement import Placement
from steelyard.ir.sharding_choice import Region, ShardingChoice
from steelyard.plans.plan import BatchEntry


@dataclass(kw_only=True, eq=False)
class TruncatedStep:
    """``batch`` is the global batch: of its samples only their number and sizes are used."""

    model: nn.Module
    loss: Loss
    batch: Any
    optimizer: OptimizerFactory | None
    _graphs: dict[int, BatchTemplate] = field(default_factory=dict, init=False)
    _regions: dict[int, tuple[Region, ...]] = field(default_factory=dict, init=False)

    @property
    def num_samples(self) -> int:
        return batch_size(self.batch) or 1

    @cached_property
    def entries(self) -> tuple[BatchEntry, ...]:
        return entries(self.batch)

    @cached_property
    def why_indivisible(self) -> str:
        """Why the batch must stay whole; empty where no operator shows that it must."""
        if batch_size(self.batch) is None:
            return "the tensors of the batch do not share dim 0"
        return why_indivisible(self._source.model, self.loss, self._sampled_batch, self.whole.graph)

    @cached_property
    def blocks(self) -> Blocks:
        """The longest run of alike blocks; none where none is long, or provably alike."""
        stretches = self._stretches
        if not stretches:
            return Blocks()
        path = max(stretches, key=lambda prefix: stretches[prefix].count)
        return Blocks(path=path, first=stretches[path].first, count=stretches[path].count)

    @cached_property
    def whole(self) -> BatchTemplate:
        """As one device would compute it."""
        return BatchTemplate(graph=self._source.captured().graph, samples=self._samples)

    def in_parts(self, tensor: int) -> BatchTemplate:
        """That of one rank of so many neighbours, which hold parts of all tensors that can be."""
        if tensor == 1:
            return self.whole
        if tensor not in self._graphs:
            lies = tuple(lies for region in self.regions(tensor) for lies in region.inputs)
            values = self._along_the_sequence(tensor)
            choice = ShardingChoice(axis=TENSOR, num_ranks=tensor, inputs=lies, values=values)
            graph = partition(self.whole.graph, choice, rank=0, transport=NCCL)
            self._graphs[tensor] = replace(self.whole, graph=graph)
        return self._graphs[tensor]

    def is_sequence_parallel(self, tensor: int) -> bool:
        """Whether what lies between the tensor-parallel regions is in parts along a sequence."""
        return tensor > 1 and bool(self._along_the_sequence(tensor))

    def _along_the_sequence(self, tensor: int) -> tuple[tuple[str, Placement], ...]:
        samples = self.whole.samples

        def holds_samples(size: int) -> bool:
            return size == 1 if samples == 1 else size % samples == 0

        return sequence_placements(
            self.whole.graph, self.regions(tensor), num_ranks=tensor, holds_samples=holds_samples
        )

    def regions(self, tensor: int) -> tuple[Region, ...]:
        """What is cut together, no tensor twice; what exchanges least for what it divides first."""
        if tensor not in self._regions:
            self._regions[tensor] = _apart(regions(self.whole.graph, num_ranks=tensor))
        return self._regions[tensor]

    @cached_property
    def formats(self) -> Formats:
        """Bytes for each parameter; its gradient is as wide as it is."""
        update = self._source.update()
        held = _bytes_by_role(self.whole.graph) if update is None else _bytes_by_role(update.graph)
        numel = max(1, sum(p.numel() for p in self._source.model.parameters()))
        weights = sum(p.nbytes for p in self._source.model.parameters())
        return Formats(
            weight_bytes=round(weights / numel),
            gradient_bytes=round(weights / numel),
            state_bytes=round(held[Role.STATE] / numel),
        )

    @cached_property
    def _source(self) -> CapturedStep:
        """The shortened model, at the number of samples that tells."""
        model, blocks = self.model, self.blocks
        if blocks.count:
            model = cut_to(self.model, {blocks.path: self._stretches[blocks.path]})
        return CapturedStep(
            model=model, loss=self.loss, batch=self._sampled_batch, optimizer=self.optimizer
        )

    @cached_property
    def _stretches(self) -> Mapping[str, BlockRange]:
        short = provably_cut(self.model, self.loss, self._sampled_batch)
        return {} if short is None else short.stretches

    @cached_property
    def _samples(self) -> int:
        if batch_size(self.batch) is None:
            return 1
        tensors = [*self.model.parameters(), *self.model.buffers()]
        sizes = {size for tensor in tensors for size in tensor.shape}
        sizes |= {size for entry in self.entries for size in entry.shape[1:]}
        return telling_number(sizes)

    @cached_property
    def _sampled_batch(self) -> Any:
        """Without values: a shape is all that is asked of it."""

        def resized(leaf: Any) -> Any:
            if not isinstance(leaf, torch.Tensor):
                return leaf
            shape = leaf.shape if self._samples == 1 else (self._samples, *leaf.shape[1:])
            return torch.empty(shape, dtype=leaf.dtype, device="meta")

        return _torch.tree_map(resized, self.batch)


def _apart(found: tuple[Region, ...]) -> tuple[Region, ...]:
    kept: list[Region] = []
    cut: set[str] = set()
    for region in sorted(found, key=lambda r: r.exchanged_bytes / max(1, r.flops)):
        names = {name for name, _ in region.inputs}
        if cut.isdisjoint(names):
            kept.append(region)
            cut |= names
    return tuple(kept)


def _bytes_by_role(graph: Graph) -> dict[Role, int]:
    held = dict.fromkeys(Role, 0)
    for node in graph.inputs():
        for tensor in node.outputs:
            held[graph.storages[tensor.storage].role] += tensor.nbytes
    return held
