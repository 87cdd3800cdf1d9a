"""Plans for two ranks, made and run through the public API: the training of one device, by value."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.dist.planned import CASES, NUM_RANKS
from tests.dist.ranks import on_two_ranks

pytestmark = [pytest.mark.dist, pytest.mark.slow]


def test_ranks_that_share_the_batch_train_as_one_device(
    costs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STEELYARD_CACHE", str(costs))
    first, second = on_two_ranks("tests.dist.planned:trained")
    assert first.keys() == second.keys() == CASES.keys()
    for name, case in CASES.items():
        one, other = first[name], second[name]
        assert one["ranks"] == NUM_RANKS, name
        # The same bits on every rank, and one device's numbers but for the order of a sum.
        assert one["digest"] == other["digest"], name
        assert one["losses"] == other["losses"] == pytest.approx(one["expected"], rel=1e-9), name
        assert one["losses"][-1] < one["losses"][0], name
        assert one["error"] < 1e-9, name
        # What is drawn next is drawn alike: loaders shuffle the same way.
        assert one["after"] == other["after"], name
        assert one["executed"] == one["planned"], name
        assert one["handed_bytes"] == one["predicted_bytes"] > 0, name
        assert one["peak_bytes"] == pytest.approx(one["predicted_peak_bytes"], rel=0.01), name
        assert "a batch of 7 has no equal shares for 2 ranks" in one["refused"], name
        assert ("accumulate" in one["rules"]) == (case.micro_batches > 1), name
        assert ("recompute" in one["rules"]) == (case.share_of_plain is not None), name
