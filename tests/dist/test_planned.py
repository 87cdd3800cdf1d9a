"""Plans for ranks, made and run through the public API: the training of one device, by value."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.dist.planned import IN_PARTS, ON_FOUR, SHARED, Case
from tests.dist.ranks import on_ranks

pytestmark = [pytest.mark.dist, pytest.mark.slow]


@pytest.mark.parametrize(
    ("scenario", "cases", "count"),
    [("shared", SHARED, 2), ("in_parts", IN_PARTS, 2), ("on_four", ON_FOUR, 4)],
)
def test_ranks_train_as_one_device(
    costs: Path, monkeypatch: pytest.MonkeyPatch, scenario: str, cases: dict[str, Case], count: int
) -> None:
    monkeypatch.setenv("STEELYARD_CACHE", str(costs))
    ranks = on_ranks(f"tests.dist.planned:{scenario}", count=count)
    for name, case in cases.items():
        one, *others = (rank[name] for rank in ranks)
        assert one["axes"] == case.layout.axes, name
        # The same bits on every rank, and one device's numbers but for the order of a sum.
        assert [other["digest"] for other in others] == [one["digest"]] * (count - 1), name
        assert [other["losses"] for other in others] == [one["losses"]] * (count - 1), name
        assert one["losses"] == pytest.approx(one["expected"], rel=1e-9), name
        assert one["losses"][-1] < one["losses"][0], name
        # What is drawn next is drawn alike: loaders shuffle the same way.
        assert [other["after"] for other in others] == [one["after"]] * (count - 1), name
        for rank in (one, *others):
            _agrees(rank, case, name)


def _agrees(rank: dict[str, Any], case: Case, name: str) -> None:
    """What it did with what was said."""
    assert rank["error"] < 1e-9, name
    assert rank["executed"] == rank["planned"], name
    assert rank["handed_bytes"] == rank["predicted_bytes"] > 0, name
    assert rank["peak_bytes"] == pytest.approx(rank["predicted_peak_bytes"], rel=0.01), name
    if case.layout.batch > 1:
        assert "a batch of 7 has no equal shares for 2 ranks" in rank["refused"], name
    assert ("shard_states" in rank["rules"]) == case.with_states, name
    assert ("accumulate" in rank["rules"]) == (case.micro_batches > 1), name
    assert ("recompute" in rank["rules"]) == (case.share_of_plain is not None), name
