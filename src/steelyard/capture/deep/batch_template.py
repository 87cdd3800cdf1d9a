"""The step of a deep model for planning on declared clusters: three blocks, any micro-batch size.

The step is captured once, on the meta device, with a prime number of samples, so that dims of
samples are recognized by their size. The batch counts as divisible if no operator couples samples;
no values are compared. Not for steps that are run: see capture/step.py.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import nn

from steelyard import _torch
from steelyard.capture.batch.splitting import batch_size, entries, why_indivisible
from steelyard.capture.deep.truncate import BlockRange, truncate_runs
from steelyard.capture.deep.truncated_model import proven_truncation
from steelyard.capture.spmd.partition import partition
from steelyard.capture.spmd.sequence_parallel import sequence_placements
from steelyard.capture.spmd.shardable_regions import regions
from steelyard.capture.step import CapturedStep
from steelyard.capture.tracing.joint_graph import Loss
from steelyard.capture.tracing.optimizer import OptimizerFactory
from steelyard.ir.batch_template import BatchTemplate, telling_number
from steelyard.ir.collective import NCCL
from steelyard.ir.graph import Graph, Role
from steelyard.ir.model_blocks import Blocks, Formats
from steelyard.ir.parallel_layout import TENSOR
from steelyard.ir.placement import Placement
from steelyard.ir.sharding_choice import Region, ShardingChoice
from steelyard.plans.plan import BatchEntry


@dataclass(kw_only=True, eq=False)
class TruncatedStep:
    """A step truncated to three blocks; only the shapes of the global ``batch`` are used."""

    model: nn.Module
    loss: Loss
    batch: Any
    optimizer: OptimizerFactory | None
    _sharded: dict[int, BatchTemplate] = field(default_factory=dict, init=False)
    _regions: dict[int, tuple[Region, ...]] = field(default_factory=dict, init=False)
    _placements: dict[int, tuple[tuple[str, Placement], ...]] = field(
        default_factory=dict, init=False
    )

    @property
    def num_samples(self) -> int:
        return batch_size(self.batch) or 1

    @cached_property
    def entries(self) -> tuple[BatchEntry, ...]:
        return entries(self.batch)

    @cached_property
    def why_indivisible(self) -> str:
        """The reason why the batch may not be split, found from the operators; empty if there is
        none.
        """
        if batch_size(self.batch) is None:
            return "the tensors of the batch do not share dim 0"
        return why_indivisible(self._source.model, self.loss, self._sampled_batch, self.whole.graph)

    @cached_property
    def blocks(self) -> Blocks:
        """The longest run of equal blocks; empty if none is long enough and proven to be equal."""
        runs = self._block_runs
        if not runs:
            return Blocks()
        path = max(runs, key=lambda prefix: runs[prefix].count)
        return Blocks(path=path, first=runs[path].first, count=runs[path].count)

    @cached_property
    def whole(self) -> BatchTemplate:
        """The step of a single device, without tensor parallelism."""
        return BatchTemplate(graph=self._source.captured().graph, samples=self._samples)

    def in_parts(self, tensor: int) -> BatchTemplate:
        """Return the step of one rank with all regions sharded over ``tensor`` ranks."""
        if tensor == 1:
            return self.whole
        if tensor not in self._sharded:
            inputs = tuple(pair for region in self.regions(tensor) for pair in region.inputs)
            values = self._sequence_placements(tensor)
            choice = ShardingChoice(axis=TENSOR, num_ranks=tensor, inputs=inputs, values=values)
            graph = partition(self.whole.graph, choice, rank=0, transport=NCCL)
            self._sharded[tensor] = replace(self.whole, graph=graph)
        return self._sharded[tensor]

    def is_sequence_parallel(self, tensor: int) -> bool:
        """True if values between the tensor-parallel regions are sharded along the sequence dim."""
        return tensor > 1 and bool(self._sequence_placements(tensor))

    def _sequence_placements(self, tensor: int) -> tuple[tuple[str, Placement], ...]:
        samples = self.whole.samples

        def holds_samples(size: int) -> bool:
            return size == 1 if samples == 1 else size % samples == 0

        if tensor not in self._placements:
            graph, regions_of = self.whole.graph, self.regions(tensor)
            self._placements[tensor] = sequence_placements(
                graph, regions_of, num_ranks=tensor, holds_samples=holds_samples
            )
        return self._placements[tensor]

    def regions(self, tensor: int) -> tuple[Region, ...]:
        """Return disjoint regions, preferring those with the fewest bytes exchanged per flop."""
        if tensor not in self._regions:
            self._regions[tensor] = _disjoint(regions(self.whole.graph, num_ranks=tensor))
        return self._regions[tensor]

    @cached_property
    def formats(self) -> Formats:
        """Bytes per element of weights, gradients and optimizer state; gradients match weights."""
        update = self._source.update()
        nbytes = (
            _bytes_by_role(self.whole.graph) if update is None else _bytes_by_role(update.graph)
        )
        numel = max(1, sum(p.numel() for p in self._source.model.parameters()))
        weights = sum(p.nbytes for p in self._source.model.parameters())
        return Formats(
            weight_bytes=round(weights / numel),
            gradient_bytes=round(weights / numel),
            state_bytes=round(nbytes[Role.STATE] / numel),
        )

    @cached_property
    def _source(self) -> CapturedStep:
        """The truncated model on the batch of ``_samples`` samples."""
        model, blocks = self.model, self.blocks
        if blocks.count:
            model = truncate_runs(self.model, {blocks.path: self._block_runs[blocks.path]})
        return CapturedStep(
            model=model, loss=self.loss, batch=self._sampled_batch, optimizer=self.optimizer
        )

    @cached_property
    def _block_runs(self) -> Mapping[str, BlockRange]:
        truncation = proven_truncation(self.model, self.loss, self._sampled_batch)
        return {} if truncation is None else truncation.runs

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
        """The batch resized to ``_samples`` samples, on the meta device: only shapes are needed."""

        def resized(leaf: Any) -> Any:
            if not isinstance(leaf, torch.Tensor):
                return leaf
            shape = leaf.shape if self._samples == 1 else (self._samples, *leaf.shape[1:])
            return torch.empty(shape, dtype=leaf.dtype, device="meta")

        return _torch.tree_map(resized, self.batch)


def _disjoint(regions_found: tuple[Region, ...]) -> tuple[Region, ...]:
    chosen: list[Region] = []
    sharded: set[str] = set()
    for region in sorted(regions_found, key=lambda r: r.exchanged_bytes / max(1, r.flops)):
        names = {name for name, _ in region.inputs}
        if sharded.isdisjoint(names):
            chosen.append(region)
            sharded |= names
    return tuple(chosen)


def _bytes_by_role(graph: Graph) -> dict[Role, int]:
    nbytes = dict.fromkeys(Role, 0)
    for node in graph.inputs():
        for tensor in node.outputs:
            nbytes[graph.storages[tensor.storage].role] += tensor.nbytes
    return nbytes
