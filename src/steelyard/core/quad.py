"""The four amounts that are traded, always in this order, and the intervals around them.

Accuracy, memory, communication, computation. Not for how they are predicted: see predict/.
"""

from dataclasses import dataclass
from typing import Self


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """A predicted amount with the interval it should be found in."""

    value: float
    low: float
    high: float

    def __post_init__(self) -> None:
        assert self.low <= self.value <= self.high, self

    @classmethod
    def exactly(cls, value: float) -> Self:
        return cls(value=value, low=value, high=value)

    @classmethod
    def within(cls, value: float, *, share: float) -> Self:
        """``value``, give or take ``share`` of it."""
        return cls(value=value, low=value * (1 - share), high=value * (1 + share))

    def __add__(self, other: "Estimate") -> "Estimate":
        return Estimate(
            value=self.value + other.value, low=self.low + other.low, high=self.high + other.high
        )

    def scaled(self, factor: float) -> "Estimate":
        return Estimate(value=self.value * factor, low=self.low * factor, high=self.high * factor)

    def times(self, other: "Estimate") -> "Estimate":
        """Of what is not negative."""
        return Estimate(
            value=self.value * other.value, low=self.low * other.low, high=self.high * other.high
        )

    def over(self, other: "Estimate") -> "Estimate":
        """What ``other`` was multiplied by to give this, up to rounding."""
        value = self.value / other.value
        return Estimate(
            value=value,
            low=min(value, self.low / other.low),
            high=max(value, self.high / other.high),
        )

    def contains(self, measured: float) -> bool:
        return self.low <= measured <= self.high


NOTHING = Estimate.exactly(0.0)
# Words for an accuracy loss; a third is what a probe saw, see accuracy.py.
EXACT, UNKNOWN = "exact", "unknown"


@dataclass(frozen=True, slots=True, kw_only=True)
class Quad:
    """What one training step costs on one rank.

    ``accuracy_loss`` is one of four words: ``exact``, ``<= bound``, ``x ± y (probe ...)``,
    ``unknown``. Steps that follow one another add in every figure but memory, which is the
    larger of the two: peaks are not sums.
    """

    accuracy_loss: str = EXACT
    memory_bytes: Estimate
    communication_bytes: Estimate = NOTHING
    communication_seconds: Estimate = NOTHING
    exposed_communication_seconds: Estimate = NOTHING
    computation_seconds: Estimate
    step_seconds: Estimate

    def then(self, later: "Quad") -> "Quad":
        """This, and after it ``later``, on the same device."""
        assert self.accuracy_loss == later.accuracy_loss
        return Quad(
            accuracy_loss=self.accuracy_loss,
            memory_bytes=max(self.memory_bytes, later.memory_bytes, key=lambda e: e.value),
            communication_bytes=self.communication_bytes + later.communication_bytes,
            communication_seconds=self.communication_seconds + later.communication_seconds,
            exposed_communication_seconds=(
                self.exposed_communication_seconds + later.exposed_communication_seconds
            ),
            computation_seconds=self.computation_seconds + later.computation_seconds,
            step_seconds=self.step_seconds + later.step_seconds,
        )
