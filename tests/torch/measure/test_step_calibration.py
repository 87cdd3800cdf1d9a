from collections.abc import Callable, Iterable
from itertools import cycle

import pytest
import torch

from steelyard.measure import step_calibration
from steelyard.measure.step_calibration import Runnable, step_time_ratio, whole_step

SHORT = 0.01
UNSTEADY = (1.0, 1.2)


@pytest.fixture
def timed_as(monkeypatch: pytest.MonkeyPatch) -> Callable[[Iterable[float]], None]:
    """Let the clock say that the calls take these seconds, again and again."""

    def use(seconds: Iterable[float]) -> None:
        left = cycle(seconds)

        class Clock:
            def __init__(self, device: torch.device) -> None:
                self.device = device

            def seconds(self, call: Callable[[], object]) -> float:
                call()
                return next(left)

        monkeypatch.setattr(step_calibration, "Clock", Clock)

    return use


def test_a_long_step_is_run_seldom_and_one_beyond_all_bounds_never(
    timed_as: Callable[[Iterable[float]], None],
) -> None:
    timed_as(UNSTEADY)
    calls: list[str] = []
    run = lambda: calls.append("x")  # noqa: E731
    counts = []
    for seconds in (SHORT, 2.0, 4.0, 9.0, 13.0):
        calls.clear()
        found = whole_step(Runnable(run=run, operator_seconds=seconds), seconds_budget=12.0)
        assert (found is None) == (not calls)
        counts.append(len(calls))
    assert counts == [9, 6, 3, 1, 0]


def test_a_calibration_keeps_an_uncertainty() -> None:
    found = whole_step(Runnable(run=lambda: None, operator_seconds=6.0), seconds_budget=12.0)
    assert found is not None
    assert found.low <= found.value * 0.95
    assert found.high >= found.value * 1.05


def test_rounds_end_once_three_agree(timed_as: Callable[[Iterable[float]], None]) -> None:
    calls: list[str] = []
    step = Runnable(run=lambda: calls.append("x"), operator_seconds=SHORT)
    timed_as([1.0, 1.02, 1.01])
    assert whole_step(step, seconds_budget=12.0) is not None
    assert len(calls) == 2 + 3
    calls.clear()
    timed_as([1.0, 1.02, 1.05])
    assert whole_step(step, seconds_budget=12.0) is not None
    assert len(calls) == 2 + 7


def test_two_programs_are_timed_in_turns(timed_as: Callable[[Iterable[float]], None]) -> None:
    timed_as([1.0, 1.0, 1.2, 1.2])
    calls: list[str] = []
    programs = [
        Runnable(run=lambda name=name: calls.append(name), operator_seconds=SHORT) for name in "ab"
    ]
    step_time_ratio(*programs, seconds_budget=1.0)
    assert calls == list("ab") * 7


def test_an_underpredicted_step_scales_the_sum_of_its_operators() -> None:
    def run() -> int:
        return sum(range(20000))

    def said(seconds: float) -> Runnable:
        return Runnable(run=run, operator_seconds=seconds)

    found = step_time_ratio(said(SHORT / 1000), said(SHORT), seconds_budget=1.0)
    assert found is not None
    assert 0 < found.low <= found.value <= found.high
    assert 300 < found.value < 3000
