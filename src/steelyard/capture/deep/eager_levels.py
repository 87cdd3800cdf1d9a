"""The memory of an eager training step, measured by fake runs of the model with a few blocks.

Blocks of a run are equal, so the level at each operator call is linear in the number of blocks. Two
fake runs, of which one has a block more, give the growth: a step of 400 billion parameters takes a
second. Not for the captured graph: see predict/liveness.py.
"""

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import takewhile
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from steelyard import _torch
from steelyard.capture.checks.errors import check_scalar, check_trains
from steelyard.capture.deep.truncate import KEPT, cut, sibling_lists, with_one_more_block
from steelyard.capture.eager_baseline import fake_step
from steelyard.capture.tracing.fake_execution import StorageWatch
from steelyard.capture.tracing.joint_graph import Loss
from steelyard.capture.tracing.optimizer import OptimizerFactory


@dataclass(frozen=True, slots=True)
class MemoryLevel:
    """The live bytes at an operator call, and the bytes of complete gradients among them.

    Weights, buffers and the batch are not counted. The optimizer's state is not counted either,
    except in the optimizer's own calls.
    """

    nbytes: int
    gradient_bytes: int

    def __sub__(self, other: "MemoryLevel") -> "MemoryLevel":
        return MemoryLevel(self.nbytes - other.nbytes, self.gradient_bytes - other.gradient_bytes)

    def plus(self, growth: "MemoryLevel", times: int) -> "MemoryLevel":
        return MemoryLevel(
            self.nbytes + times * growth.nbytes,
            self.gradient_bytes + times * growth.gradient_bytes,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class EagerLevels:
    """The levels of an eager step: of forward and backward pass, and of the optimizer's calls.

    The highest levels of the full model are among them. ``state_bytes`` is the optimizer's state.
    """

    passes: frozenset[MemoryLevel]
    update: frozenset[MemoryLevel]
    state_bytes: int


def eager_levels(
    model: nn.Module,
    loss: Loss,
    batch: Any,
    optimizer: OptimizerFactory | None,
    *,
    on_gpu: bool = False,
    recomputes: bool = False,
) -> EagerLevels:
    """Measure an eager step; runs of equal blocks are measured with three blocks and with four.

    ``on_gpu`` chooses the optimizer's implementation that torch chooses on a GPU. ``recomputes``
    applies torch's activation checkpointing to each block.
    """
    how = _How(loss, batch, optimizer, on_gpu, recomputes)
    truncation = cut(model)
    if truncation is None:
        return _found(_run(model, how))
    base = _run(truncation.model, how)
    grown = [[{level} for _, level in calls] for calls in base.phases]
    state_bytes = base.state_bytes
    for prefix, run in truncation.runs.items():
        more = with_one_more_block(model, truncation.runs, prefix)
        longer, times = _run(more, how), run.count - KEPT
        state_bytes += times * (longer.state_bytes - base.state_bytes)
        for calls, longer_calls, levels in zip(base.phases, longer.phases, grown, strict=True):
            for index, growths in enumerate(_growths(calls, longer_calls)):
                levels[index] = {a.plus(b, times) for a in levels[index] for b in growths}
    forward, backward, update = ({level for found in p for level in found} for p in grown)
    return EagerLevels(
        passes=frozenset(forward | backward), update=frozenset(update), state_bytes=state_bytes
    )


_Calls = list[tuple[Any, MemoryLevel]]


@dataclass(frozen=True, slots=True)
class _Run:
    """The calls of forward pass, backward pass and optimizer, and the bytes of its state."""

    phases: tuple[_Calls, _Calls, _Calls]
    state_bytes: int


def _found(run: _Run) -> EagerLevels:
    forward, backward, update = (frozenset(level for _, level in calls) for calls in run.phases)
    return EagerLevels(passes=forward | backward, update=update, state_bytes=run.state_bytes)


def _growths(calls: _Calls, longer: _Calls) -> Iterator[set[MemoryLevel]]:
    """Yield, for each call, what one more block adds to its level.

    A call of the first blocks stays in place if blocks are added behind it. A call of the last
    blocks moves with the end of the pass. The level in a block between the first and the last is
    between theirs, so that these two are enough.
    """
    same_start = _num_equal(calls, longer)
    same_end = _num_equal(calls[::-1], longer[::-1])
    added = len(longer) - len(calls)
    for index, (_, level) in enumerate(calls):
        found = set()
        if index < same_start:
            found.add(longer[index][1] - level)
        if index >= len(calls) - same_end:
            found.add(longer[index + added][1] - level)
        yield found or {_highest(longer) - _highest(calls)}


def _num_equal(calls: _Calls, longer: _Calls) -> int:
    pairs = zip(calls, longer, strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0][0] == pair[1][0], pairs))


