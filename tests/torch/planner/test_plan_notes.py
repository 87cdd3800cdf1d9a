"""A plan that needs more memory than eager PyTorch says so, and names the cause."""

from dataclasses import replace

import pytest

from steelyard.ir.graph import Phase, Role
from steelyard.planner.plan_notes import note_beyond_eager
from steelyard.plans.peak_memory import LiveTensor, PeakMemory
from steelyard.plans.plan import Prediction
from tests.unit.plan_files.test_plan_file import PLAN

MIB = 1 << 20


def predicted(nbytes: int) -> Prediction:
    held = (
        LiveTensor.of(60 * MIB, "parameters", Role.PARAMETER),
        LiveTensor.of(12 * MIB, "accumulated gradients", Role.GRADIENT),
        LiveTensor.of(4 * MIB, "aten.mm.default", Role.ACTIVATION),
    )
    peak = PeakMemory(
        nbytes=nbytes, resident_bytes=60 * MIB, workspace_bytes=0, at="aten.mm.default",
        path="head", line="", phase=Phase.BACKWARD, alive=held,
    )  # fmt: skip
    return replace(PLAN.predicted, peak=peak)


def test_memory_beyond_the_eager_peak_is_named() -> None:
    (note,) = note_beyond_eager(predicted(81 * MIB), predicted(89 * MIB))
    assert "needs ~8.00 MiB more than eager PyTorch" in note
    assert "aten.mm.default in head, backward pass" in note
    assert "accumulated gradients 12.0 MiB, aten.mm.default 4.00 MiB" in note
    assert "parameters" not in note
    assert "a budget of 81.0 MiB" in note


@pytest.mark.parametrize("nbytes", [81 * MIB, 40 * MIB])
def test_a_plan_within_the_eager_peak_has_no_note(nbytes: int) -> None:
    assert [*note_beyond_eager(predicted(81 * MIB), predicted(nbytes))] == []
