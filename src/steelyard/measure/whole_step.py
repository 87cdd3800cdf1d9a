"""What a whole step takes over the sum of its operators' times, found by running steps.

Isolated times leave out what only a step has: views, Python between the calls, pages the heap
gives back and fetches again. Not for timing operators: see operators.py.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from steelyard.core.quad import Estimate
from steelyard.measure.clock import Clock, spread

_WARMUPS = 2


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Runnable:
    """A program as something to call, and the sum of the times of its operators.

    ``run`` carries out one forward and backward pass (or whatever ``operator_seconds`` adds up)
    and leaves the level as it found it, gradients dropped.
    """

    run: Callable[[], object]
    operator_seconds: float


def whole_step(
    programs: Sequence[Runnable], *, rounds: int = 7, device: torch.device | None = None
) -> Estimate:
    """Whole over sum: the median over programs and rounds, the programs taking turns.

    The interval is from the least to the most of the tenth to ninetieth percentile of each, so
    that with several programs it also says how far one factor holds for all.
    """
    clock = Clock(device or torch.device("cpu"))
    for program in programs:
        assert program.operator_seconds > 0
        for _ in range(_WARMUPS):
            program.run()
    ratios: list[list[float]] = [[] for _ in programs]
    for _ in range(rounds):
        for program, found in zip(programs, ratios, strict=True):
            found.append(clock.seconds(program.run) / program.operator_seconds)
    each = [spread(found) for found in ratios]
    middle = spread([e.value for e in each]).value
    return Estimate(value=middle, low=min(e.low for e in each), high=max(e.high for e in each))
