"""Arrival skew: how long a rank waits at an exchange because another rank arrives later.

Ranks that run the same program do not take the same time for it. The difference grows with the time
they compute between two exchanges. Not for the exchange itself: see hardware/link.py.
"""

import math
from dataclasses import dataclass

from steelyard.ir.metrics import Estimate

# Of what was measured. The skew of one run differs from that of the next: in repeated runs of the
# same steps it was between a tenth and 2.5 times the mean.
_LEAST, _MOST = 0.0, 3.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Skew:
    """The mean wait of a rank after computing for a short and for a long time, in seconds."""

    short_seconds: float
    short_wait: float
    long_seconds: float
    long_wait: float

    def wait(self, computed_seconds: float) -> Estimate:
        """The expected wait after ``computed_seconds`` since all ranks were last in step: a power
        law through both measured points. Independent disturbances add up as the square root of the
        time, a rank that stays slower for a while as the time itself."""
        if computed_seconds <= 0:
            return Estimate.exactly(0.0)
        times = math.log(self.long_wait / self.short_wait)
        power = min(1.0, max(0.0, times / math.log(self.long_seconds / self.short_seconds)))
        expected = self.long_wait * (computed_seconds / self.long_seconds) ** power
        return Estimate(value=expected, low=_LEAST * expected, high=_MOST * expected)
