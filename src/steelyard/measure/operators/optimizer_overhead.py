"""What the optimizer's own Python takes between two operators of its step.

Of small models it is most of the step. Not for the operators: see benchmark.py.
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
    """A step on parameters of one element each computes nothing: what is left is Python.

    ``dims`` says how many dimensions each has: some optimizers choose by them.

    ``calls`` operators of it are taken off at the price of a call that does as good as nothing: on
    a CPU that is in theirs, and on a GPU theirs have nothing of what the host does.
    """
    held = [nn.Parameter(torch.zeros((1,) * count, device=device)) for count in dims]
    for parameter in held:
        parameter.grad = torch.ones_like(parameter)
    optimizer = make(held)
    clock, one = Clock(device), torch.zeros(1, device=device)

    def nothing() -> None:
        with torch.no_grad():
            for _ in range(calls):
                one.mul_(1.0)

    for _ in range(_WARMUPS):
        optimizer.step()
    steps = spread([clock.seconds(optimizer.step) for _ in range(_ROUNDS)])
    is_near = device.type == "cpu"
    empty = spread([clock.seconds(nothing) for _ in range(_ROUNDS)]).value if is_near else 0.0

    def each(seconds: float) -> float:
        return max(0.0, seconds - empty) / max(calls, 1)

    return Estimate(value=each(steps.value), low=each(steps.low), high=each(steps.high))
