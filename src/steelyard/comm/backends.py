"""Which of torch's backends carries what ranks exchange.

Not for meeting: see run/launch/rendezvous.py.
"""

import torch
import torch.distributed as dist


def backend_for(home: torch.device, *, ranks: int) -> str:
    """Gloo, also on a GPU that several of so many ranks share: NCCL refuses these."""
    if home.type == "cpu" or ranks > torch.cuda.device_count() or not dist.is_nccl_available():
        return "gloo"
    return "cpu:gloo,cuda:nccl"
