"""Gradients of a table as rows between ranks: one device's numbers, in the bytes that were said."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from tests.dist.ranks import on_ranks

pytestmark = [pytest.mark.dist, pytest.mark.slow]


@pytest.mark.parametrize("count", [2, 3])
def test_ranks_that_send_rows_train_as_one_device(
    costs: Path, monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    monkeypatch.setenv("STEELYARD_CACHE", str(costs))
    ranks = on_ranks("tests.dist.rows:in_rows", count=count)
    for parts in ranks[0]:
        one, *others = (rank[parts] for rank in ranks)
        assert [other["digest"] for other in others] == [one["digest"]] * (count - 1)
        assert one["losses"] == pytest.approx(one["expected"], rel=1e-5)
        assert one["apart"] < 1e-4
        for rank in (one, *others):
            assert Counter(rank["executed"]) == Counter(rank["planned"])
            assert rank["predicted_bytes"] == rank["sent_bytes"]
            assert rank["peak_bytes"] == pytest.approx(rank["predicted_peak_bytes"], rel=0.01)
