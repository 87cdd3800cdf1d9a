"""Selects the gradient codec of each step: none during warm-up, then the plan's, then less lossy
ones.

If the residual grows too large or the loss rises, the next codec is used. All ranks see the same
figures and make the same decision. Not for the residuals: see run/error_feedback.py.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import cast

# The number of steps between two checks.
EVERY = 50
# Upper bound of the residual's norm relative to a step's gradient. If the error of a codec is nine
# tenths of its input, the ratio converges to this value.
MOST_HELD = 10.0
# Bounds on the rise of the mean loss: relative to the lowest mean of all windows, and relative to
# the first mean, because a loss near zero fluctuates by a multiple of itself.
_MAX_RISE, _MAX_RISE_OF_FIRST = 0.2, 0.05

MaxOverRanks = Callable[[Sequence[float]], Sequence[float]]


@dataclass(frozen=True, slots=True, kw_only=True)
class FallbackRecord:
    """A record of the guard's checks; ``residuals`` has the relative residual at each check."""

    exact_steps: int
    residuals: tuple[float, ...]
    reasons: tuple[str, ...]


class CompressionFallback:
    """Decides which codec a step uses.

    ``rungs`` is the number of codecs in the fallback order, which starts with the plan's codec and
    ends with none. ``max_over_ranks`` returns the maxima of figures over all ranks.
    """

    def __init__(self, rungs: int, *, warm_up: int = 0) -> None:
        assert rungs > 1, "a plan with codecs has a fallback order"
        self._rungs, self.max_over_ranks = rungs, cast("MaxOverRanks", list)
        self.warm_up = warm_up
        self._fallbacks = 0
        self._losses: list[float] = []
        self._lowest_mean = self._first_mean = math.inf
        self._exact_steps = 0
        self._residuals: list[float] = []
        self._reasons: list[str] = []

    @property
    def rung(self) -> int:
        """The index of this step's codec in the fallback order."""
        return self._rungs - 1 if self.warm_up else self._fallbacks

    @property
    def state(self) -> tuple[int, int]:
        """The state to save in a checkpoint."""
        return self.warm_up, self._fallbacks

    def load_state(self, warm_up: int, fallbacks: int) -> None:
        self.warm_up, self._fallbacks = warm_up, min(fallbacks, self._rungs - 1)

    def record(self) -> FallbackRecord:
        return FallbackRecord(
            exact_steps=self._exact_steps,
            residuals=tuple(self._residuals),
            reasons=tuple(self._reasons),
        )

    def should_fall_back(self, loss: float, residual_ratio: Callable[[], float]) -> bool:
        """Record a finished step; return True if the next one uses the next codec.

        ``residual_ratio`` measures the current relative residual.
        """
        if self.rung == self._rungs - 1:
            self._exact_steps += 1
            self.warm_up = max(0, self.warm_up - 1)
            return False
        self._losses.append(loss)
        if len(self._losses) < EVERY:
            return False
        residual, mean = self.max_over_ranks((residual_ratio(), sum(self._losses) / EVERY))
        self._losses.clear()
        self._residuals.append(residual)
        reason = self._reason(residual, mean)
        if reason:
            self._fallbacks += 1
            self._lowest_mean = self._first_mean = math.inf
            self._reasons.append(reason)
        return bool(reason)

    def _reason(self, residual: float, mean: float) -> str:
        if not residual <= MOST_HELD:
            return (
                f"error feedback held {residual:.3g} steps' worth of gradients, above the limit of "
                f"{MOST_HELD:g}"
            )
        if not math.isfinite(mean):
            return ""  # no codec can repair weights that are not finite
        self._first_mean = mean if self._first_mean == math.inf else self._first_mean
        self._lowest_mean = min(self._lowest_mean, mean)
        rise = max(_MAX_RISE * abs(self._lowest_mean), _MAX_RISE_OF_FIRST * abs(self._first_mean))
        if mean > self._lowest_mean + rise:
            return f"the loss rose from {self._lowest_mean:.4g} to {mean:.4g} in {EVERY} steps"
        return ""


__all__ = ["EVERY", "MOST_HELD", "CompressionFallback", "FallbackRecord"]
