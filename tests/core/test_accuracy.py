"""What a probe saw, in words, and whether a budget allows it."""

import math

import pytest

from steelyard.core.accuracy import Drift, keeps
from steelyard.core.quad import EXACT, UNKNOWN


def test_the_word_says_how_far_how_much_it_varied_and_how_it_was_found() -> None:
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
        (str(Drift(shares=(0.0, 0.01), items=1)), 0.01, True),
        (str(Drift(shares=(0.0, 0.011), items=1)), 0.01, False),
        (str(Drift(shares=(0.0, 0.0), items=1)), 0.0, False),
        (str(Drift(shares=(math.nan,), items=1)), 1.0, False),
    ],
)
def test_whether_a_budget_allows_it(word: str, bound: float, kept: bool | None) -> None:
    assert keeps(word, bound) is kept
