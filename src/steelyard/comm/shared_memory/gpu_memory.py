"""GPU primitives for slots: memory that other processes of the host can write, and events that
they can query.

Not for the slots: see cuda_ipc.py.
"""

import os
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist

from steelyard import _torch

# Unless this environment variable is set, torch refuses two ranks whose GPUs have the same index,
# even if they are different GPUs.
_SHARES_A_GPU = "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"


class Event(Protocol):
    """An interprocess event. ``record`` places it behind all work that this process has launched on
    its GPU. ``query`` returns True once that work is done; if the process has ended, it never does.
    """

    def record(self) -> object: ...

    def query(self) -> bool: ...


class Gpu:
    """The GPU that this rank computes on."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    @property
    def name(self) -> str:
        """The UUID of the GPU, which is the same in every process."""
        return str(torch.cuda.get_device_properties(self.device).uuid)

    def reaches(self, name: str) -> bool:
        """Return True if this GPU can access the GPU of that name, or if that is unknown because
        the other GPU is invisible to this process.
        """
        others = [Gpu(torch.device("cuda", n)) for n in range(torch.cuda.device_count())]
        return all(
            torch.cuda.can_device_access_peer(self.device, other.device)
            for other in others
            if other.name == name and other.device != self.device
        )

    def memory(self, nbytes: int) -> torch.Tensor:
        return _torch.symmetric_memory(nbytes, self.device)

    def views(self, memory: torch.Tensor, group: dist.ProcessGroup) -> list[torch.Tensor]:
        """Return the memory of every rank, as tensors that this rank can write."""
        before = os.environ.get(_SHARES_A_GPU)
        os.environ[_SHARES_A_GPU] = "1"
        try:
            return _torch.symmetric_views(memory, group)
        finally:
            del os.environ[_SHARES_A_GPU]
            if before is not None:
                os.environ[_SHARES_A_GPU] = before

    def lent(self, owner: object, address: int, nbytes: int) -> torch.Tensor:
        """Return bytes of this GPU as a tensor that keeps ``owner`` alive."""
        return torch.as_tensor(_Lent(owner, address, nbytes), device=self.device)

    def event(self) -> tuple[Event, str]:
        """Return an event, and its handle for other processes in hexadecimal digits."""
        made = torch.cuda.Event(interprocess=True)
        with torch.cuda.device(self.device):
            return _Made(made, self.device), made.ipc_handle().hex()

    def opened(self, handle: str) -> Event:
        """Return the event of a handle from another rank; raise RuntimeError if it is invalid."""
        try:
            given = bytes.fromhex(handle)
        except ValueError:
            raise RuntimeError("invalid CUDA event handle") from None
        opened: Event = torch.cuda.Event.from_ipc_handle(self.device, given)
        return opened


@dataclass(frozen=True, slots=True)
class _Made:
    """An event of this process, recorded on its own device whatever the current GPU is."""

    event: torch.cuda.Event
    device: torch.device

    def record(self) -> None:
        self.event.record(torch.cuda.current_stream(self.device))

    def query(self) -> bool:
        return bool(self.event.query())


class _Lent:
    """Memory with another owner, as a CUDA array for torch."""

    def __init__(self, owner: object, address: int, nbytes: int) -> None:
        self._owner = owner
        self.__cuda_array_interface__ = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }
