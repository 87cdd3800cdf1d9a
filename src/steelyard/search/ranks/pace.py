"""Detects steps whose times differ from the prediction several times in a row.

Such steps justify a short measurement. If the measurement finds no cause, the recent step times
become the new expectation, so that a prediction that is always wrong triggers a single measurement
and a later change triggers another at once. Not for the measurement: see api/replan.py.
"""

from dataclasses import dataclass, field
from statistics import median

from steelyard.ir.metrics import Estimate

# Number of consecutive steps that must all be too slow, or all too fast.
IN_A_ROW = 3
# The time spent waiting for other ranks deviates if it differs from the prediction by this share of
# a step.
WAITS_SHARE = 0.25
# Step times deviate if they differ by more than this share from the last times that were accepted
# as normal.
_VARIATION = 0.25
# The number of steps to ignore after a measurement that found nothing; it is doubled each time up
# to a maximum. A step that takes this many times as long as expected triggers a measurement anyway.
_FIRST_PAUSE, _MAX_PAUSE = 20, 640
_ALWAYS_MEASURE_RATIO = 1.5


@dataclass(slots=True, kw_only=True)
class Pace:
    """The expected step time, with the recent steps that deviate from it.

    ``seconds`` is the expected interval of a step, ``waits`` the seconds in it that are spent
    waiting for other ranks. The first ``skips`` steps are ignored.
    """

    seconds: Estimate
    waits: float
    skips: int = 0
    _deviations_in_a_row: int = 0
    _pause: int = 0
    _next_pause: int = _FIRST_PAUSE
    _recent: list[tuple[float, float]] = field(default_factory=list)

    def add(self, seconds: float, waited: float) -> bool:
        """Record a step; return True if it and the steps before it justify a measurement."""
        if self.skips:
            self.skips -= 1
            return False
        self._recent = [*self._recent[1 - 2 * IN_A_ROW :], (seconds, waited)]
        sign = self._sign(seconds, waited)
        self._deviations_in_a_row = (
            self._deviations_in_a_row + sign if sign * self._deviations_in_a_row > 0 else sign
        )
        self._pause = max(0, self._pause - 1)
        is_due = seconds > _ALWAYS_MEASURE_RATIO * self.seconds.high or self._pause == 0
        return abs(self._deviations_in_a_row) >= IN_A_ROW and is_due

    def settle(self) -> None:
        """Accept the recent step times as expected and start a pause without measurements."""
        last = self._recent[-IN_A_ROW:]
        if last:
            seconds, waits = (median(each) for each in zip(*last, strict=True))
            self.seconds, self.waits = Estimate.within(seconds, share=_VARIATION), waits
        self._deviations_in_a_row, self._pause = 0, self._next_pause
        self._next_pause = min(2 * self._next_pause, _MAX_PAUSE)

    def _sign(self, seconds: float, waited: float) -> int:
        """Return 1 if a step or its wait was too long, -1 if either was too short, otherwise 0."""
        if seconds > self.seconds.high:
            return 1
        if seconds < self.seconds.low:
            return -1
        deviation = waited - self.waits
        if abs(deviation) <= WAITS_SHARE * max(seconds, self.seconds.value):
            return 0
        return 1 if deviation > 0 else -1
