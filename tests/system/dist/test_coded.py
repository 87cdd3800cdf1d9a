"""Compressed gradients between ranks are correct, equal on all ranks, and take the predicted
bytes."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

import pytest

from tests.system.dist.coded import CASES, COMPILED, MANY, UNEQUAL, codec_in
from tests.system.dist.ranks import on_ranks
from tests.system.dist.told import check_as_planned

pytestmark = [pytest.mark.dist, pytest.mark.slow, pytest.mark.long]


# The most bytes sent, relative to float32; small gradients are not compressed.
_MOST = {"ternary": 0.2, "int8": 0.35, "bfloat16": 0.55, "factors": 0.3, "largest": 0.15}


@pytest.mark.parametrize(
    ("scenario", "count", "cases"),
    [("in_codes", 2, CASES), ("in_codes", 3, MANY), ("compiled", 2, COMPILED)],
    ids=["2", "3", "compiled"],
)
def test_ranks_with_compressed_gradients_train_as_planned(
    costs: Path,
    monkeypatch: pytest.MonkeyPatch,
    scenario: str,
    count: int,
    cases: Collection[str],
) -> None:
    monkeypatch.setenv("STEELYARD_CACHE", str(costs))
    ranks = on_ranks(f"tests.system.dist.coded:{scenario}", count=count)
    assert {*ranks[0]} == {*cases}
    for name in ranks[0]:
        check_as_planned(own := [rank[name] for rank in ranks], name, UNEQUAL.get(name, ()))
        one = own[0]
        assert one["losses"] == pytest.approx(one["expected"], rel=1e-3), name
        assert one["losses"][-1] < one["losses"][0], name
        # If a value lies between two levels, the order of a sum decides how it is rounded.
        assert one["apart"] < 2e-3, name
        assert any(note.startswith("encoded and decoded gradients") for note in one["notes"]), name
        whole = 2 * (count - 1) / count * one["gradient_bytes"]
        assert one["sent_bytes"] < whole * _MOST[codec_in(name)], name
