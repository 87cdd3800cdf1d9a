"""The pace of a run beside its prediction: when steps take so much more or less time than was
predicted, several times in a row, that the reason is worth a look.

A look costs a short measurement. One that finds nothing makes the steps as they are the new
expectation, so that a prediction that is wrong all the time is looked at once, and a later change
at once again. Not for what is looked at: see api/replan.py.
"""

from dataclasses import dataclass, field
from statistics import median

from steelyard.ir.metrics import Estimate

# So many steps in a row, all too slow or all too fast.
IN_A_ROW = 3
# Waiting for other ranks is another than was predicted if it differs by this share of a step.
WAITS_SHARE = 0.25
# What was seen may vary by as much without being another pace.
_VARIES = 0.25
# Steps that pass after a look that found nothing, doubled each time; one that is so many times as
# long as expected is looked at all the same.
_REST, _MOST_REST = 20, 640
_STRIKING = 1.5


@dataclass(slots=True, kw_only=True)
class Pace:
    """``seconds`` is the interval that a step should be found in, ``waits`` what of it other ranks
    are waited for. The first ``skips`` steps are not looked at."""

    seconds: Estimate
    waits: float
    skips: int = 0
    _row: int = 0
    _rest: int = 0
    _next_rest: int = _REST
    _recent: list[tuple[float, float]] = field(default_factory=list)

    def add(self, seconds: float, waited: float) -> bool:
        """Takes one step in; whether it and those before it are worth a look."""
        if self.skips:
            self.skips -= 1
            return False
        self._recent = [*self._recent[1 - 2 * IN_A_ROW :], (seconds, waited)]
        sign = self._sign(seconds, waited)
        self._row = self._row + sign if sign * self._row > 0 else sign
        self._rest = max(0, self._rest - 1)
        is_striking = seconds > _STRIKING * self.seconds.high or self._rest == 0
        return abs(self._row) >= IN_A_ROW and is_striking

    def settle(self) -> None:
        """Steps are as they were seen last, and nothing is to be done about it."""
        last = self._recent[-IN_A_ROW:]
        if last:
            took, waits = (median(each) for each in zip(*last, strict=True))
            self.seconds, self.waits = Estimate.within(took, share=_VARIES), waits
        self._row, self._rest = 0, self._next_rest
        self._next_rest = min(2 * self._next_rest, _MOST_REST)

    def _sign(self, seconds: float, waited: float) -> int:
        """1 where a step was too slow, -1 where it was too fast or waited too little, else 0."""
        if seconds > self.seconds.high:
            return 1
        if seconds < self.seconds.low:
            return -1
        off = waited - self.waits
        if abs(off) <= WAITS_SHARE * max(seconds, self.seconds.value):
            return 0
        return 1 if off > 0 else -1
