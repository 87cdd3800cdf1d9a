"""Chooses the slot transport for a group of ranks: shared host memory, shared GPU memory, or RDMA
to other hosts.

Not for the transports: see same_host.py, cuda_ipc.py and remote_host.py.
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


def shared_memory_transport(
    edges: Sequence[SlotSpec], *, group: dist.ProcessGroup, device: torch.device = CPU
) -> SharedMemoryTransport:
    """Return the transport for tensors on ``device``. This is a collective: every rank of the group
    must call it with the same edges.
    """
    if device.type == "cuda":
        return CudaIpcTransport(edges, group=group, gpu=Gpu(device))
    abilities = gathered((host(), is_able()), tuple[str, bool], group=group)
    are_several_hosts = len({host_id for host_id, _ in abilities}) > 1
    if are_several_hosts and all(is_rank_able for _, is_rank_able in abilities):
        return RdmaTransport(edges, group=group)
    return SharedMemoryTransport(edges, group=group)
