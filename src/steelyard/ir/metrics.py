"""The four traded amounts, always in this order, and their prediction intervals.

Accuracy, memory, communication, computation. Not for how they are predicted: see predict/.
"""

import math
from dataclasses import dataclass
from numbers import Real
from typing import Any, Self, TypeGuard


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Estimate:
    """A predicted amount with the interval that should contain it; behaves as a number.

    Comparison and hash are those of ``value``, so that estimates sort, compare with plain numbers
    and serve as keys. Sums, differences, products and quotients have an interval too. It contains
    every result of operands within the two intervals. All other operations (``round``, ``//``,
    ``%``, ``**``, ``math``, numpy) return plain numbers.
    """

    value: float
    low: float
    high: float

    def __post_init__(self) -> None:
        assert self.low <= self.value <= self.high, repr(self)

    @classmethod
    def exactly(cls, value: float) -> Self:
        return cls(value=value, low=value, high=value)

    @classmethod
    def within(cls, value: float, *, share: float) -> Self:
        """Return ``value`` plus or minus ``share`` of it."""
        return cls(value=value, low=value * (1 - share), high=value * (1 + share))

    def scaled(self, factor: float) -> "Estimate":
        if factor < 0:
            return -self.scaled(-factor)
        return Estimate(value=self.value * factor, low=self.low * factor, high=self.high * factor)

    def times(self, other: "Estimate") -> "Estimate":
        """Return the product of two non-negative estimates."""
        return Estimate(
            value=self.value * other.value, low=self.low * other.low, high=self.high * other.high
        )

    def over(self, other: "Estimate") -> "Estimate":
        """Return the factor by which ``other`` is multiplied to give this estimate, up to rounding.

        The two estimates are assumed to err in the same direction.
        """
        value = self.value / other.value
        return Estimate(
            value=value,
            low=min(value, self.low / other.low),
            high=max(value, self.high / other.high),
        )

    def contains(self, measured: float) -> bool:
        return self.low <= measured <= self.high

    # --- as a number ------------------------------------------------------------------------------

    def __add__(self, other: object) -> "Estimate":
        if isinstance(other, Estimate):
            return Estimate(
                value=self.value + other.value,
                low=self.low + other.low,
                high=self.high + other.high,
            )
        if not _is_number(other):
            return NotImplemented
        return Estimate(value=self.value + other, low=self.low + other, high=self.high + other)

    __radd__ = __add__

    def __neg__(self) -> "Estimate":
        return Estimate(value=-self.value, low=-self.high, high=-self.low)

    def __pos__(self) -> "Estimate":
        return self

    def __sub__(self, other: object) -> "Estimate":
        if isinstance(other, Estimate) or _is_number(other):
            return self + -other
        return NotImplemented

    def __rsub__(self, other: object) -> "Estimate":
        return -self + other

    def __mul__(self, other: object) -> "Estimate":
        if isinstance(other, Estimate):
            value = self.value * other.value
            ends = [a * b for a in (self.low, self.high) for b in (other.low, other.high)]
            # A zero end times an infinite end is NaN, which bounds nothing.
            if any(map(math.isnan, ends)):
                return Estimate(value=value, low=-math.inf, high=math.inf)
            return Estimate(value=value, low=min(value, *ends), high=max(value, *ends))
        return self.scaled(other) if _is_number(other) else NotImplemented

    __rmul__ = __mul__

    def __truediv__(self, other: object) -> "Estimate":
        if isinstance(other, Estimate):
            if not other.low <= 0 <= other.high:
                ends = [a / b for a in (self.low, self.high) for b in (other.low, other.high)]
                value = self.value / other.value
                return Estimate(value=value, low=min(value, *ends), high=max(value, *ends))
            # A divisor that may be zero leaves the quotient unbounded.
            return Estimate(value=self.value / other.value, low=-math.inf, high=math.inf)
        if not _is_number(other):
            return NotImplemented
        if other < 0:
            return -self / -other
        return Estimate(value=self.value / other, low=self.low / other, high=self.high / other)

    def __rtruediv__(self, other: object) -> "Estimate":
        return Estimate.exactly(other) / self if _is_number(other) else NotImplemented

    def __floordiv__(self, other: "Estimate | float") -> float:
        return self.value // _plain(other)

    def __rfloordiv__(self, other: float) -> float:
        return other // self.value

    def __mod__(self, other: "Estimate | float") -> float:
        return self.value % _plain(other)

    def __rmod__(self, other: float) -> float:
        return other % self.value

    def __divmod__(self, other: "Estimate | float") -> tuple[float, float]:
        return divmod(self.value, _plain(other))

    def __rdivmod__(self, other: float) -> tuple[float, float]:
        return divmod(other, self.value)

    def __pow__(self, other: "Estimate | float") -> float:
        return float(self.value ** _plain(other))

    def __rpow__(self, other: float) -> float:
        return float(other**self.value)

    def __abs__(self) -> float:
        return abs(self.value)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Estimate) or _is_number(other):
            return self.value == _plain(other)
        return NotImplemented

    def __lt__(self, other: "Estimate | float") -> bool:
        return self.value < _plain(other)

    def __le__(self, other: "Estimate | float") -> bool:
        return self.value <= _plain(other)

    def __gt__(self, other: "Estimate | float") -> bool:
        return self.value > _plain(other)

    def __ge__(self, other: "Estimate | float") -> bool:
        return self.value >= _plain(other)

    def __hash__(self) -> int:
        return hash(self.value)

    def __bool__(self) -> bool:
        return bool(self.value)

    def __float__(self) -> float:
        return float(self.value)

    def __int__(self) -> int:
        return int(self.value)

    __trunc__ = __int__

    def __floor__(self) -> int:
        return math.floor(self.value)

    def __ceil__(self) -> int:
        return math.ceil(self.value)

    def __round__(self, digits: int | None = None) -> float:
        return round(self.value) if digits is None else round(self.value, digits)

    def __format__(self, spec: str) -> str:
        """Format ``value``; an empty spec means ``str``.

        Integral values also accept integer formats, such as ``,d``.
        """
        if not spec:
            return str(self)
        is_for_integers = spec[-1] in "bcdoxX" and float(self.value).is_integer()
        return format(int(self.value) if is_for_integers else self.value, spec)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        """Return ``value`` as an array; only numpy calls this, so it is already imported."""
        import numpy as np

        return np.array(self.value, dtype=dtype)


