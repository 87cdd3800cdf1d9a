"""What slots need of a GPU: memory that other processes of its host may write, and events that they
can ask for.

Not for slots: see cuda_ipc.py.
"""

import os
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist

from steelyard import _torch

# Torch refuses two ranks that have one number for their GPU, be it one or two, unless it is told
# that this is meant.
_SHARES_A_GPU = "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"


class Event(Protocol):
    """``record`` puts it behind all that this process has told its GPU, ``query`` says whether that
    is done; of a process that has ended it never is."""

    def record(self) -> object: ...

    def query(self) -> bool: ...


class Gpu:
    """The one that this rank computes on."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    @property
    def name(self) -> str:
        """Which one it is, whatever number a process has for it."""
        return str(torch.cuda.get_device_properties(self.device).uuid)

    def reaches(self, name: str) -> bool:
        """So far as can be known: one that this process does not see is tried."""
        others = [Gpu(torch.device("cuda", n)) for n in range(torch.cuda.device_count())]
        return all(
            torch.cuda.can_device_access_peer(self.device, other.device)
            for other in others
            if other.name == name and other.device != self.device
        )

    def memory(self, nbytes: int) -> torch.Tensor:
        return _torch.symmetric_memory(nbytes, self.device)

    def views(self, memory: torch.Tensor, group: dist.ProcessGroup) -> list[torch.Tensor]:
        """What each rank has made, as this one may write it."""
        before = os.environ.get(_SHARES_A_GPU)
        os.environ[_SHARES_A_GPU] = "1"
        try:
            return _torch.symmetric_views(memory, group)
        finally:
            del os.environ[_SHARES_A_GPU]
            if before is not None:
                os.environ[_SHARES_A_GPU] = before

    def lent(self, owner: object, address: int, nbytes: int) -> torch.Tensor:
        """Bytes of this GPU, which keep their owner as long as anything lies on them."""
        return torch.as_tensor(_Lent(owner, address, nbytes), device=self.device)

    def event(self) -> tuple[Event, str]:
        """An event, and in hexadecimal digits the handle by which others open it."""
        made = torch.cuda.Event(interprocess=True)
        with torch.cuda.device(self.device):
            return _Made(made, self.device), made.ipc_handle().hex()

    def opened(self, handle: str) -> Event:
        """The event of a handle that another rank sent; raises RuntimeError if it is none."""
        try:
            given = bytes.fromhex(handle)
        except ValueError:
            raise RuntimeError("a handle of an event that is none") from None
        opened: Event = torch.cuda.Event.from_ipc_handle(self.device, given)
        return opened


@dataclass(frozen=True, slots=True)
class _Made:
    """Whatever GPU is the current one when it is recorded."""

    event: torch.cuda.Event
    device: torch.device

    def record(self) -> None:
        self.event.record(torch.cuda.current_stream(self.device))

    def query(self) -> bool:
        return bool(self.event.query())


class _Lent:
    """Memory that is another's, as torch takes it."""

    def __init__(self, owner: object, address: int, nbytes: int) -> None:
        self._owner = owner
        self.__cuda_array_interface__ = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }
