"""What a whole step takes over the sum of its operators' times, found by running steps.

Isolated times leave out what only a step has: views, Python between the calls, pages the heap
gives back and fetches again. Not for timing operators: see measure/operators/benchmark.py.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from steelyard.ir.metrics import Estimate
from steelyard.measure.operators.timer import Clock, lead_seconds, spread

_MOST_ROUNDS = 7
_LONG_SECONDS = 1.0
# However alike the rounds were: the same two steps in another process, with another heap, differed
# by up to so much from what was found here (benchmarks/truth.py, one thread).
_DOUBT = 0.06


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Runnable:
    """A program as something to call, and the sum of the times of its operators.

    ``run`` carries out one forward and backward pass (or whatever ``operator_seconds`` adds up)
    and leaves the level as it found it, gradients dropped.
    """

    run: Callable[[], object]
    operator_seconds: float


def whole_step(
    program: Runnable, *, seconds_budget: float, device: torch.device | None = None
) -> Estimate | None:
    """Whole over sum: the median over rounds; None where not even one is worth its time."""
    found = _taking_turns((program,), seconds_budget, device)
    return _spread([seconds for (seconds,) in found])


def host_lead(run: Callable[[], object], *, device: torch.device) -> Estimate:
    """How far the host is ahead of a GPU when it has told it all of a step."""
    for _ in range(2):
        run()
    return spread([lead_seconds(run, device) for _ in range(_MOST_ROUNDS)])


def step_time_ratio(
    other: Runnable, base: Runnable, *, seconds_budget: float, device: torch.device | None = None
) -> Estimate | None:
    """Whole over sum of ``other`` over that of ``base``, the two taking turns.

    What the machine does meanwhile it does to both.
    """
    found = _taking_turns((other, base), seconds_budget, device)
    return _spread([ours / theirs for ours, theirs in found])


def _spread(samples: list[float]) -> Estimate | None:
    if not samples:
        return None
    found = spread(samples)
    doubt = Estimate.within(found.value, share=_DOUBT)
    return Estimate(
        value=found.value, low=min(found.low, doubt.low), high=max(found.high, doubt.high)
    )


def _taking_turns(
    programs: Sequence[Runnable], seconds_budget: float, device: torch.device | None
) -> list[list[float]]:
    """Whole over sum of each program, round by round."""
    assert all(program.operator_seconds > 0 for program in programs)
    clock = Clock(device or torch.device("cpu"))
    once = sum(program.operator_seconds for program in programs)
    possible = int(seconds_budget / once)
    if not possible:
        return []
    # Of a long step the first touch of memory and caches is a small part.
    warmups = min(2 if once < _LONG_SECONDS else 1, possible - 1)
    rounds = min(_MOST_ROUNDS, possible - warmups)
    for _ in range(warmups):
        for program in programs:
            program.run()
    return [[clock.seconds(p.run) / p.operator_seconds for p in programs] for _ in range(rounds)]
