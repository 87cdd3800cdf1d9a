"""A step measured on fake tensors, and its memory on one device or sharded over several.

Not for changes to the step: see candidates.py.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from torch import nn

from steelyard import _torch
from steelyard.capture.batch.resizing import sizes_of
from steelyard.capture.deep.eager_levels import (
    EagerLevels,
    MemoryLevel,
    block_names,
    eager_levels,
)
from steelyard.capture.tracing.joint_graph import Loss
from steelyard.capture.tracing.optimizer import OptimizerFactory
from steelyard.errors import BadInput
from steelyard.plans.budget import Maximize
from steelyard.plans.memory_fit import Capacity, MemoryNeed


@dataclass(frozen=True, slots=True, kw_only=True)
class FitStep:
    """A training step. ``accumulates``: gradients are summed over several micro-batches."""

    model: nn.Module
    loss: Loss
    batch: Any
    optimizer: OptimizerFactory | None
    accumulates: bool = False
    recomputes: bool = False

    @property
    def num_samples(self) -> int | None:
        """The samples of the batch, if it can have another number of them."""
        try:
            return sizes_of(self.batch, Maximize.BATCH).now
        except BadInput:
            return None

    def with_samples(self, count: int) -> "FitStep":
        return replace(self, batch=sizes_of(self.batch, Maximize.BATCH).at(count))

    def of_each(self, devices: int) -> "FitStep":
        """Return the step of one of several devices, which divide the batch.

        A device has a whole number of samples, and at least one. A batch that cannot have another
        size is not divided.
        """
        samples = self.num_samples
        return self if samples is None else self.with_samples(-(-samples // devices))


def need_of(step: FitStep, capacity: Capacity) -> MemoryNeed:
    """Return the memory of a device at the peak of one step, from the second step on."""
    return MeasuredStep.of(step, capacity).need


@dataclass(frozen=True, kw_only=True)
class MeasuredStep:
    """The step of one device, and the memory levels of its eager run."""

    step: FitStep
    levels: EagerLevels
    capacity: Capacity

    @classmethod
    def of(cls, step: FitStep, capacity: Capacity) -> "MeasuredStep":
        levels = eager_levels(
            step.model,
            step.loss,
            step.batch,
            step.optimizer,
            on_gpu=capacity.is_gpu,
            recomputes=step.recomputes,
        )
        return cls(step=step, levels=levels, capacity=capacity)

    @property
    def flops(self) -> Mapping[str, int]:
        """The FLOPs of forward and backward pass, by the format of the operands."""
        return dict(self.levels.flops)

    def with_fused_optimizer(self) -> "MeasuredStep":
        """Return the step with an optimizer that has temporary results of one parameter at most."""
        return replace(self, levels=replace(self.levels, update=self.levels.update_each))

    def without_state(self) -> "MeasuredStep":
        """Return the step with the optimizer, and its state, elsewhere."""
        levels = replace(self.levels, update=frozenset(), update_each=frozenset(), state_bytes=0)
        return replace(self, levels=levels)

    def on(self, devices: int) -> "MeasuredStep":
        """Return the same step of one of this many devices."""
        return replace(self, capacity=replace(self.capacity, count=devices))

    @cached_property
    def sizes(self) -> "ModelSizes":
        return ModelSizes.of(self.step.model)

    @property
    def need(self) -> MemoryNeed:
        """The memory of a device at the highest of the levels."""
        batch = _torch.tree_leaves(self.step.batch)
        inputs = _bytes_of(t for t in batch if hasattr(t, "element_size"))
        needs = (*self._in_passes(inputs), *self._in_update(inputs))
        return max(needs, key=lambda need: need.nbytes)

    @property
    def floor(self) -> MemoryNeed:
        """The memory that stays if activations need none: weights, state and all gradients."""
        gradients = max((level.gradient_bytes for level in self.levels.passes), default=0)
        return replace(
            self._need(MemoryLevel(0, 0), gradients, 0), working_bytes=0, gathered_bytes=0
        )

    def _in_passes(self, inputs: int) -> Iterator[MemoryNeed]:
        sizes = self.sizes
        for level in self.levels.passes:
            gradients = sizes.gradient_bytes if self.step.accumulates else level.gradient_bytes
            yield self._need(level, gradients, inputs - level.gradient_bytes)

    def _in_update(self, inputs: int) -> Iterator[MemoryNeed]:
        gradients, state_bytes = self.sizes.gradient_bytes, self.levels.state_bytes
        for level in self.levels.update:
            # The optimizer updates what the device keeps, so its temporary results are sharded.
            temporary = (level.nbytes - gradients - state_bytes) // self.capacity.count
            yield replace(
                self._need(level, gradients, 0),
                working_bytes=inputs + temporary,
                gathered_bytes=0,
                in_update=True,
            )

    def _need(self, level: MemoryLevel, gradient_bytes: int, beside: int) -> MemoryNeed:
        count, sizes = self.capacity.count, self.sizes
        return MemoryNeed(
            weight_bytes=_share(sizes.weight_bytes, count),
            gradient_bytes=_share(gradient_bytes, count),
            state_bytes=_share(self.levels.state_bytes, count),
            working_bytes=level.nbytes + beside,
            gathered_bytes=sizes.gathered_bytes if count > 1 else 0,
            in_update=False,
            on_gpu=self.capacity.is_gpu,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSizes:
    """The bytes of a model's weights, of their gradients, and of those that sharding gathers.

    FSDP2 and ZeRO-3 gather the weights of one block while those of the next one are on their way,
    and have the gradients of one block before they are reduced. Parameters outside of blocks are
    gathered for the whole step.
    """

    weight_bytes: int
    gradient_bytes: int
    gathered_bytes: int

    @classmethod
    def of(cls, model: nn.Module) -> "ModelSizes":
        tensors = {id(t): t for t in (*model.parameters(), *model.buffers())}
        parameters = {id(p): p for p in model.parameters()}
        blocks, outside = [], dict(parameters)
        for name in block_names(model):
            own = list(model.get_submodule(name).parameters())
            blocks.append((_bytes_of(own), _trained_bytes(own)))
            for parameter in own:
                outside.pop(id(parameter), None)
        rest = list(outside.values())
        largest = max((2 * weights + trained for weights, trained in blocks), default=0)
        return cls(
            weight_bytes=_bytes_of(tensors.values()),
            gradient_bytes=_trained_bytes(parameters.values()),
            gathered_bytes=_bytes_of(rest) + _trained_bytes(rest) + largest,
        )


def _bytes_of(tensors: Iterable[Any]) -> int:
    return sum(int(t.numel() * t.element_size()) for t in tensors)


def _trained_bytes(parameters: Iterable[nn.Parameter]) -> int:
    return _bytes_of(p for p in parameters if p.requires_grad)


def _share(nbytes: int, devices: int) -> int:
    return -(-nbytes // devices)
