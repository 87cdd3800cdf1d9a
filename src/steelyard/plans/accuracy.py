"""Texts for the accuracy loss of a plan, and the check of such a text against a budget.

Not for measuring the loss: see planner/lossy.py.
"""

import math
import re
from dataclasses import dataclass
from decimal import Decimal

from steelyard.ir.metrics import EXACT, UNKNOWN

_PROBED = re.compile(r"([0-9.]+|inf) ± ([0-9.]+|inf) % \(probe: .*\)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Drift:
    """The relative loss differences of twin runs in a probe, one per step."""

    shares: tuple[float, ...]
    items: int

    @property
    def largest(self) -> float:
        """The largest difference; infinite if a loss was not finite."""
        return max(self.shares) if all(map(math.isfinite, self.shares)) else math.inf

    @property
    def spread(self) -> float:
        """The standard deviation over the steps."""
        if not math.isfinite(self.largest):
            return math.inf
        mean = sum(self.shares) / len(self.shares)
        return math.sqrt(sum((s - mean) ** 2 for s in self.shares) / len(self.shares))

    @property
    def upper(self) -> float:
        """The upper end of an interval such as ``4.6 ± 1.5 %``; a budget must not be below it."""
        return self.largest + self.spread

    def keeps(self, bound: float) -> bool:
        """True if the whole interval is within the budget, judged by the figures that are
        printed.
        """
        return keeps(str(self), bound) is True

    def __str__(self) -> str:
        steps = len(self.shares)
        return (
            f"{_figures(self.largest)} ± {_figures(self.spread)} % "
            f"(probe: {steps} steps, {self.items} items, twin run)"
        )


def _figures(share: float) -> str:
    """Format a share as a percentage with two significant digits: ``1.2``, ``0.00034``."""
    if not math.isfinite(share):
        return "inf"
    rounded = float(f"{share * 100:.2g}")
    return f"{rounded:.12f}".rstrip("0").rstrip(".")


def is_word(word: str) -> bool:
    """True if ``word`` is a valid text for an accuracy loss, see ir/metrics.py."""
    return word in (EXACT, UNKNOWN) or word.startswith("<= ") or bool(_PROBED.fullmatch(word))


def keeps(word: str, bound: float) -> bool | None:
    """True if a budget of ``bound`` allows this accuracy loss; None if the loss is unknown.

    For a probed loss, the upper end of the interval counts.
    """
    if word == EXACT:
        return True
    if bound == 0:
        return False
    probed = _PROBED.fullmatch(word)
    # The figures in the text are rounded, so the bound is rounded in the same way.
    if probed is None:
        return None
    # Decimal figures are added as decimals, so that 1.1 + 0.3 is within 1.4.
    return Decimal(probed[1]) + Decimal(probed[2]) <= Decimal(_figures(bound))


def beyond(drift: Drift, bound: float) -> str:
    """Return the reason why a budget does not allow a probed loss."""
    text = f"a probe drifted {drift}"
    if math.isfinite(drift.upper):
        text += f", so up to {_figures(drift.upper)} %"
    return f"{text}, and the accuracy budget is {_figures(bound)} %"
