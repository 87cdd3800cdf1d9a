"""``compress``: what is asked of it checked on all ranks, and the module told what to send.

Not for the sums themselves: see compressed_reduce.py.
"""

import hashlib
import re
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from steelyard.comm.devices import torch_device_of
from steelyard.comm.gloo.thread_scheduling import take_turns
from steelyard.errors import BadInput, RanksDiffer
from steelyard.hooks.background import BackgroundWork, OnStream, OnThread
from steelyard.hooks.compressed_reduce import CompressedReduce
from steelyard.hooks.ddp import Buckets
from steelyard.hooks.fsdp import CompressedReduceScatter
from steelyard.ir.gradient_codec import CODECS, INT8, Codec, low_rank


class Lost(Protocol):
    """What codes have lost so far and not made up for, for a checkpoint."""

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Of each parameter by name, the sum over all ranks, who call this together."""
        ...

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        """On any number of ranks, of which each takes an equal share."""
        ...


class Scaler(Protocol):
    """As torch.amp.GradScaler."""

    def get_scale(self) -> float: ...


def compress(module: nn.Module, code: str = "int8", *, scaler: Scaler | None = None) -> Lost:
    """Send the gradients of ``module`` in this code from its next backward pass on.

    ``module`` is a DistributedDataParallel, or has been given to ``fully_shard``; all ranks call
    this. ``code`` is "int8", or under DistributedDataParallel also "bfloat16", and "ternary" (two
    bits), "largest" (sixteen of 1,024) and "rank 4" (or another; two thin factors), which send
    later what they lose. Of one dimension or of less than 4 KiB, and in other formats than
    float32, gradients go as they are; so do matrices of which factors are hardly smaller.
    ``scaler`` is the one that scales the loss, if any does.
    """
    codec = _codec_named(code)
    if codec is None:
        raise BadInput(
            f"{code!r} is no code of gradients",
            expected=f"one of {', '.join(map(repr, CODECS))}, 'rank 4'",
            remedy='compress(module, "int8"), for example',
        )
    _refuse_sparse(module)
    device = torch_device_of(module)
    if isinstance(module, DistributedDataParallel):
        return _in_buckets(module, codec, scaler, device)
    if isinstance(module, FSDPModule):
        return _in_shards(module, codec, device)
    raise BadInput(
        f"a {type(module).__name__} exchanges no gradients",
        expected="a DistributedDataParallel, or a module that fully_shard was called on",
        remedy="wrap the model first, then compress what that returns",
    )


def _refuse_sparse(module: nn.Module) -> None:
    for name, part in module.named_modules():
        if isinstance(part, (nn.Embedding, nn.EmbeddingBag)) and part.sparse:
            raise BadInput(
                f"the gradient of {name} is sparse, and torch hands it to no hook",
                expected="gradients that are whole",
                remedy=f"make {name} with sparse=False",
            )


def _codec_named(code: str) -> Codec | None:
    of_rank = re.fullmatch(r"rank ([1-9][0-9]{0,3})", code)
    return low_rank(int(of_rank[1])) if of_rank else CODECS.get(code)


def _in_buckets(
    ddp: DistributedDataParallel, codec: Codec, scaler: Scaler | None, device: torch.device
) -> Lost:
    beside: BackgroundWork
    if device.type == "cuda":
        # Torch itself hands all buckets to this group in one order, from where this is called.
        group, beside = ddp.process_group, OnStream()
        _check_backend(group)
    else:
        # In the order in which buckets are full, which others know nothing of: a group of its own.
        ranks = dist.get_process_group_ranks(ddp.process_group)
        group = dist.new_group(ranks, use_local_synchronization=True)
        beside = OnThread()
        take_turns()
    _check_alike(ddp.module, codec, group, device)
    parameters, sums = dict(ddp.module.named_parameters()), CompressedReduce(codec, group)
    # Torch leaves what no rank came by without a gradient in these two.
    may_be_unused = ddp.find_unused_parameters or ddp.static_graph
    buckets = Buckets(parameters, codec, sums, group, scaler, beside, may_be_unused=may_be_unused)
    ddp.register_comm_hook(buckets, _send)
    return buckets


def _check_backend(group: dist.ProcessGroup) -> None:
    backends = dist.get_backend_config(group)
    if "cuda:nccl" not in backends:
        raise BadInput(
            f"parameters are on a GPU, and its gradients are sent by {backends}",
            expected="ranks that send by NCCL what is on a GPU",
            remedy='init_process_group("nccl"), or "cpu:gloo,cuda:nccl"',
        )


def _send(buckets: Buckets, bucket: Any) -> torch.futures.Future[torch.Tensor]:
    return buckets.send(
        bucket.buffer(), bucket.gradients(), bucket.parameters(), is_first=bucket.index() == 0
    )


# Torch reads it, and allows this or nothing; mypy knows of no such name.
_send.__annotations__["bucket"] = dist.GradBucket  # type: ignore[attr-defined]


def _in_shards(module: Any, codec: Codec, device: torch.device) -> Lost:
    if codec is not INT8:
        raise BadInput(
            f"FSDP2 sends a module's gradients as one, and {codec.name} is not for all of them",
            expected="'int8'",
            remedy='compress(module, "int8"), or MixedPrecisionPolicy(reduce_dtype=torch.bfloat16)',
        )
    if device.type == "cuda":
        for mesh in {p.device_mesh for p in module.parameters() if isinstance(p, DTensor)}:
            _check_backend(mesh.get_group(mesh.ndim - 1))
    comm = CompressedReduceScatter(codec)
    for part in module.modules():
        if isinstance(part, FSDPModule):
            part.set_custom_reduce_scatter(comm)  # type: ignore[arg-type]  # called, no more
    return comm


def _check_alike(
    module: nn.Module, codec: Codec, group: dist.ProcessGroup, device: torch.device
) -> None:
    """Or ranks would read each other's bytes as something else."""
    said = [codec.name, *(f"{n} {tuple(p.shape)} {p.dtype}" for n, p in module.named_parameters())]
    digest = hashlib.sha256("\n".join(said).encode()).digest()[:8]
    own = torch.frombuffer(bytearray(digest), dtype=torch.int64).to(device)
    every = own.new_empty(group.size())
    dist.all_gather_single(every, own, group=group)
    others = [rank for rank, one in enumerate(every.tolist()) if one != int(every[0])]
    if others:
        raise RanksDiffer(
            f"rank {others[0]} asks for another code, or has other parameters, than rank 0",
            expected="the same code and model on all ranks",
            remedy="start every rank with the same program",
        )
