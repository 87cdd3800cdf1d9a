"""Autograd: hooks that parameters and modules carry, and calls below autograd.

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
    """Call operators without recording them for autograd: the program holds its own backward."""
    guard: contextlib.AbstractContextManager[Any] = torch._C._AutoDispatchBelowAutograd()
    return guard


# Parameters' own hooks, which a step without autograd has to run itself; no public way to ask.
_HOOKS = attrgetter("_backward_hooks")


_LATE_HOOKS = attrgetter("_post_accumulate_grad_hooks")


def accumulators(parameters: Sequence[torch.Tensor]) -> list[Any]:
    """The autograd nodes that add to ``.grad``; held, they are the ones that a user would find."""
    with torch.inference_mode(mode=False):
        return [torch.autograd.graph.get_gradient_edge(p).node for p in parameters]


def any_hooks(parameters: Sequence[torch.Tensor], nodes: Sequence[Any] | None = None) -> bool:
    """Whether some parameter has tensor hooks or post-accumulate-grad hooks, or its accumulator
    hooks of its own; ``nodes`` are the accumulators, where somebody holds them.
    """
    if any(map(_HOOKS, parameters)) or any(map(_LATE_HOOKS, parameters)):
        return True
    if nodes is None:
        nodes = accumulators([p for p in parameters if p.requires_grad])
    # A node does not list its hooks, but it shows the garbage collector the dicts they lie in.
    return any(gc.get_referents(*nodes))


def hooks_of_all_modules() -> dict[str, dict[int, Any]]:
    """The live registers of hooks that run for every module there is, by kind of hook."""
    from torch.nn.modules import module

    return {
        "forward hook": module._global_forward_hooks,
        "forward pre-hook": module._global_forward_pre_hooks,
        "backward hook": module._global_backward_hooks,
        "backward pre-hook": module._global_backward_pre_hooks,
    }


def is_engine(frame: FrameType) -> bool:
    """Whether this is what runs a backward pass: above it are the operators that autograd calls."""
    return frame.f_code is torch.autograd.graph._engine_run_backward.__code__


def versions(tensors: Sequence[torch.Tensor]) -> list[int]:
    """A number for each tensor, which every operator that writes into it raises."""
    return [0 if t.is_inference() else t._version for t in tensors]
