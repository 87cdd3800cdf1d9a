"""What the optimizer's own Python takes between two operators of its step.

Of small models it is most of the step. Not for the operators: see operators.py.
"""

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import nn

from steelyard.core.quad import Estimate
from steelyard.measure.clock import Clock, spread

_ROUNDS = 9
_WARMUPS = 3


def update_call_seconds(
    make: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer],
    *,
    dims: Sequence[int],
    calls: int,
) -> Estimate:
    """A step on parameters of one element each computes nothing: what is left is Python.

    ``dims`` says how many dimensions each has: some optimizers choose by them.

    ``calls`` operators of it are taken off at the price of a call that does as good as nothing.
    """
    held = [nn.Parameter(torch.zeros((1,) * count)) for count in dims]
    for parameter in held:
        parameter.grad = torch.ones_like(parameter)
    optimizer = make(held)
    clock, one = Clock(torch.device("cpu")), torch.zeros(1)

    def nothing() -> None:
        with torch.no_grad():
            for _ in range(calls):
                one.mul_(1.0)

    for _ in range(_WARMUPS):
        optimizer.step()
    steps = spread([clock.seconds(optimizer.step) for _ in range(_ROUNDS)])
    empty = spread([clock.seconds(nothing) for _ in range(_ROUNDS)]).value

    def each(seconds: float) -> float:
        return max(0.0, seconds - empty) / max(calls, 1)

    return Estimate(value=each(steps.value), low=each(steps.low), high=each(steps.high))
