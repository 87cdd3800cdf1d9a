"""Arrival skew: the time that a rank waits at an exchange because another rank arrives later.

Ranks do not take exactly the same time for the same program, and the difference grows with the time
that they compute between two exchanges. Not for the exchange itself: see hardware/link.py.
"""

import math
from dataclasses import dataclass

from steelyard.ir.metrics import Estimate

# Bounds of the interval, as multiples of the expected wait. In repeated runs of the same steps, the
# skew was between a tenth of the mean and 2.5 times the mean.
_LEAST, _MOST = 0.0, 3.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Skew:
    """The mean wait of a rank after computing for a short and for a long time, in seconds."""

    short_seconds: float
    short_wait: float
    long_seconds: float
    long_wait: float

    def wait(self, computed_seconds: float) -> Estimate:
        """Return the expected wait after ``computed_seconds`` since the ranks were last
        synchronized.

        It is a power law through both measured points. Independent disturbances grow with the
        square root of the time; those of a rank that stays slower for a while grow with the time
        itself.
        """
        if computed_seconds <= 0:
            return Estimate.exactly(0.0)
        times = math.log(self.long_wait / self.short_wait)
        power = min(1.0, max(0.0, times / math.log(self.long_seconds / self.short_seconds)))
        expected = self.long_wait * (computed_seconds / self.long_seconds) ** power
        return Estimate(value=expected, low=_LEAST * expected, high=_MOST * expected)
