"""CUDA: busy waiting, lazy calls and symmetric memory.

Not for events and streams, which are public.
"""

from collections.abc import Callable

import torch

# Memory of GPUs that the processes of a host share; torch has no public name for it yet.
import torch.distributed._symmetric_memory


def keep_busy(cycles: int) -> None:
    """The current CUDA device does nothing else for so long, and the host goes on."""
    torch.cuda._sleep(cycles)


def when_cuda_begins(call: Callable[[], object]) -> None:
    """At once, where it has; CUDA that nobody uses takes a GPU's memory and seconds."""
    torch.cuda._lazy_call(call)


def symmetric_memory(nbytes: int, device: torch.device) -> torch.Tensor:
    """Of a GPU, that other processes of this host can be given to write to."""
    symmetric = torch.distributed._symmetric_memory
    made: torch.Tensor = symmetric.empty(nbytes, dtype=torch.uint8, device=device)
    return made


def symmetric_views(
    memory: torch.Tensor, group: torch.distributed.ProcessGroup
) -> list[torch.Tensor]:
    """What each rank of the group has made so, of one size, as this one sees it for as long as it
    keeps its own; all of them come together for it."""
    met = torch.distributed._symmetric_memory.rendezvous(memory, group.group_name)
    return [met.get_buffer(rank, memory.shape, memory.dtype) for rank in range(group.size())]
