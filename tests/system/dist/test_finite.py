"""If a loss is not finite, the error names the rank whose own values were the first of that
kind."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.system.dist.finite import LAYOUTS, WRONG
from tests.system.dist.ranks import on_two_ranks

pytestmark = pytest.mark.dist



def test_the_first_rank_with_non_finite_values_is_named() -> None:
    ranks = on_two_ranks("tests.system.dist.finite:all_of_them")
    assert len(ranks[0]) == 3 * len(LAYOUTS)
    for case in ranks[0]:
        layout, _, fault = case.partition(": ")
        said = {
            "batch": f"the part of the batch of rank 1, in step {WRONG}",
            "loss": f"the local loss of rank 1, in step {WRONG}",
            "gradients": f"the local gradients of rank 1, in step {WRONG}",
        }[fault]
        if (layout, fault) == ("in stages", "batch"):
            said = f"the batch, in step {WRONG}"  # every rank gets the whole batch
        failed = WRONG + (fault == "gradients")
        for rank in ranks:
            found = rank[case]
            assert found["rank"] == (-1 if "the batch," in said else 1), case
            head, expected, remedy = found["error"].splitlines()
            assert re.fullmatch(rf"the loss is nan at step {failed}; first not finite: {said}", head)
            assert ("in the data" in remedy) == (fault == "batch")


@pytest.mark.slow
@pytest.mark.long
def test_accumulated_passes_count_as_one_step_on_all_ranks(
    costs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STEELYARD_CACHE", str(costs))
    for rank, (note, *memory) in enumerate(on_two_ranks("tests.system.dist.finite:in_ones_own_loop")):
        said = "the local gradients of rank 1, in step 2"
        assert note == f"the loss was not finite in step 3; first not finite: {said}", rank
        assert [line.split()[0] for line in memory] == ["0", "1"]
        assert all(line.split()[1].isdecimal() for line in memory)
