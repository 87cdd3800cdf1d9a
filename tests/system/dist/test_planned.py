"""Plans for several ranks, made and run through the public API, train like one device."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.system.dist.planned import (
    COMPILED,
    COMPILED_TOO,
    GATHERED_AGAIN,
    IN_PARTS,
    IN_STAGES,
    ON_FOUR,
    SHARED,
    STAGES_BY_TENSORS,
    STAGES_OF_GROUPS,
    THROUGH_SLOTS,
    THROUGH_SLOTS_ON_THREE,
    UNEQUAL,
    UNEQUAL_ON_THREE,
    Case,
)
from tests.system.dist.ranks import on_ranks

pytestmark = [pytest.mark.dist, pytest.mark.slow, pytest.mark.long]


@pytest.mark.parametrize(
    ("scenario", "cases", "count"),
    [
        ("shared", SHARED, 2),
        ("gathered_again", GATHERED_AGAIN, 2),
        ("unequal", UNEQUAL, 2),
        ("unequal_on_three", UNEQUAL_ON_THREE, 3),
        ("in_parts", IN_PARTS, 2),
        ("compiled", COMPILED, 2),
        ("compiled_too", COMPILED_TOO, 2),
        ("in_stages", IN_STAGES, 2),
        ("through_slots", THROUGH_SLOTS, 2),
        ("through_slots_on_three", THROUGH_SLOTS_ON_THREE, 3),
        ("stages_by_tensors", STAGES_BY_TENSORS, 4),
        ("stages_of_groups", STAGES_OF_GROUPS, 4),
        ("on_four", ON_FOUR, 4),
    ],
)
def test_planned_ranks_train_as_one_device(
    costs: Path, monkeypatch: pytest.MonkeyPatch, scenario: str, cases: dict[str, Case], count: int
) -> None:
    monkeypatch.setenv("STEELYARD_CACHE", str(costs))
    ranks = on_ranks(f"tests.system.dist.planned:{scenario}", count=count)
    for name, case in cases.items():
        one, *others = (rank[name] for rank in ranks)
        assert one["axes"] == case.layout.axes, name
        assert tuple(one["shares"]) == case.layout.shares, name
        # All ranks have the same bits, and equal one device up to the order of a sum.
        assert [other["digest"] for other in others] == [one["digest"]] * (count - 1), name
        assert [other["losses"] for other in others] == [one["losses"]] * (count - 1), name
        assert one["losses"] == pytest.approx(one["expected"], rel=1e-9), name
        assert one["losses"][-1] < one["losses"][0], name
        # The generators are in the same state afterwards, so that loaders shuffle in the same way.
        assert [other["after"] for other in others] == [one["after"]] * (count - 1), name
        for rank in (one, *others):
            _agrees(rank, case, name)
        _agree_on_peaks([one, *others], case, name)
        if case.layout.pipeline > 1:
            _agrees_in_stages([one, *others], case, name)


def _agrees(rank: dict[str, Any], case: Case, name: str) -> None:
    """Check that the run equals its prediction."""
    assert rank["error"] < 1e-9, name
    assert rank["again"] < 1e-9, name
    if case.in_slots and case.layout.pipeline == 1:
        # No exchange uses torch's collectives.
        assert rank["planned"], name
        assert not rank["executed"], name
        assert rank["counted_bytes"] == pytest.approx(rank["predicted_bytes"], rel=0.01), name
    elif case.layout.pipeline == 1:
        assert rank["executed"] == rank["planned"], name
        # A ring sends the input this many times, in parts that are rounded up.
        among = max(case.layout.data, 2)
        sent = rank["handed_bytes"] * 2 * (among - 1) / among
        assert sent == pytest.approx(rank["sent_bytes"], rel=0 if among == 2 else 1e-3), name
        assert 0 < sent < rank["predicted_bytes"], name
        # The kernel's count includes gloo's header for each piece. A tiny tensor in double
        # precision, such as the loss here, has fewer pieces than in single precision. Rings of more
        # than two ranks round up.
        tiny = _SAID_OF_TINY * (case.layout.num_ranks - 1) * case.micro_batches
        rounded = 0 if among == 2 else 8 * among * len(rank["executed"])
        counted = rank["counted_bytes"]
        assert counted == pytest.approx(rank["predicted_bytes"], abs=tiny + rounded), name
    if case.layout.shares:
        assert "a batch of 7 has no shares of " in rank["refused"], name
    elif case.layout.data > 1:
        said = f"a batch of 7 has no equal shares for {case.layout.data} ranks"
        assert said in rank["refused"], name
    assert ("shard_states" in rank["rules"]) == case.with_states, name
    assert ("accumulate" in rank["rules"]) == (case.micro_batches > 1), name
    assert ("recompute" in rank["rules"]) == (case.share_of_plain is not None), name
    assert ("shared_memory_transfer" in rank["rules"]) == case.in_slots, name


def _agree_on_peaks(ranks: list[dict[str, Any]], case: Case, name: str) -> None:
    """Check peaks; with unequal shares of the batch, the prediction is for the largest share."""
    if case.layout.pipeline > 1:
        return
    peaks = [rank["peak_bytes"] for rank in ranks]
    for rank, peak in zip(ranks, [max(peaks)] if case.layout.shares else peaks):
        assert peak == pytest.approx(rank["predicted_peak_bytes"], rel=0.01), name
    if case.layout.shares:
        by_share = sorted(zip(case.layout.shares, peaks, strict=True))
        assert [peak for _, peak in by_share] == sorted(peaks), name


def _agrees_in_stages(ranks: list[dict[str, Any]], case: Case, name: str) -> None:
    """Check a pipelined run.

    The prediction is for the rank with the largest amounts; both end stages hold and sum the tied
    weight.
    """
    groups, tensor = case.layout.data, case.layout.tensor
    for place, first in enumerate(ranks[:tensor]):
        # Ranks that share tensors do the same exchanges; the stages together do those of all lines.
        stages = ranks[place::tensor]
        assert [rank["executed"] for rank in stages] == [r["executed"] for r in ranks[::tensor]]
        done = Counter(call for rank in stages for call in rank["executed"])
        assert done == Counter(first["planned"] * groups), name
    predicted = {(rank["predicted_bytes"], rank["predicted_peak_bytes"]) for rank in ranks}
    ((sent, peak),) = predicted
    last = len(ranks) - groups * tensor
    # Exchanges with the ranks of the other group: each gradient in double precision, and the loss;
    # for sharded weights, this rank's rows and the gradients of the other's rows.
    replicas = [
        8 * (rank["held"] + rank["in_shares"] + (n >= last)) if groups > 1 else 0
        for n, rank in enumerate(ranks)
    ]
    assert (sum(rank["in_shares"] for rank in ranks) > 0) == case.with_states, name
    handed = (rank["handed_bytes"] for rank in ranks)
    # The first and the last stage, which hold the tied weight, are on one rank if the schedule is
    # V-shaped.
    tied_bytes = 0 if case.schedule == "ZBVZeroBubble" else _TIED_BYTES // tensor
    # The count also includes gloo's headers; slots have none.
    said = sent - max(map(sum, zip(handed, replicas))) - tied_bytes
    assert said > 0, name
    counted = max(rank["counted_bytes"] for rank in ranks)
    assert counted == pytest.approx(sent, rel=3e-3 if tensor > 1 else 0), name
    assert max(rank["peak_bytes"] for rank in ranks) == pytest.approx(peak, rel=0.01), name
    held = (
        sum(rank["held"] + rank["in_shares"] for rank in ranks) - groups * tied_bytes // 8 * tensor
    )
    if tensor == 1:
        assert held == groups * ranks[0]["whole"], name
    assert held < 1.1 * groups * ranks[0]["whole"], name
    assert all(rank["held"] < ranks[0]["whole"] for rank in ranks), name


# The size of a weight of 64 rows of 32 numbers in double precision.
_TIED_BYTES = 64 * 32 * 8
_SAID_OF_TINY = 144
