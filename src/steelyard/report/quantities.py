"""Amounts with units; predicted amounts have an interval, measured ones do not.

Not for naming the amounts: see document.py.
"""

from dataclasses import dataclass
from enum import StrEnum

from steelyard.ir.metrics import Estimate, Metrics
from steelyard.units import format_bytes, format_seconds


class Unit(StrEnum):
    BYTES = "bytes"
    SECONDS = "seconds"


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantity:
    """An amount; its text begins with ``~`` if it was predicted."""

    value: float
    unit: Unit
    low: float | None = None
    high: float | None = None

    @property
    def is_predicted(self) -> bool:
        return self.low is not None

    def __str__(self) -> str:
        # A zero with an interval of zero width is certain and needs no ``~``.
        if not self.value and not self.high:
            return "none"
        return ("~" if self.is_predicted else "") + amount(self.value, self.unit)

    @property
    def interval(self) -> str:
        if self.low is None or self.high is None:
            return "measured"
        if self.low == self.high:
            return "exact"
        return f"between {amount(self.low, self.unit)} and {amount(self.high, self.unit)}"


Cell = Quantity | str
"""A figure, or a text in its place: ``exact``, or ``-`` for not measured."""


def amount(value: float, unit: Unit) -> str:
    return format_bytes(value) if unit is Unit.BYTES else format_seconds(value)


def estimate_of(metrics: Metrics, key: str) -> Estimate:
    found: Estimate = getattr(metrics, key)
    return found


def cell(estimate: Estimate, unit: Unit) -> Quantity:
    return Quantity(value=estimate.value, unit=unit, low=estimate.low, high=estimate.high)


def exactly(value: float, unit: Unit) -> Quantity:
    return Quantity(value=value, unit=unit, low=value, high=value)
