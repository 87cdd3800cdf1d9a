"""Measures the Python overhead of an optimizer between two operators of its step.

In small models it is most of the step. Not for the operators: see benchmark.py.
"""

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import nn

from steelyard.ir.metrics import Estimate
from steelyard.measure.operators.timer import Clock, spread

_ROUNDS = 9
_WARMUPS = 3


def update_call_seconds(
    make: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer],
    *,
    dims: Sequence[int],
    calls: int,
    device: torch.device,
) -> Estimate:
    """Return the optimizer's Python seconds per operator, from steps on one-element parameters.

    Such a step computes next to nothing, so the rest is Python. ``dims`` are the numbers of
    dimensions of the parameters; some optimizers treat them differently.

    On a CPU, the time of ``calls`` trivial operators is subtracted, because operator costs already
    include it. On a GPU, operator costs contain no host time, and nothing is subtracted.
    """
    parameters = [nn.Parameter(torch.zeros((1,) * count, device=device)) for count in dims]
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer = make(parameters)
    clock, one = Clock(device), torch.zeros(1, device=device)

    def nothing() -> None:
        with torch.no_grad():
            for _ in range(calls):
                one.mul_(1.0)

    for _ in range(_WARMUPS):
        optimizer.step()
    steps = spread([clock.seconds(optimizer.step) for _ in range(_ROUNDS)])
    on_cpu = device.type == "cpu"
    empty = spread([clock.seconds(nothing) for _ in range(_ROUNDS)]).value if on_cpu else 0.0

    def per_call(seconds: float) -> float:
        return max(0.0, seconds - empty) / max(calls, 1)

    return Estimate(value=per_call(steps.value), low=per_call(steps.low), high=per_call(steps.high))
