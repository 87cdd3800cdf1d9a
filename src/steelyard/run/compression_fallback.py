"""Whether gradients go in codes in the step to come, and in which: as they are at first, then as
the plan says, and in ones that lose less where too much is held back or the loss rises.

All ranks see the same figures and decide alike. Not for what was lost: see run/error_feedback.py.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import cast

# Steps from one look to the next.
EVERY = 50
# What codes hold back, of the gradient of a step. A contraction to nine tenths of it ends there.
MOST_HELD = 10.0
# By how much the loss may lie above the least of all stretches; and of what the first one was, as
# one that has come near to nothing goes up and down by a multiple of itself.
_MOST_RISE, _LEAST_RISE = 0.2, 0.05

Agreed = Callable[[Sequence[float]], Sequence[float]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """``held`` is what was held back in each look, where something is."""

    exact_steps: int
    held: tuple[float, ...]
    reasons: tuple[str, ...]


class CompressionFallback:
    """``rungs`` are the plan's codes and those that lose less, the last of which are none;
    ``agreed`` are the most that any rank says."""

    def __init__(self, rungs: int, *, warm_up: int = 0) -> None:
        assert rungs > 1, "nothing goes in codes"
        self._rungs, self.agreed = rungs, cast("Agreed", list)
        self.warm_up = warm_up
        self._down = 0
        self._losses: list[float] = []
        self._least = self._first = math.inf
        self._exact_steps = 0
        self._held: list[float] = []
        self._reasons: list[str] = []

    @property
    def rung(self) -> int:
        """In this step."""
        return self._rungs - 1 if self.warm_up else self._down

    @property
    def state(self) -> tuple[int, int]:
        """What a checkpoint has to hold."""
        return self.warm_up, self._down

    def go_on(self, warm_up: int, down: int) -> None:
        self.warm_up, self._down = warm_up, min(down, self._rungs - 1)

    def seen(self) -> Seen:
        return Seen(
            exact_steps=self._exact_steps, held=tuple(self._held), reasons=tuple(self._reasons)
        )

    def is_to_give_up(self, loss: float, held_back: Callable[[], float]) -> bool:
        """At the end of each step: whether from the next one on codes are others, which lose less.
        ``held_back`` looks at what is held back now."""
        if self.rung == self._rungs - 1:
            self._exact_steps += 1
            self.warm_up = max(0, self.warm_up - 1)
            return False
        self._losses.append(loss)
        if len(self._losses) < EVERY:
            return False
        held, mean = self.agreed((held_back(), sum(self._losses) / EVERY))
        self._losses.clear()
        self._held.append(held)
        reason = self._reason(held, mean)
        if reason:
            self._down += 1
            self._least = self._first = math.inf
            self._reasons.append(reason)
        return bool(reason)

    def _reason(self, held: float, mean: float) -> str:
        if not held <= MOST_HELD:
            return f"{held:.3g} steps' worth of gradients was held back, of {MOST_HELD:g} at most"
        if not math.isfinite(mean):
            return ""  # no code makes up for weights that are not finite
        self._first = mean if self._first == math.inf else self._first
        self._least = min(self._least, mean)
        rise = max(_MOST_RISE * abs(self._least), _LEAST_RISE * abs(self._first))
        if mean > self._least + rise:
            return f"the loss rose from {self._least:.4g} to {mean:.4g} in {EVERY} steps"
        return ""


__all__ = ["EVERY", "MOST_HELD", "CompressionFallback", "Seen"]
