"""When steps of a run justify a measurement: three in a row outside of the prediction."""

from __future__ import annotations

import pytest

from steelyard.ir.metrics import Estimate
from steelyard.search.ranks.pace import IN_A_ROW, Pace


def pace(value: float = 0.2, waits: float = 0.05, skips: int = 0) -> Pace:
    return Pace(seconds=Estimate.within(value, share=0.2), waits=waits, skips=skips)


def looks(own: Pace, steps: list[tuple[float, float]]) -> list[int]:
    """Return the numbers of the steps that trigger a measurement."""
    return [n for n, step in enumerate(steps) if own.add(*step)]


def test_three_slow_steps_in_a_row_are_examined() -> None:
    steps = [(0.2, 0.05)] * 7 + [(1.8, 1.6)] * IN_A_ROW
    assert looks(pace(), steps) == [9]


@pytest.mark.parametrize(
    "steps",
    [
        [(0.22, 0.06), (0.19, 0.04)] * 20,
        # One or two slow steps are ordinary noise of a machine.
        [(1.8, 1.6), (0.2, 0.05)] * 20,
        [(1.8, 1.6), (1.8, 1.6), (0.2, 0.05)] * 20,
        # Steps that are slow and fast by turns are not a lasting change.
        [(1.8, 1.6), (0.1, 0.0)] * 20,
    ],
)
def test_fewer_than_three_slow_steps_in_a_row_are_not_examined(
    steps: list[tuple[float, float]],
) -> None:
    assert looks(pace(), steps) == []


def test_faster_steps_are_examined_too() -> None:
    assert looks(pace(), [(0.15, 0.0)] * IN_A_ROW) == [IN_A_ROW - 1]
    # The step time is within the interval, but the wait is gone: the link has become faster.
    assert looks(pace(waits=0.1), [(0.19, 0.0)] * IN_A_ROW) == [IN_A_ROW - 1]


def test_a_constant_prediction_error_is_examined_once() -> None:
    own = pace()
    assert looks(own, [(0.3, 0.05)] * IN_A_ROW) == [IN_A_ROW - 1]
    own.settle()
    assert looks(own, [(0.3, 0.05), (0.31, 0.06), (0.29, 0.04)] * 200) == []


def test_a_large_change_is_examined_after_a_fruitless_examination() -> None:
    own = pace()
    looks(own, [(0.3, 0.05)] * IN_A_ROW)
    own.settle()
    assert looks(own, [(0.3, 0.05)] * 5 + [(1.9, 1.6)] * IN_A_ROW) == [5 + IN_A_ROW - 1]


def test_fruitless_examinations_become_rare() -> None:
    """If the pace keeps changing, no measurement finds anything."""
    own, found = pace(), []
    for n in range(2000):
        slow = n // 10 % 2
        if own.add(0.2 + 0.1 * slow, 0.05):
            found.append(n)
            own.settle()
    assert 0 < len(found) <= 9


def test_the_first_steps_of_a_new_plan_are_ignored() -> None:
    own = pace(skips=2)
    assert looks(own, [(3.0, 1.0)] * 2 + [(0.2, 0.05)] * 30) == []
