"""When gradients are compressed: not at first, and no longer if the residual is too large."""

from __future__ import annotations

import math
from collections.abc import Iterable

import pytest

from steelyard.run.compression_fallback import EVERY, MOST_HELD, CompressionFallback


def _taken(guard: CompressionFallback, losses: Iterable[float], held: float = 1.0) -> list[int]:
    """Return the codec of each step; the number of steps before a fallback is not given."""
    rungs = []
    for loss in losses:
        rungs.append(guard.rung)
        guard.should_fall_back(loss, lambda: held)
    return rungs


def test_the_first_steps_are_uncompressed() -> None:
    guard = CompressionFallback(4, warm_up=3)
    assert _taken(guard, [1.0] * 5) == [3, 3, 3, 0, 0]
    assert guard.record().exact_steps == 3
    assert guard.state == (0, 0)


def test_large_residuals_fall_back_to_milder_codecs_step_by_step() -> None:
    guard = CompressionFallback(3)
    rungs = _taken(guard, [1.0] * (3 * EVERY), held=1.5 * MOST_HELD)
    assert rungs == [0] * EVERY + [1] * EVERY + [2] * EVERY
    assert guard.record().exact_steps == EVERY
    assert len(guard.record().reasons) == 2
    assert "15 steps' worth" in guard.record().reasons[0]


@pytest.mark.parametrize("held", [0.0, MOST_HELD])
def test_residuals_within_bounds_change_nothing(held: float) -> None:
    guard = CompressionFallback(2)
    assert not any(_taken(guard, [1.0] * (4 * EVERY), held=held))
    assert guard.record().residuals == (held,) * 4


@pytest.mark.parametrize("after", [1.3, -0.7])
def test_a_rising_loss_falls_back_to_a_milder_codec(after: float) -> None:
    before = -1.0 if after < 0 else 1.0
    guard = CompressionFallback(3)
    _taken(guard, [before] * EVERY + [after] * EVERY)
    assert guard.rung == 1
    assert "the loss rose" in guard.record().reasons[0]
    # From here on the loss is compared with the new, higher one.
    _taken(guard, [after] * (2 * EVERY))
    assert guard.rung == 1


@pytest.mark.parametrize("loss", [math.nan, math.inf])
def test_a_non_finite_loss_changes_no_codec(loss: float) -> None:
    guard = CompressionFallback(3)
    assert not any(_taken(guard, [1.0] * EVERY + [loss] * (3 * EVERY)))


def test_a_loss_that_has_come_near_to_nothing_may_go_up_and_down() -> None:
    guard = CompressionFallback(3)
    _taken(guard, [5.0] * EVERY + [1e-4] * EVERY + [2e-4] * EVERY)
    assert guard.rung == 0


def test_one_high_loss_changes_nothing() -> None:
    guard = CompressionFallback(3)
    _taken(guard, [1.0] * EVERY + [1.0] * (EVERY - 1) + [5.0])
    assert guard.rung == 0


def test_all_ranks_follow_the_fallback_of_one() -> None:
    guard = CompressionFallback(3)
    guard.max_over_ranks = lambda said: [MOST_HELD + 1, *said[1:]]
    _taken(guard, [1.0] * EVERY, held=0.0)
    assert guard.rung == 1


def test_a_resumed_run_keeps_its_fallback() -> None:
    guard = CompressionFallback(4, warm_up=5)
    _taken(guard, [1.0] * 2)
    again = CompressionFallback(4, warm_up=5)
    again.load_state(*guard.state)
    assert _taken(again, [1.0] * 4) == [3, 3, 3, 0]
    again.load_state(0, 2)
    assert again.rung == 2
    # The state is from a plan with more codes than this one.
    fewer = CompressionFallback(2)
    fewer.load_state(0, 3)
    assert fewer.rung == 1
