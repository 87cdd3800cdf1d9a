"""CUDA internals: busy waiting, lazy calls and symmetric memory.

Not for events and streams, which are public.
"""

from collections.abc import Callable

import torch

# GPU memory shared by the processes of a host; torch has no public name for it yet.
import torch.distributed._symmetric_memory


def keep_busy(cycles: int) -> None:
    """Occupy the current CUDA device for ``cycles`` clock cycles, without blocking the host."""
    torch.cuda._sleep(cycles)


def when_cuda_begins(call: Callable[[], object]) -> None:
    """Make the call once CUDA is initialized, or now if it already is.

    Initializing CUDA without need would take GPU memory and seconds.
    """
    torch.cuda._lazy_call(call)


def symmetric_memory(nbytes: int, device: torch.device) -> torch.Tensor:
    """Allocate GPU memory that other processes of this host can get access to."""
    symmetric = torch.distributed._symmetric_memory
    made: torch.Tensor = symmetric.empty(nbytes, dtype=torch.uint8, device=device)
    return made


def symmetric_views(
    memory: torch.Tensor, group: torch.distributed.ProcessGroup
) -> list[torch.Tensor]:
    """Return each rank's symmetric memory, of equal size, as a tensor on this rank.

    All ranks of the group call this together. These tensors are valid only while this rank keeps
    its own symmetric memory.
    """
    handle = torch.distributed._symmetric_memory.rendezvous(memory, group.group_name)
    return [handle.get_buffer(rank, memory.shape, memory.dtype) for rank in range(group.size())]
