"""Amounts behave like numbers, with their intervals."""

import json
import math
import operator
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from steelyard.ir.metrics import Estimate
from tests.support.sample import PLAN

MEMORY = PLAN.predicted.metrics.memory_bytes
ENDS = st.floats(-1e6, 1e6)
ESTIMATES = st.tuples(ENDS, ENDS, ENDS).map(sorted).map(
    lambda ends: Estimate(low=ends[0], value=ends[1], high=ends[2])
)  # fmt: skip
NUMBERS = st.floats(-1e6, 1e6) | st.integers(-(10**6), 10**6)
KEEPING = (operator.add, operator.sub, operator.mul, operator.truediv)
PLAIN = (operator.floordiv, operator.mod, divmod)


def _within(data: st.DataObject, operand: Any) -> float:
    """Return a number within the interval of the operand."""
    if isinstance(operand, Estimate):
        return data.draw(st.floats(operand.low, operand.high))
    return float(operand)


def _nearly_contains(found: Estimate, value: float) -> bool:
    if found.low <= value <= found.high:
        return True  # this includes an infinite quotient, to which no slack can be added
    slack = 1e-9 * max(1.0, abs(value))
    return found.low - slack <= value <= found.high + slack


@given(st.sampled_from(KEEPING), ESTIMATES, ESTIMATES | NUMBERS, st.booleans(), st.data())
def test_interval_arithmetic_contains_every_result(
    act: Callable[[Any, Any], Any], one: Estimate, other: Any, turned: bool, data: st.DataObject
) -> None:
    left, right = (other, one) if turned else (one, other)
    if act is operator.truediv and float(right) == 0:
        with pytest.raises(ZeroDivisionError):
            act(left, right)
        return
    found = act(left, right)
    assert isinstance(found, Estimate)
    assert found.value == act(float(left), float(right))
    a, b = _within(data, left), _within(data, right)
    if act is not operator.truediv or b:
        assert _nearly_contains(found, act(a, b))


@given(st.sampled_from(PLAIN), ESTIMATES, ESTIMATES | NUMBERS, st.booleans())
def test_operations_without_intervals_give_plain_numbers(
    act: Callable[[Any, Any], Any], one: Estimate, other: Any, turned: bool
) -> None:
    left, right = (other, one) if turned else (one, other)
    if float(right):
        assert act(left, right) == act(float(left), float(right))


@given(ESTIMATES, ESTIMATES | NUMBERS)
def test_comparison_is_that_of_the_values(one: Estimate, other: Any) -> None:
    for act in (operator.lt, operator.le, operator.gt, operator.ge, operator.eq, operator.ne):
        assert act(one, other) == act(float(one), float(other))
        assert act(other, one) == act(float(other), float(one))
    if one == other:
        assert hash(one) == hash(other)
    assert max(one, other) == max(float(one), float(other))
    assert bool(one) == bool(float(one))


def test_sums_extremes_and_order() -> None:
    amounts = [Estimate.within(v, share=0.1) for v in (3.0, 1.0, 2.0)]
    total = sum(amounts)
    assert isinstance(total, Estimate)
    assert (total.low, total.value, total.high) == pytest.approx((5.4, 6.0, 6.6))
    assert [a.value for a in sorted(amounts)] == [1.0, 2.0, 3.0]
    assert min(amounts) is amounts[1]
    assert 2.0 in amounts
    assert {amounts[0]: "three"}[3.0] == "three"  # type: ignore[index]


def test_estimates_convert_to_plain_numbers() -> None:
    amount = Estimate.within(2.5, share=0.1)
    assert (float(amount), int(amount), abs(-amount)) == (2.5, 2, 2.5)
    assert (round(amount), round(amount / 3, 2)) == (2, 0.83)
    assert (math.floor(amount), math.ceil(amount), math.trunc(amount)) == (2, 3, 2)
    assert math.sqrt(Estimate.exactly(9.0)) == 3.0
    assert (amount**2, 2**amount) == (6.25, 2**2.5)
    assert int(MEMORY) == MEMORY.value
    assert json.dumps({"bytes": int(MEMORY)}) == f'{{"bytes": {int(MEMORY.value)}}}'


def test_estimates_format_like_numbers() -> None:
    assert f"{MEMORY}" == str(MEMORY) == repr(MEMORY)
    assert f"{MEMORY / 2**20:.1f} MiB" == "296.0 MiB"
    assert f"{MEMORY:,d}" == f"{int(MEMORY.value):,d}"
    assert f"{MEMORY:>12.3e}" == f"{MEMORY.value:>12.3e}"
    assert "%.2f" % Estimate.exactly(1.5) == "1.50"  # noqa: UP031 - as loggers do
    with pytest.raises(ValueError, match="format code"):
        f"{Estimate.exactly(1.5):d}"


def test_numpy_takes_values() -> None:
    amounts = [Estimate.exactly(1.0), Estimate.exactly(3.0)]
    assert np.array(amounts, dtype=float).tolist() == [1.0, 3.0]
    assert np.asarray(amounts[1]).dtype == np.float64
    assert np.mean(np.asarray(amounts, dtype=float)) == 2.0
    assert (np.arange(3) * amounts[1]).tolist() == [0.0, 3.0, 6.0]
    assert np.float32(2) * amounts[1] == amounts[1] * np.float32(2) == 6.0
    assert isinstance(amounts[1] * np.int64(2), Estimate)


@pytest.mark.parametrize("other", ["1", None, [1], 1j])
def test_non_numbers_are_refused(other: Any) -> None:
    for act in (*KEEPING, *PLAIN, operator.lt, operator.ge):
        with pytest.raises(TypeError):
            act(MEMORY, other)
        with pytest.raises(TypeError):
            act(other, MEMORY)
    assert other != MEMORY


def test_estimates_are_frozen_dataclasses() -> None:
    assert asdict(MEMORY) == {"value": MEMORY.value, "low": MEMORY.low, "high": MEMORY.high}
    with pytest.raises(AttributeError):
        MEMORY.value = 1.0  # type: ignore[misc]
    assert not hasattr(MEMORY, "__dict__")


def test_budget_comparisons_read_as_in_the_docs() -> None:
    before, after = PLAN.before.metrics, PLAN.predicted.metrics
    assert after.memory_bytes <= 300 * 2**20 < before.memory_bytes
    saved = before.memory_bytes - after.memory_bytes
    assert saved.low < saved < saved.high
    assert saved.low == before.memory_bytes.low - after.memory_bytes.high
