"""Autograd internals: hooks of parameters and modules, and operator calls that autograd ignores.

Not for tracing: see aot.py.
"""

import contextlib
import gc
from collections.abc import Sequence
from operator import attrgetter
from types import FrameType
from typing import Any

import torch


def below_autograd() -> contextlib.AbstractContextManager[Any]:
    """Call operators without recording them for autograd: the program contains its own backward."""
    guard: contextlib.AbstractContextManager[Any] = torch._C._AutoDispatchBelowAutograd()
    return guard


# Hooks of parameters, which a step without autograd must run itself; there is no public accessor.
_HOOKS = attrgetter("_backward_hooks")


_LATE_HOOKS = attrgetter("_post_accumulate_grad_hooks")


def accumulators(parameters: Sequence[torch.Tensor]) -> list[Any]:
    """Return the autograd nodes that add to ``.grad``.

    As long as they are referenced, autograd returns these same nodes to users.
    """
    with torch.inference_mode(mode=False):
        return [torch.autograd.graph.get_gradient_edge(p).node for p in parameters]


def any_hooks(parameters: Sequence[torch.Tensor], nodes: Sequence[Any] | None = None) -> bool:
    """True if a parameter has tensor, post-accumulate-grad or accumulator hooks.

    ``nodes`` are the accumulators, if the caller has them.
    """
    if any(map(_HOOKS, parameters)) or any(map(_LATE_HOOKS, parameters)):
        return True
    if nodes is None:
        nodes = accumulators([p for p in parameters if p.requires_grad])
    # A node does not list its hooks, but the garbage collector sees the dicts that contain them.
    return any(gc.get_referents(*nodes))


def hooks_of_all_modules() -> dict[str, dict[int, Any]]:
    """Return the live global registries of module hooks, by kind of hook."""
    from torch.nn.modules import module

    return {
        "forward hook": module._global_forward_hooks,
        "forward pre-hook": module._global_forward_pre_hooks,
        "backward hook": module._global_backward_hooks,
        "backward pre-hook": module._global_backward_pre_hooks,
    }


def is_engine(frame: FrameType) -> bool:
    """True if this frame runs a backward pass, from which autograd calls operators."""
    return frame.f_code is torch.autograd.graph._engine_run_backward.__code__


def versions(tensors: Sequence[torch.Tensor]) -> list[int]:
    """Return the version of each tensor, which every in-place operator increments."""
    return [0 if t.is_inference() else t._version for t in tensors]
