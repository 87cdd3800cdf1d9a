"""Runs steps to measure the ratio of whole-step time to the sum of the operators' times.

The times of single operators lack parts of a step: views, Python between calls, and pages that the
heap returns to the system and gets again. Not for timing operators: see
measure/operators/benchmark.py.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from steelyard.ir.metrics import Estimate
from steelyard.measure.operators.timer import Clock, backlog_seconds, spread

_MOST_ROUNDS, _FEWEST_ROUNDS = 7, 3
# A ratio of two steps has at least 6 % of doubt, which more rounds do not reduce.
_MOST_ROUNDS_OF_RATIO = 5
# Rounds end early if the results of the fewest rounds differ by at most this share.
_AGREEING = 0.03
_LONG_SECONDS = 1.0
# The minimum uncertainty, even if all rounds agree. In another process, with another heap, the same
# two steps differed by up to this share from the result here (benchmarks/truth.py, one thread).
_MIN_DOUBT = 0.06


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Runnable:
    """A program that can be called, with the sum of the times of its operators.

    ``run`` executes one forward and backward pass (or any work that ``operator_seconds`` adds up)
    and restores the initial memory level, with gradients dropped.
    """

    run: Callable[[], object]
    operator_seconds: float


def whole_step(
    program: Runnable, *, seconds_budget: float, device: torch.device | None = None
) -> Estimate | None:
    """Return step seconds over the sum of operator seconds; None if no round fits the time
    budget.
    """
    found = _interleaved_ratios((program,), seconds_budget, device, most_rounds=_MOST_ROUNDS)
    return _spread([seconds for (seconds,) in found])


def host_lead(run: Callable[[], object], *, device: torch.device) -> Estimate:
    """Return by how many seconds the host is ahead of a GPU after enqueueing a whole step."""
    for _ in range(2):
        run()
    return spread([backlog_seconds(run, device) for _ in range(_MOST_ROUNDS)])


def step_time_ratio(
    other: Runnable, base: Runnable, *, seconds_budget: float, device: torch.device | None = None
) -> Estimate | None:
    """Return the ratio of whole step to sum of operators for ``other``, divided by that for
    ``base``.

    The two programs run interleaved, so that other load on the machine affects both.
    """
    found = _interleaved_ratios(
        (other, base), seconds_budget, device, most_rounds=_MOST_ROUNDS_OF_RATIO
    )
    return _spread([ours / theirs for ours, theirs in found])


def _spread(samples: list[float]) -> Estimate | None:
    if not samples:
        return None
    found = spread(samples)
    doubt = Estimate.within(found.value, share=_MIN_DOUBT)
    return Estimate(
        value=found.value, low=min(found.low, doubt.low), high=max(found.high, doubt.high)
    )


def _interleaved_ratios(
    programs: Sequence[Runnable],
    seconds_budget: float,
    device: torch.device | None,
    *,
    most_rounds: int,
) -> list[list[float]]:
    """Return the ratio of whole step to sum of operators for each program, round by round."""
    assert all(program.operator_seconds > 0 for program in programs)
    clock = Clock(device or torch.device("cpu"))
    round_seconds = sum(program.operator_seconds for program in programs)
    affordable_runs = int(seconds_budget / round_seconds)
    if not affordable_runs:
        return []
    # In a long step, touching memory and caches for the first time takes a small part, so one
    # warm-up suffices.
    warmups = min(2 if round_seconds < _LONG_SECONDS else 1, affordable_runs - 1)
    rounds = min(most_rounds, affordable_runs - warmups)
    for _ in range(warmups):
        for program in programs:
            program.run()
    found: list[list[float]] = []
    while len(found) < rounds and not _agree(found):
        found.append([clock.seconds(p.run) / p.operator_seconds for p in programs])
    return found


def _agree(rounds: Sequence[Sequence[float]]) -> bool:
    """True if there are enough rounds, and they have nearly the same results for each program."""
    if len(rounds) < _FEWEST_ROUNDS:
        return False
    return all(max(ratios) <= (1 + _AGREEING) * min(ratios) for ratios in zip(*rounds, strict=True))
