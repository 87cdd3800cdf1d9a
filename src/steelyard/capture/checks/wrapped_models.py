"""Refusal of models that are already wrapped, sharded or compiled by another tool.

Not for hooks: see module_hooks.py.
"""

import sys
from typing import Any

import torch.distributed as dist
from torch import nn

from steelyard.errors import CaptureRefused


def refuse_wrapped(model: nn.Module) -> None:
    """Refuse wrappers that do the work of a plan: data parallelism, sharding, compiling."""
    # These modules are already imported if the user wrapped a model with them.
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")
    for name, module in model.named_modules():
        where = f"module {name}" if name else "the model"
        inner = "model.module" if not name else f"the module inside of {name}"
        if isinstance(module, nn.parallel.DistributedDataParallel):
            raise CaptureRefused(
                f"{where} is wrapped in DistributedDataParallel",
                expected="the model itself: a plan for several ranks sums gradients by itself",
                remedy=f"give {inner}, with {_all_ranks()}; to keep DistributedDataParallel and "
                "only compress what it sends, use steelyard.hooks",
            )
        if isinstance(module, nn.DataParallel):
            raise CaptureRefused(
                f"{where} is wrapped in DataParallel",
                expected="the model itself: a plan for several ranks shares the batch by itself",
                remedy=f"give {inner}, with {_all_ranks()}",
            )
        if fsdp is not None and isinstance(module, fsdp.FullyShardedDataParallel):
            raise CaptureRefused(
                f"{where} is wrapped in FullyShardedDataParallel",
                expected="the model itself: a plan for several ranks shards states by itself",
                remedy=f"give the model as it was before it was wrapped, with {_all_ranks()}",
            )
        if fsdp is not None and isinstance(module, fsdp.FSDPModule):
            raise CaptureRefused(
                f"{where} was sharded by fully_shard (FSDP2)",
                expected="the model itself: a plan for several ranks shards states by itself",
                remedy=f"give the model as it was before fully_shard, with {_all_ranks()}; to keep "
                "FSDP2 and only compress what it sends, use steelyard.hooks",
            )
        if "_orig_mod" in module._modules:
            raise CaptureRefused(
                f"{where} was compiled by torch.compile",
                expected="the model itself: its step is captured, and compiled by the Inductor "
                "runner",
                remedy="give it as it was before torch.compile, and runner='inductor' if wanted",
            )
    _refuse_distributed(model)


def _refuse_distributed(model: nn.Module) -> None:
    tensors: Any = sys.modules.get("torch.distributed.tensor")
    if tensors is None:
        return
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if isinstance(tensor, tensors.DTensor):
            raise CaptureRefused(
                f"{name} is a DTensor, of which this rank holds a shard",
                expected="whole tensors: a plan for several ranks shards them by itself",
                remedy="give the model as it was before parallelize_module or distribute_tensor, "
                f"with {_all_ranks()}",
            )


def _all_ranks() -> str:
    size = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
    count = str(size) if size > 1 else "N"
    return f"cluster=sy.Cluster.here(ranks={count})"