def _is_number(other: object) -> TypeGuard[float]:
    """True for Python's and numpy's real numbers."""
    return isinstance(other, Real)


def _plain(other: "Estimate | float") -> float:
    return other.value if isinstance(other, Estimate) else other


NOTHING = Estimate.exactly(0.0)
# Two of the texts for an accuracy loss; for the result of a probe see plans/accuracy.py.
EXACT, UNKNOWN = "exact", "unknown"


@dataclass(frozen=True, slots=True, kw_only=True)
class Metrics:
    """The cost of one training step on one rank.

    ``accuracy_loss`` is one of four texts: ``exact``, ``<= bound``, ``x ± y (probe ...)``,
    ``unknown``. The costs of consecutive steps add up, except memory: the peak of two steps is the
    larger of their peaks.
    """

    accuracy_loss: str = EXACT
    memory_bytes: Estimate
    communication_bytes: Estimate = NOTHING
    communication_seconds: Estimate = NOTHING
    exposed_communication_seconds: Estimate = NOTHING
    computation_seconds: Estimate
    step_seconds: Estimate

    def then(self, later: "Metrics") -> "Metrics":
        """Return the cost of running this step and then the step ``later`` on the same device."""
        assert self.accuracy_loss == later.accuracy_loss
        return Metrics(
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
