"""Where a rank's tensors lie, and from what torch draws random numbers there."""

import torch

CPU = torch.device("cpu")


def generator_of(device: torch.device) -> torch.Generator:
    if device.type == "cpu":
        return torch.default_generator
    torch.cuda.init()  # or there is none yet
    return torch.cuda.default_generators[device.index]
