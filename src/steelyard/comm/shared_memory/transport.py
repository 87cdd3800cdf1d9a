"""Slots among ranks, wherever these are: in memory that they share, of their host or of its GPUs,
or written on another host.

Not for any of these ways: see same_host.py, cuda_ipc.py and remote_host.py.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist

from steelyard.comm.devices import CPU
from steelyard.comm.json_gather import gathered
from steelyard.comm.shared_memory.cuda_ipc import CudaIpcTransport
from steelyard.comm.shared_memory.gpu_memory import Gpu
from steelyard.comm.shared_memory.remote_host import RdmaTransport, is_able
from steelyard.comm.shared_memory.same_host import SharedMemoryTransport, host
from steelyard.ir.message_slots import SlotSpec


def pinned_among(
    edges: Sequence[SlotSpec], *, group: dist.ProcessGroup, device: torch.device = CPU
) -> SharedMemoryTransport:
    """Made by all ranks of the group together, in the same way; what is sent lies on ``device``."""
    if device.type == "cuda":
        return CudaIpcTransport(edges, group=group, gpu=Gpu(device))
    everyones = gathered((host(), is_able()), tuple[str, bool], group=group)
    are_apart = len({where for where, _ in everyones}) > 1
    if are_apart and all(able for _, able in everyones):
        return RdmaTransport(edges, group=group)
    return SharedMemoryTransport(edges, group=group)
