"""Gradients of a table sent as rows between ranks equal those of one device, in the predicted
bytes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.system.dist.ranks import on_ranks
from tests.system.dist.told import check_as_planned

pytestmark = [pytest.mark.dist, pytest.mark.slow]


@pytest.mark.parametrize("count", [2, 3])
def test_ranks_with_sparse_gradients_train_as_one_device(
    costs: Path, monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    monkeypatch.setenv("STEELYARD_CACHE", str(costs))
    ranks = on_ranks("tests.system.dist.rows:in_rows", count=count)
    for parts in ranks[0]:
        check_as_planned(own := [rank[parts] for rank in ranks], parts)
        assert own[0]["losses"] == pytest.approx(own[0]["expected"], rel=1e-5)
        assert own[0]["apart"] < 1e-4
