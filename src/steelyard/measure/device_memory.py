"""Where a step lies: on the processor of this machine, or on one GPU of it.

Not for what operators take there: see measure/operators/benchmark.py.
"""

from collections.abc import Iterable

import torch

from steelyard.errors import BadInput
from steelyard.hardware.host_os import available_bytes


def check_is_own(home: torch.device) -> None:
    """A plan says of the process's own GPU no number: on another rank it is another one."""
    if home.type == "cuda" and home.index != torch.cuda.current_device():
        raise BadInput(
            f"the model is on {home}, and the current GPU is {torch.cuda.current_device()}",
            expected="a model on the GPU that is the current one in its process",
            remedy=f"torch.cuda.set_device({home.index}), before the model is made",
        )


def free_bytes(home: torch.device) -> int:
    """What could be allocated there now; torch gives back what it keeps of a GPU, if it has to."""
    if home.type == "cpu":
        return available_bytes()
    kept = torch.cuda.memory_reserved(home) - torch.cuda.memory_allocated(home)
    return int(torch.cuda.mem_get_info(home)[0]) + kept


def random_devices(home: torch.device) -> Iterable[torch.device]:
    """Those whose generators torch forks beside the processor's."""
    return [] if home.type == "cpu" else [home]
