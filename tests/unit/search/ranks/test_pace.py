"""When steps of a run are worth a look: three in a row beyond what was predicted."""

from __future__ import annotations

import pytest

from steelyard.ir.metrics import Estimate
from steelyard.search.ranks.pace import IN_A_ROW, Pace


def pace(value: float = 0.2, waits: float = 0.05, skips: int = 0) -> Pace:
    return Pace(seconds=Estimate.within(value, share=0.2), waits=waits, skips=skips)


def looks(own: Pace, steps: list[tuple[float, float]]) -> list[int]:
    """The places of the steps that ask for a look."""
    return [n for n, step in enumerate(steps) if own.add(*step)]


def test_three_steps_in_a_row_beyond_the_interval_are_looked_at_at_once() -> None:
    steps = [(0.2, 0.05)] * 7 + [(1.8, 1.6)] * IN_A_ROW
    assert looks(pace(), steps) == [9]


@pytest.mark.parametrize(
    "steps",
    [
        [(0.22, 0.06), (0.19, 0.04)] * 20,
        # One slow step, or two, is what else a machine does.
        [(1.8, 1.6), (0.2, 0.05)] * 20,
        [(1.8, 1.6), (1.8, 1.6), (0.2, 0.05)] * 20,
        # Too slow and too fast by turns is no other pace.
        [(1.8, 1.6), (0.1, 0.0)] * 20,
    ],
)
def test_what_is_not_three_times_in_a_row_is_not(steps: list[tuple[float, float]]) -> None:
    assert looks(pace(), steps) == []


def test_steps_that_are_faster_or_wait_less_are_looked_at_too() -> None:
    assert looks(pace(), [(0.15, 0.0)] * IN_A_ROW) == [IN_A_ROW - 1]
    # Within the interval, but the waiting is gone: the link became faster.
    assert looks(pace(waits=0.1), [(0.19, 0.0)] * IN_A_ROW) == [IN_A_ROW - 1]


def test_a_prediction_that_is_always_wrong_is_looked_at_once() -> None:
    own = pace()
    assert looks(own, [(0.3, 0.05)] * IN_A_ROW) == [IN_A_ROW - 1]
    own.settle()
    assert looks(own, [(0.3, 0.05), (0.31, 0.06), (0.29, 0.04)] * 200) == []


def test_after_a_look_that_found_nothing_a_striking_change_is_seen_at_once() -> None:
    own = pace()
    looks(own, [(0.3, 0.05)] * IN_A_ROW)
    own.settle()
    assert looks(own, [(0.3, 0.05)] * 5 + [(1.9, 1.6)] * IN_A_ROW) == [5 + IN_A_ROW - 1]


def test_looks_that_find_nothing_become_seldom() -> None:
    """Where the pace goes up and down for ever, no look finds anything."""
    own, found = pace(), []
    for n in range(2000):
        slow = n // 10 % 2
        if own.add(0.2 + 0.1 * slow, 0.05):
            found.append(n)
            own.settle()
    assert 0 < len(found) <= 9


def test_the_first_steps_of_another_plan_are_passed_over() -> None:
    own = pace(skips=2)
    assert looks(own, [(3.0, 1.0)] * 2 + [(0.2, 0.05)] * 30) == []
