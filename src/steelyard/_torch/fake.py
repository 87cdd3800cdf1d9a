"""Fake tensors, dispatch modes and pytrees.

Not for executing programs on fake tensors: see capture/tracing/fake_execution.py.
"""

import torch

# Planning executes no kernels: shapes, strides and storages come from fake tensors.
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

# Pytrees with key paths; the public torch.utils pytree has no stable alias in 2.13.
from torch.utils._pytree import (
    keystr,
    tree_flatten,
    tree_flatten_with_path,
    tree_leaves,
    tree_map,
    tree_unflatten,
)

__all__ = [
    "FakeTensor",
    "FakeTensorMode",
    "TorchDispatchMode",
    "keystr",
    "on_meta",
    "storage_key",
    "tree_flatten",
    "tree_flatten_with_path",
    "tree_leaves",
    "tree_map",
    "tree_unflatten",
]


def on_meta(fake: torch.Tensor) -> torch.Tensor:
    """Return a meta tensor of the same layout, from which a FakeTensor can be built in any mode."""
    from torch.utils._python_dispatch import _disable_current_modes

    with _disable_current_modes():
        return torch.empty_strided(fake.shape, fake.stride(), dtype=fake.dtype, device="meta")


def storage_key(tensor: torch.Tensor) -> int:
    """Return a number that identifies the tensor's storage; aliases share it."""
    return int(tensor.untyped_storage()._cdata)
