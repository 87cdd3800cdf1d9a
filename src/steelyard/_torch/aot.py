"""AOTAutograd internals: joint graph export and the descriptors of its inputs.

Not for Dynamo: see dynamo.py.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

# The descriptors of a captured step's inputs and outputs.
from torch._functorch._aot_autograd.descriptors import (
    BufferAOTInput,
    GradAOTOutput,
    InputMutationAOTOutput,
    ParamAOTInput,
    PlainAOTInput,
    PlainAOTOutput,
    TangentAOTInput,
)

from steelyard._torch.private_names import require
from steelyard.torch_version import minor_version

__all__ = [
    "BufferAOTInput",
    "GradAOTOutput",
    "InputMutationAOTOutput",
    "ParamAOTInput",
    "PlainAOTInput",
    "PlainAOTOutput",
    "TangentAOTInput",
    "aot_export_joint_with_descriptors",
]


def aot_export_joint_with_descriptors(*args: Any, **kwargs: Any) -> Any:
    """Export forward and backward pass as one graph, with descriptors of its inputs and outputs.

    Matching inputs and outputs by position was tried, and failed silently.
    """
    require("aot")
    from torch._functorch import aot_autograd

    with _tensors_of_the_loss_allowed():
        return aot_autograd.aot_export_joint_with_descriptors(*args, **kwargs)


@contextlib.contextmanager
def _tensors_of_the_loss_allowed() -> Iterator[None]:
    """Let the traced step read tensors that are not among its inputs, as is the default since torch
    2.13.
    """
    from torch._functorch import aot_autograd

    if minor_version(torch.__version__) >= (2, 13):
        yield
        return
    original: Callable[..., Any] = vars(aot_autograd)["construct_fake_mode"]

    def allowing(*args: Any) -> Any:
        mode, shapes = original(*args)
        mode.allow_non_fake_inputs = True
        return mode, shapes

    setattr(aot_autograd, original.__name__, allowing)
    try:
        yield
    finally:
        setattr(aot_autograd, original.__name__, original)
