"""Checks of a request that need neither a capture nor a measurement.

Not for the memory floor of a captured step: see search/memory_floor.py.
"""

import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from steelyard import _torch
from steelyard.errors import BadInput
from steelyard.hardware.cluster import Cluster
from steelyard.search import Floor
from steelyard.units import format_bytes


def floor_of(model: nn.Module, batch: Any) -> Floor:
    """Return the memory floor that follows from model and batch, without gradients and optimizer
    state.
    """
    leaves = [x for x in _torch.tree_leaves(batch) if isinstance(x, torch.Tensor)]
    return Floor(
        parameter_bytes=_bytes_of(model.parameters()),
        buffer_bytes=_bytes_of(model.buffers()),
        batch_bytes=_bytes_of(leaves),
    )


# Other tensor classes, such as lazy or quantized ones, may use fewer bytes than their shapes imply.
_DENSE_CLASSES = (torch.Tensor, nn.Parameter, nn.Buffer)


def _bytes_of(tensors: Iterable[torch.Tensor]) -> int:
    """Return the bytes of these tensors; if several share a storage, only the largest counts."""
    largest: dict[int, int] = {}
    for tensor in tensors:
        if type(tensor) not in _DENSE_CLASSES or tensor.is_nested or tensor.layout != torch.strided:
            continue
        # An expanded tensor repeats its elements with a stride of 0.
        span = 1 + sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride()))
        nbytes = span * tensor.element_size() if tensor.numel() else 0
        key = _torch.storage_key(tensor)
        largest[key] = max(largest.get(key, 0), nbytes)
    return sum(largest.values())


def check_offload_memory(cluster: Cluster) -> None:
    """Refuse an offload memory of this machine that is larger than the free space of its disk."""
    offload_memory = cluster.offload_memory
    if offload_memory is None or not cluster.is_here or not Path(offload_memory.folder).is_dir():
        return  # a missing folder is refused where it is opened
    free = shutil.disk_usage(offload_memory.folder).free
    if offload_memory.size_bytes > free:
        raise BadInput(
            f"offload memory of {format_bytes(offload_memory.size_bytes)} was requested in "
            f"{offload_memory.folder}, but its disk has {format_bytes(free)} free",
            expected=f"at most {format_bytes(free)}",
            remedy="give a smaller size (--offload-size), or a folder on a larger disk "
            "(--offload-dir)",
        )
