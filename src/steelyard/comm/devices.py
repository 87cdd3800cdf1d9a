"""The device of a model's tensors, and the default random generator of a device."""

import torch
from torch import nn

from steelyard.errors import BadInput

CPU = torch.device("cpu")


def generator_of(device: torch.device) -> torch.Generator:
    if device.type == "cpu":
        return torch.default_generator
    torch.cuda.init()  # this creates the default generators
    return torch.cuda.default_generators[device.index]


def torch_device_of(model: nn.Module) -> torch.device:
    """Return the device of the model's tensors, ignoring meta tensors; raise BadInput if there are
    several.
    """
    all_devices = {tensor.device for tensor in (*model.parameters(), *model.buffers())}
    devices = sorted(map(str, all_devices - {torch.device("meta")})) or ["cpu"]
    if len(devices) > 1 or torch.device(devices[0]).type not in ("cpu", "cuda"):
        raise BadInput(
            f"the model is on {' and '.join(devices)}",
            expected="the whole model on the CPU, or on one CUDA device",
            remedy="move it first with model.to(...)",
        )
    return torch.device(devices[0])
