"""The memory of an eager training step, measured by fake runs of the model with a few blocks.

Blocks of a run are equal, so the level at each operator call is linear in the number of blocks. Two
fake runs, of which one has a block more, give the growth: a step of 400 billion parameters takes a
second. Not for the captured graph: see predict/liveness.py.
"""

import contextlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
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
from steelyard.operators.flops import flops_of_call, format_of_call


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

    The highest levels of the full model are among them. ``update_each`` are those of an optimizer
    that updates one parameter after the other. ``state_bytes`` is the optimizer's state. ``flops``
    are those of the passes, by the format of the operands.
    """

    passes: frozenset[MemoryLevel]
    update: frozenset[MemoryLevel]
    update_each: frozenset[MemoryLevel]
    state_bytes: int
    flops: tuple[tuple[str, int], ...]


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
        only = _run(model, how)
        phases = [{level for _, level in calls} for calls in only.phases]
        return _found(phases, only.state_bytes, only.flops)
    base = _run(truncation.model, how)
    grown = [[{level} for _, level in calls] for calls in base.phases]
    state_bytes, flops = base.state_bytes, Counter(base.flops)
    for prefix, run in truncation.runs.items():
        more = with_one_more_block(model, truncation.runs, prefix)
        longer, times = _run(more, how), run.count - KEPT
        state_bytes += times * (longer.state_bytes - base.state_bytes)
        for kind, count in longer.flops.items():
            flops[kind] += times * (count - base.flops[kind])
        for calls, longer_calls, levels in zip(base.phases, longer.phases, grown, strict=True):
            for index, growths in enumerate(_growths(calls, longer_calls)):
                levels[index] = {a.plus(b, times) for a in levels[index] for b in growths}
    return _found(
        [{level for found in phase for level in found} for phase in grown], state_bytes, flops
    )


_Calls = list[tuple[Any, MemoryLevel]]


@dataclass(frozen=True, slots=True)
class _Run:
    """The calls of forward pass, backward pass and optimizer, the bytes of its state, and FLOPs.

    The last phase is an optimizer that updates one parameter after the other.
    """

    phases: tuple[_Calls, _Calls, _Calls, _Calls]
    state_bytes: int
    flops: Counter[str]


def _found(
    phases: Sequence[set[MemoryLevel]], state_bytes: int, flops: Mapping[str, int]
) -> EagerLevels:
    forward, backward, update, update_each = map(frozenset, phases)
    return EagerLevels(
        passes=forward | backward,
        update=update,
        update_each=update_each,
        state_bytes=state_bytes,
        flops=tuple(sorted(flops.items())),
    )


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
            backward, flops = watch.taken(), Counter(watch.flops)
            update, update_each, state_bytes = _update(parameters.values(), how, watch)
    return _Run((forward, backward, update, update_each), state_bytes, flops)


def _update(
    parameters: Iterable[nn.Parameter], how: _How, watch: "_GradientWatch"
) -> tuple[_Calls, _Calls, int]:
    """Run the optimizer; return the calls of a step that already has state, those of one that
    updates one parameter after the other, and the bytes of the state.
    """
    if how.optimizer is None:
        return [], [], 0
    before = watch.alive_bytes
    optimizer = how.optimizer([p for p in parameters if p.requires_grad])
    optimizer.step()
    state_bytes = watch.alive_bytes - before
    watch.taken()
    optimizer.step()
    each = watch.taken()
    if not how.on_gpu:
        return each, each, state_bytes
    _choose_foreach(optimizer)
    optimizer.step()
    return watch.taken(), each, state_bytes


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
    """Records the level at each operator call, and counts FLOPs by the format of the operands."""

    def __init__(
        self, model: nn.Module, parameters: Mapping[str, nn.Parameter], batch: Any
    ) -> None:
        leaves = [x for x in _torch.tree_leaves(batch) if isinstance(x, torch.Tensor)]
        super().__init__([*parameters.values(), *model.buffers(), *leaves], on_call=self._note)
        self._calls: _Calls = []
        self._gradient_bytes = 0
        self.flops: Counter[str] = Counter()
        for parameter in parameters.values():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(self._count)

    def taken(self) -> _Calls:
        """Return the calls since this was asked last."""
        calls, self._calls = self._calls, []
        return calls

    def _count(self, parameter: torch.Tensor) -> None:
        self._gradient_bytes += parameter.untyped_storage().nbytes()

    def _note(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        if isinstance(func, _torch.OpOverload):
            flops = flops_of_call(func, args, kwargs, result)
            if flops:
                self.flops[format_of_call(args)] += flops
        self._calls.append((func, MemoryLevel(self.alive_bytes, self._gradient_bytes)))
