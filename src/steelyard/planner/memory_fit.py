"""Answers "will it fit": the peak of an eager step on a device, and what would make it fit.

The step is measured on fake tensors; no graph is captured. Not for planning: see planner.py.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from steelyard import _torch
from steelyard.capture.batch.resizing import sizes_of
from steelyard.capture.deep.eager_levels import eager_levels
from steelyard.capture.tracing.joint_graph import Loss
from steelyard.capture.tracing.optimizer import OptimizerFactory
from steelyard.errors import BadInput
from steelyard.hardware.device import Device
from steelyard.plans.budget import Maximize
from steelyard.plans.memory_fit import (
    Capacity,
    Fit,
    FitVerdict,
    Lever,
    MemoryNeed,
    without_needless,
)
from steelyard.units import format_bytes, format_seconds

# The numbers of devices that are tried.
_MOST_DEVICES = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class FitStep:
    """A training step. ``accumulates``: gradients are summed over several micro-batches."""

    model: nn.Module
    loss: Loss
    batch: Any
    optimizer: OptimizerFactory | None
    accumulates: bool = False
    recomputes: bool = False


# Another way to make the step: its name, what it costs, and the function that makes the step.
Variant = tuple[str, str, Callable[[], FitStep]]


def fit_step(
    step: FitStep,
    device: Device,
    *,
    title: str,
    variants: tuple[Variant, ...] = (),
    on_verdict: Callable[[Fit], None] = lambda _: None,
    on_progress: Callable[[str], None] = lambda _: None,
) -> Fit:
    """Return the verdict for a step on a device and, if it does not fit, what would.

    ``on_verdict`` gets the verdict before the changes are tried. ``variants`` are changes that only
    the caller can make, such as another precision of the model.
    """
    capacity = Capacity.of(device)
    on_progress("measuring the step on fake tensors")
    found = Fit(title=title, capacity=capacity, need=need_of(step, capacity))
    on_verdict(found)
    if found.fits:
        return found
    tried: list[Lever] = []
    for lever in _levers(step, found, device, variants):
        on_progress(f"trying: {lever.name}")
        tried.append(lever)
    fitting = [l for l in tried if capacity.verdict(l.nbytes) is FitVerdict.FITS]
    least = None if fitting else min(tried, key=lambda lever: lever.nbytes, default=None)
    return replace(found, levers=without_needless(fitting), least=least)


def need_of(step: FitStep, capacity: Capacity) -> MemoryNeed:
    """Return the memory at the peak of one step, from the second step on."""
    levels = eager_levels(
        step.model,
        step.loss,
        step.batch,
        step.optimizer,
        on_gpu=capacity.is_gpu,
        recomputes=step.recomputes,
    )
    tensors = {id(t): t for t in (*step.model.parameters(), *step.model.buffers())}
    weights = sum(_nbytes(t) for t in tensors.values())
    gradients = sum(_nbytes(p) for p in step.model.parameters() if p.requires_grad)
    inputs = sum(_nbytes(t) for t in _torch.tree_leaves(step.batch) if _is_tensor(t))

    def in_passes() -> Iterator[MemoryNeed]:
        for level in levels.passes:
            yield MemoryNeed(
                weight_bytes=weights,
                gradient_bytes=gradients if step.accumulates else level.gradient_bytes,
                state_bytes=levels.state_bytes,
                working_bytes=inputs + level.nbytes - level.gradient_bytes,
                in_update=False,
                on_gpu=capacity.is_gpu,
            )

    in_update = (
        MemoryNeed(
            weight_bytes=weights,
            gradient_bytes=gradients,
            state_bytes=levels.state_bytes,
            working_bytes=inputs + level.nbytes - gradients - levels.state_bytes,
            in_update=True,
            on_gpu=capacity.is_gpu,
        )
        for level in levels.update
    )
    return max((*in_passes(), *in_update), key=lambda need: need.nbytes)


def _is_tensor(leaf: Any) -> bool:
    return hasattr(leaf, "element_size")


def _nbytes(tensor: Any) -> int:
    return int(tensor.numel() * tensor.element_size())


_CHECKPOINTING = "activation checkpointing of each block"
_FORWARD = "one more forward pass"


def _levers(
    step: FitStep, found: Fit, device: Device, variants: tuple[Variant, ...]
) -> Iterator[Lever]:
    """Yield changes to the step with their memory, from the cheapest to the most expensive."""
    capacity = found.capacity
    if found.need.in_update and capacity.is_gpu:
        fused = need_of(step, replace(capacity, is_gpu=False))
        yield Lever(
            changes=("the optimizer with fused=True",),
            pays="nothing: it has no temporary results",
            nbytes=fused.nbytes,
        )
    small = _one_sample(step)
    if small is not None:
        yield Lever(
            changes=("micro-batches of one sample",),
            pays="time of smaller operators",
            nbytes=need_of(small, capacity).nbytes,
        )
    recomputed = need_of(replace(step, recomputes=True), capacity)
    yield Lever(changes=(_CHECKPOINTING,), pays=_FORWARD, nbytes=recomputed.nbytes)
    yield from _offloaded(step, found, device)
    for name, pays, make in variants:
        yield from _both_ways(make(), capacity, name=name, pays=pays)
    yield from _more_devices(recomputed, capacity)


def _both_ways(step: FitStep, capacity: Capacity, *, name: str, pays: str) -> Iterator[Lever]:
    """Yield a changed step, without and with activation checkpointing."""
    yield Lever(changes=(name,), pays=pays, nbytes=need_of(step, capacity).nbytes)
    recomputed = need_of(replace(step, recomputes=True), capacity)
    yield Lever(
        changes=(name, _CHECKPOINTING), pays=f"{pays}; {_FORWARD}", nbytes=recomputed.nbytes
    )


def _one_sample(step: FitStep) -> FitStep | None:
    try:
        sizes = sizes_of(step.batch, Maximize.BATCH)
    except BadInput:
        return None
    return None if sizes.now < 2 else replace(step, batch=sizes.at(1), accumulates=True)


def _offloaded(step: FitStep, found: Fit, device: Device) -> Iterator[Lever]:
    """Yield the step with the optimizer's state in host memory, without and with recomputation."""
    state_bytes, link = found.need.state_bytes, device.host_link
    if not state_bytes:
        return
    costs = "transfers over the host link each step"
    if link is not None:
        seconds = 2 * state_bytes / link.bytes_per_second
        costs = f"~{format_seconds(seconds)} of transfers a step, {format_bytes(state_bytes)} there"
    stateless = replace(step, optimizer=None)
    yield from _both_ways(
        stateless, found.capacity, name="optimizer state in host memory", pays=costs
    )


def _more_devices(recomputed: MemoryNeed, capacity: Capacity) -> Iterator[Lever]:
    """Yield the smallest number of devices that is enough if weights and state are sharded."""
    sharded = recomputed.weight_bytes + recomputed.gradient_bytes + recomputed.state_bytes
    count = 2
    while count <= _MOST_DEVICES:
        nbytes = sharded // count + recomputed.working_bytes + recomputed.allocator_bytes
        if capacity.verdict(nbytes) is FitVerdict.FITS:
            yield Lever(
                changes=(
                    f"{count} x {capacity.kind} with weights and state sharded (FSDP, ZeRO-3)",
                    _CHECKPOINTING,
                ),
                pays=f"devices, and the gathering of weights; {_FORWARD}",
                nbytes=nbytes,
            )
            return
        count *= 2
