"""Plans from fixed costs are the recorded ones to the byte: a changed plan is seen in a diff.

After a change that is meant: ``python -m tests.replay.record`` writes the records anew, and the
diff of tests/replay/records is part of the review.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.replay.cases import RECORDS, Case, cases

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not torch.__version__.startswith("2.13."),
        reason="the records are of graphs that torch 2.13 traces",
    ),
]


@pytest.mark.parametrize("case", [*cases()], ids=lambda case: case.name)
def test_plan_equals_the_recorded_one(case: Case, tmp_path: Path) -> None:
    for made in case.make(tmp_path):
        for name, text in made.files().items():
            assert (RECORDS / name).read_text("utf-8") == text, f"{name}: see {__file__}"


def test_every_record_belongs_to_a_case() -> None:
    names = {path.name.partition(".")[0] for path in RECORDS.iterdir()}
    known = {case.name for case in cases()}
    assert all(any(name == k or name.startswith(f"{k}-") for k in known) for name in names)
