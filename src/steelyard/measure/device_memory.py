"""Free memory and random generators of a step's device: the CPU, or one GPU of this machine.

Not for operator costs on the device: see measure/operators/benchmark.py.
"""

from collections.abc import Iterable

import torch

from steelyard.errors import BadInput
from steelyard.hardware.host_os import available_bytes


def check_is_own(home: torch.device) -> None:
    """Raise BadInput if ``home`` is a GPU other than the current one.

    A plan contains no GPU index, since each rank has its own GPU.
    """
    if home.type == "cuda" and home.index != torch.cuda.current_device():
        raise BadInput(
            f"the model is on {home}, but the current GPU is {torch.cuda.current_device()}",
            expected="a model on the current GPU of its process",
            remedy=f"call torch.cuda.set_device({home.index}) before the model is created",
        )


def free_bytes(home: torch.device) -> int:
    """Return the bytes that can be allocated now, including torch's cached GPU memory."""
    if home.type == "cpu":
        return available_bytes()
    cached_bytes = torch.cuda.memory_reserved(home) - torch.cuda.memory_allocated(home)
    return int(torch.cuda.mem_get_info(home)[0]) + cached_bytes


def random_devices(home: torch.device) -> Iterable[torch.device]:
    """Return the devices whose generators torch must fork in addition to the CPU's."""
    return [] if home.type == "cpu" else [home]
