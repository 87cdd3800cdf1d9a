"""Free memory and random generators of a step's device: the CPU, or one GPU of this machine.

Not for operator costs on the device: see measure/operators/benchmark.py.
"""

from collections.abc import Iterable

import torch

from steelyard.errors import BadInput
from steelyard.hardware.host_os import available_bytes


def check_is_own(torch_device: torch.device) -> None:
    """Raise BadInput if ``torch_device`` is a GPU other than the current one.

    A plan contains no GPU index, since each rank has its own GPU.
    """
    if torch_device.type == "cuda" and torch_device.index != torch.cuda.current_device():
        raise BadInput(
            f"the model is on {torch_device}, but the current GPU is {torch.cuda.current_device()}",
            expected="a model on the current GPU of its process",
            remedy=f"call torch.cuda.set_device({torch_device.index}) before the model is created",
        )


def free_bytes(torch_device: torch.device) -> int:
    """Return the bytes that can be allocated now, including torch's cached GPU memory."""
    if torch_device.type == "cpu":
        return available_bytes()
    cached_bytes = torch.cuda.memory_reserved(torch_device) - torch.cuda.memory_allocated(
        torch_device
    )
    return int(torch.cuda.mem_get_info(torch_device)[0]) + cached_bytes


def random_devices(torch_device: torch.device) -> Iterable[torch.device]:
    """Return the devices whose generators torch must fork in addition to the CPU's."""
    return [] if torch_device.type == "cpu" else [torch_device]
