"""The wait for the last rank, as a power law through two measured points."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from steelyard.predict.arrival_skew import Skew


def measured(*, short_wait: float, long_wait: float) -> Skew:
    return Skew(short_seconds=0.004, short_wait=short_wait, long_seconds=0.04, long_wait=long_wait)


@given(st.floats(1e-6, 1e-2), st.floats(1e-6, 1e-2), st.floats(0.0, 10.0), st.floats(0.0, 10.0))
def test_arrival_skew_never_falls_with_computation(
    short: float, long: float, one: float, other: float
) -> None:
    skew = measured(short_wait=short, long_wait=long)
    waits = [skew.wait(seconds) for seconds in sorted((one, other))]
    assert waits[0].value <= waits[1].value * (1 + 1e-9)
    assert all(wait.low <= wait.value <= wait.high for wait in waits)


@pytest.mark.parametrize(
    ("long_wait", "after_four_times_as_long"),
    [
        pytest.param(0.004, 0.016, id="a rank that stays slower: as the time"),
        pytest.param(0.0004 * 10**0.5, 0.0004 * 40**0.5, id="independent disturbances: its root"),
        pytest.param(0.0004, 0.0004, id="no more after longer: the same"),
        pytest.param(0.0001, 0.0001, id="less after longer is noise of the measurement"),
        pytest.param(0.04, 0.16, id="more than in proportion is noise, too"),
    ],
)
def test_the_wait_grows_as_measured(long_wait: float, after_four_times_as_long: float) -> None:
    skew = measured(short_wait=0.0004, long_wait=long_wait)
    assert skew.wait(0.04).value == pytest.approx(long_wait)
    assert skew.wait(0.16).value == pytest.approx(after_four_times_as_long)
    assert skew.wait(0.0).value == 0
