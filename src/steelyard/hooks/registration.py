"""``compress``: validates the request on all ranks and registers the compression hook on a module.

Not for the compressed reductions: see compressed_reduce.py.
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
    """The error-feedback residuals that have not been sent yet, for a checkpoint."""

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Return the residual of each parameter by name, summed over all ranks. This is a
        collective: every rank must call it.
        """
        ...

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        """Load residuals on any number of ranks; every rank takes an equal share."""
        ...


class Scaler(Protocol):
    """The part of torch.amp.GradScaler that is used here."""

    def get_scale(self) -> float: ...


def compress(module: nn.Module, code: str = "int8", *, scaler: Scaler | None = None) -> Lost:
    """Compress the gradients of ``module`` with this codec, from its next backward pass on.

    ``module`` is a DistributedDataParallel, or a module to which ``fully_shard`` was applied. Every
    rank must call this function. ``code`` is "int8", or under DistributedDataParallel also
    "bfloat16", "ternary" (two bits), "largest" (sixteen of 1,024 elements) and "rank 4" (or another
    rank; two thin factors). The last three use error feedback: the error of one step is added to a
    later one. Gradients with one dimension, with less than 4 KiB, or of a dtype other than float32
    are sent uncompressed. So are matrices whose factors would be hardly smaller. ``scaler`` is the
    gradient scaler that scales the loss, if there is one.
    """
    codec = _codec_named(code)
    if codec is None:
        raise BadInput(
            f"unknown gradient codec {code!r}",
            expected=f"one of {', '.join(map(repr, CODECS))}, 'rank 4'",
            remedy='write, for example, compress(module, "int8")',
        )
    _refuse_sparse(module)
    device = torch_device_of(module)
    if isinstance(module, DistributedDataParallel):
        return _compress_ddp(module, codec, scaler, device)
    if isinstance(module, FSDPModule):
        return _compress_fsdp(module, codec, device)
    raise BadInput(
        f"a {type(module).__name__} exchanges no gradients",
        expected="a DistributedDataParallel, or a module that fully_shard was called on",
        remedy="wrap the model first, then compress the wrapped model",
    )


def _refuse_sparse(module: nn.Module) -> None:
    for name, part in module.named_modules():
        if isinstance(part, (nn.Embedding, nn.EmbeddingBag)) and part.sparse:
            raise BadInput(
                f"the gradient of {name} is sparse, and torch passes such gradients to no hook",
                expected="dense gradients",
                remedy=f"create {name} with sparse=False",
            )


def _codec_named(code: str) -> Codec | None:
    match = re.fullmatch(r"rank ([1-9][0-9]{0,3})", code)
    return low_rank(int(match[1])) if match else CODECS.get(code)


def _compress_ddp(
    ddp: DistributedDataParallel, codec: Codec, scaler: Scaler | None, device: torch.device
) -> Lost:
    background: BackgroundWork
    if device.type == "cuda":
        # DDP calls the hook for all buckets in the same order on every rank, on this thread.
        group, background = ddp.process_group, OnStream()
        _check_backend(group)
    else:
        # A thread sends buckets in the order in which they fill up, interleaved with other
        # collectives in an arbitrary order. A process group of its own keeps the two apart.
        ranks = dist.get_process_group_ranks(ddp.process_group)
        group = dist.new_group(ranks, use_local_synchronization=True)
        background = OnThread()
        take_turns()
    _check_ranks_agree(ddp.module, codec, group, device)
    parameters, sums = dict(ddp.module.named_parameters()), CompressedReduce(codec, group)
    # In these two modes, DDP leaves parameters that no rank used without a gradient.
    may_be_unused = ddp.find_unused_parameters or ddp.static_graph
    buckets = Buckets(
        parameters, codec, sums, group, scaler, background, may_be_unused=may_be_unused
    )
    ddp.register_comm_hook(buckets, _send)
    return buckets


def _check_backend(group: dist.ProcessGroup) -> None:
    backends = dist.get_backend_config(group)
    if "cuda:nccl" not in backends:
        raise BadInput(
            f"parameters are on a GPU, but the process group has the backends {backends}",
            expected="the NCCL backend for gradients on a GPU",
            remedy='call init_process_group("nccl"), or with "cpu:gloo,cuda:nccl"',
        )


def _send(buckets: Buckets, bucket: Any) -> torch.futures.Future[torch.Tensor]:
    return buckets.send(
        bucket.buffer(), bucket.gradients(), bucket.parameters(), is_first=bucket.index() == 0
    )


# Torch checks this annotation and accepts only GradBucket or no annotation; mypy does not know the
# name.
_send.__annotations__["bucket"] = dist.GradBucket  # type: ignore[attr-defined]


def _compress_fsdp(module: Any, codec: Codec, device: torch.device) -> Lost:
    if codec is not INT8:
        raise BadInput(
            f"FSDP2 sends all gradients of a module as one tensor, which {codec.name} does not "
            "support",
            expected="'int8'",
            remedy='call compress(module, "int8"), or use '
            "MixedPrecisionPolicy(reduce_dtype=torch.bfloat16)",
        )
    if device.type == "cuda":
        for mesh in {p.device_mesh for p in module.parameters() if isinstance(p, DTensor)}:
            _check_backend(mesh.get_group(mesh.ndim - 1))
    comm = CompressedReduceScatter(codec)
    for part in module.modules():
        if isinstance(part, FSDPModule):
            part.set_custom_reduce_scatter(comm)  # type: ignore[arg-type]  # torch only calls it
    return comm


def _check_ranks_agree(
    module: nn.Module, codec: Codec, group: dist.ProcessGroup, device: torch.device
) -> None:
    """Raise RanksDiffer if ranks have different codecs or parameters: they would misread each
    other's bytes.
    """
    description = [
        codec.name,
        *(f"{n} {tuple(p.shape)} {p.dtype}" for n, p in module.named_parameters()),
    ]
    digest = hashlib.sha256("\n".join(description).encode()).digest()[:8]
    own = torch.frombuffer(bytearray(digest), dtype=torch.int64).to(device)
    digests = own.new_empty(group.size())
    dist.all_gather_single(digests, own, group=group)
    different = [rank for rank, other in enumerate(digests.tolist()) if other != int(digests[0])]
    if different:
        raise RanksDiffer(
            f"rank {different[0]} has another codec or other parameters than rank 0",
            expected="the same codec and model on all ranks",
            remedy="start every rank with the same program",
        )
