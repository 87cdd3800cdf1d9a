"""The torch.distributed backend for the tensors of a rank.

Not for rendezvous: see run/launch/rendezvous.py.
"""

import torch
import torch.distributed as dist


def backend_for(torch_device: torch.device, *, ranks: int) -> str:
    """Return gloo for CPU tensors, and for a GPU that several of the ``ranks`` share, because NCCL
    refuses that; otherwise NCCL.
    """
    if (
        torch_device.type == "cpu"
        or ranks > torch.cuda.device_count()
        or not dist.is_nccl_available()
    ):
        return "gloo"
    return "cpu:gloo,cuda:nccl"