def _highest(calls: _Calls) -> MemoryLevel:
    return max((level for _, level in calls), key=lambda level: level.nbytes)


@dataclass(frozen=True, slots=True)
class _How:
    """The step that is run with a model; see ``eager_levels``."""

    loss: Loss
    batch: Any
    optimizer: OptimizerFactory | None
    on_gpu: bool
    recomputes: bool


def _run(model: nn.Module, how: _How) -> _Run:
    with fake_step(model, how.batch) as (mode, parameters, fake_batch):
        watch = _GradientWatch(model, parameters, fake_batch)
        checkpointing = _checkpointing(model) if how.recomputes else contextlib.nullcontext()
        with mode, watch, _torch.quiet_logs(), checkpointing:
            value = how.loss(model, fake_batch)
            check_scalar(value)
            check_trains(model, value)
            forward = watch.taken()
            value.backward()
            del value
            backward = watch.taken()
            update, state_bytes = _update(parameters.values(), how, watch)
    return _Run((forward, backward, update), state_bytes)


def _update(
    parameters: Iterable[nn.Parameter], how: _How, watch: "_GradientWatch"
) -> tuple[_Calls, int]:
    """Run the optimizer twice; return the calls of its second step, and the bytes of its state."""
    if how.optimizer is None:
        return [], 0
    before = watch.alive_bytes
    optimizer = how.optimizer([p for p in parameters if p.requires_grad])
    if how.on_gpu:
        _choose_foreach(optimizer)
    optimizer.step()
    state_bytes = watch.alive_bytes - before
    watch.taken()
    optimizer.step()
    return watch.taken(), state_bytes


def block_names(model: nn.Module) -> tuple[str, ...]:
    """Return the names of the model's blocks: modules of one class in a list, outermost only."""
    found: list[str] = []
    for path, siblings in sibling_lists(model):
        is_inside = any(path == name or path.startswith(f"{name}.") for name in found)
        if not is_inside and len({type(block) for block in siblings}) == 1 < len(siblings):
            found += [f"{path}.{i}" if path else str(i) for i in range(len(siblings))]
    return tuple(found)


@contextlib.contextmanager
def _checkpointing(model: nn.Module) -> Iterator[None]:
    """Apply activation checkpointing to each block of the model."""
    blocks = [model.get_submodule(name) for name in block_names(model)]
    try:
        for block in blocks:
            block.__dict__["forward"] = partial(checkpoint, block.forward, use_reentrant=False)
        yield
    finally:
        for block in blocks:
            del block.__dict__["forward"]


def _choose_foreach(optimizer: torch.optim.Optimizer) -> None:
    """Choose the implementation that torch chooses for parameters on a GPU.

    It updates all parameters together, and its temporary results have their total size.
    """
    for group in optimizer.param_groups:
        if group.get("foreach", False) is None and not group.get("fused"):
            group["foreach"] = True


class _GradientWatch(StorageWatch):
    """Records the level at each operator call."""

    def __init__(
        self, model: nn.Module, parameters: Mapping[str, nn.Parameter], batch: Any
    ) -> None:
        leaves = [x for x in _torch.tree_leaves(batch) if isinstance(x, torch.Tensor)]
        super().__init__([*parameters.values(), *model.buffers(), *leaves], on_call=self._note)
        self._calls: _Calls = []
        self._gradient_bytes = 0
        for parameter in parameters.values():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(self._count)

    def taken(self) -> _Calls:
        """Return the calls since this was asked last."""
        calls, self._calls = self._calls, []
        return calls

    def _count(self, parameter: torch.Tensor) -> None:
        self._gradient_bytes += parameter.untyped_storage().nbytes()

    def _note(self, func: Any, args: Any, kwargs: Any, _: Any) -> None:  # noqa: ARG002
        self._calls.append((func, MemoryLevel(self.alive_bytes, self._gradient_bytes)))
