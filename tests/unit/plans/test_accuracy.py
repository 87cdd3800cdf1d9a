"""The result of a probe in words, and whether a budget allows it."""

import math

import pytest

from steelyard.ir.metrics import EXACT, UNKNOWN
from steelyard.plans.accuracy import Drift, beyond, keeps


def test_an_accuracy_loss_states_its_size_spread_and_method() -> None:
    drift = Drift(shares=(0.0, 0.01, 0.02), items=32)
    assert str(drift) == "2 ± 0.82 % (probe: 3 steps, 32 items, twin run)"
    assert drift.largest == 0.02
    assert drift.spread == pytest.approx(0.00816, abs=1e-5)


@pytest.mark.parametrize(
    ("shares", "word"),
    [
        ((0.0, 0.0), "0 ± 0 %"),
        ((0.0, 3.4567e-7), "0.000035 ± 0.000017 %"),
        ((0.5, 0.5), "50 ± 0 %"),
        ((0.1, math.inf), "inf ± inf %"),
        ((0.1, math.nan), "inf ± inf %"),
        ((math.nan, 0.1), "inf ± inf %"),
    ],
)
def test_figures_are_plain(shares: tuple[float, ...], word: str) -> None:
    assert str(Drift(shares=shares, items=1)).startswith(f"{word} (probe: 2 steps")


@pytest.mark.parametrize(
    ("word", "bound", "kept"),
    [
        (EXACT, 0.0, True),
        (EXACT, 0.5, True),
        (UNKNOWN, 0.0, False),
        (UNKNOWN, 0.5, None),
        # The upper end of the interval must be within the budget: 1 ± 0.5 % is not within 1.4 %.
        (str(Drift(shares=(0.0, 0.01), items=1)), 0.015, True),
        (str(Drift(shares=(0.0, 0.01), items=1)), 0.014, False),
        (str(Drift(shares=(0.01, 0.01), items=1)), 0.01, True),
        (str(Drift(shares=(0.011, 0.011), items=1)), 0.01, False),
        ("4.6 ± 1.5 % (probe: 10 steps, 32 items, twin run)", 0.05, False),
        ("1.1 ± 0.3 % (probe: 10 steps, 32 items, twin run)", 0.014, True),
        ("0 ± 0 % (probe: 10 steps, 32 items, twin run)", 0.05, True),
        (str(Drift(shares=(0.0, 0.0), items=1)), 0.0, False),
        (str(Drift(shares=(math.nan,), items=1)), 1.0, False),
    ],
)
def test_a_budget_allows_losses_up_to_its_bound(word: str, bound: float, kept: bool | None) -> None:
    assert keeps(word, bound) is kept


def test_a_refused_accuracy_loss_states_its_interval() -> None:
    drift = Drift(shares=(0.02, 0.046), items=8)
    assert beyond(drift, 0.05) == (
        "a probe drifted 4.6 ± 1.3 % (probe: 2 steps, 8 items, twin run), so up to 5.9 %, "
        "and the accuracy budget is 5 %"
    )
    assert "inf" in beyond(Drift(shares=(math.nan,), items=8), 0.05)
