"""The statements of a calibration about a plan: inside or outside, the possible error, and the
text."""

from __future__ import annotations

from dataclasses import replace

import pytest

from steelyard.hardware.calibration import (
    DECLARED_DOUBT,
    Calibration,
    CalibrationCase,
    Domain,
    Pairs,
    Parallelism,
    Score,
    percent,
)
from steelyard.hardware.cluster_file import decode_tree
from steelyard.hardware.presets import preset_tables
from steelyard.ir.parallel_layout import ParallelLayout

_FITTED = Domain(
    rows=2,
    software=("torchtitan",),
    models=("Llama-3.1-8B",),
    kinds=("data parallel",),
    precisions=("bfloat16",),
    parameters=(8_000_000_000, 8_000_000_000),
    devices=(8, 128),
)
_CASE = CalibrationCase(
    kind=Parallelism.DATA, precision="bfloat16", parameters=8_030_261_248, devices=64
)


def _score(kind: str, *, inside: bool, doubt: float | None, rows: int = 20) -> Score:
    return Score(
        kind=kind,
        inside=inside,
        domain=replace(_FITTED, rows=rows),
        median_error=0.1,
        high_error=0.2,
        bias=-0.1,
        doubt=doubt,
    )


def _calibration(*scores: Score) -> Calibration:
    pairs = {"alike": Pairs(count=9, high_error=0.05), "unlike": Pairs(count=9, high_error=0.3)}
    return Calibration(fitted=_FITTED, scores=scores, **pairs)


def test_extrapolation_is_by_layout_precision_size_and_scale() -> None:
    known = _calibration()
    assert known.outside(_CASE) == ()
    assert known.outside(replace(_CASE, kind=Parallelism.TENSOR)) == ("tensor parallel",)
    assert known.outside(replace(_CASE, precision="float32")) == ("products in float32",)
    assert known.outside(replace(_CASE, parameters=70_600_000_000)) == ("70.6B parameters",)
    assert known.outside(replace(_CASE, devices=1024)) == ("1,024 devices",)
    assert known.outside(replace(_CASE, devices=4)) == ("4 devices",)


def test_the_extrapolation_error_applies_outside_the_fitted_range_only() -> None:
    scores = (
        _score("", inside=True, doubt=0.03),
        _score("", inside=False, doubt=0.25),
        _score("tensor parallel", inside=False, doubt=0.4),
    )
    known = _calibration(*scores)
    assert known.doubt_of(_CASE) == 0.03
    assert known.doubt_of(replace(_CASE, devices=1024)) == 0.25
    assert known.doubt_of(replace(_CASE, kind=Parallelism.TENSOR)) == 0.4
    # No published step has single precision, or pipeline stages alone.
    assert known.doubt_of(replace(_CASE, precision="float32")) == DECLARED_DOUBT
    assert known.doubt_of(replace(_CASE, kind=Parallelism.PIPELINE)) == DECLARED_DOUBT


def test_too_few_measured_steps_narrow_no_interval() -> None:
    """Two steps within 2 % do not imply that the next one is."""
    few = _score("", inside=True, doubt=None, rows=2)
    assert _calibration(few).doubt_of(_CASE) == DECLARED_DOUBT
    outside = _score("", inside=False, doubt=0.25)
    assert _calibration(few, outside).doubt_of(_CASE) == 0.25


def test_software_with_errors_beyond_the_interval_is_named() -> None:
    score = _score("", inside=False, doubt=0.25)
    missed = "missed by a median of 10 %, 20 % at the 90th percentile, 10 % too short at the median"
    assert score.said == missed
    odd = replace(score, worst_software="DeepSpeed", worst_error=0.55)
    assert odd.said == f"{missed}, those of DeepSpeed by a median of 55 %"


def test_layouts_of_the_same_kind_have_a_smaller_error() -> None:
    known = _calibration()
    assert known.between(Parallelism.DATA, Parallelism.DATA) == 0.05
    assert known.between(Parallelism.DATA, Parallelism.TENSOR) == 0.3
    assert (
        replace(known, alike=None, unlike=None).between(Parallelism.DATA, Parallelism.DATA)
        == DECLARED_DOUBT
    )


@pytest.mark.parametrize(
    ("layout", "kind"),
    [
        (ParallelLayout(data=8, state_stage=3), Parallelism.DATA),
        (ParallelLayout(data=8, tensor=8), Parallelism.TENSOR),
        (ParallelLayout(pipeline=4), Parallelism.PIPELINE),
        (ParallelLayout(tensor=8, pipeline=4), Parallelism.BOTH),
    ],
)
def test_layouts_are_of_four_kinds(layout: ParallelLayout, kind: Parallelism) -> None:
    assert Parallelism.of(tensor=layout.tensor, pipeline=layout.pipeline) is kind


def test_every_preset_states_the_error_of_its_share() -> None:
    """The text has rows, software, models, layouts and precision; none of them is in the code."""
    named = [name for name, table in preset_tables()["device"].items() if "reached" in table]
    assert named
    for name in named:
        device = decode_tree(f"[scope.one]\nmembers = {{ {name} = 1 }}\n").device_of(0)
        assert device.reached is not None
        known = device.reached.calibration
        assert known is not None
        said = device.rates_said
        for word in (*known.fitted.software, *known.fitted.kinds, *known.fitted.precisions):
            assert word in said
        assert any(not score.inside for score in known.scores)


def test_a_user_share_has_no_calibration() -> None:
    """No part of a preset's fit applies to it."""
    text = """
    [device.mine]
    preset = "H100-SXM5"
    reached = { share = "55 %" }
    [scope.one]
    members = { mine = 1 }
    """
    device = decode_tree(text).device_of(0)
    assert device.reached is not None
    assert device.reached.calibration is None


def test_a_calibration_changes_no_plan_file() -> None:
    device = decode_tree("[scope.one]\nmembers = { H100-SXM5 = 1 }\n").device_of(0)
    assert device.reached is not None
    bare = replace(device, reached=replace(device.reached, calibration=None))
    assert bare.identity == device.identity


def test_percentages_are_printed_to_their_precision() -> None:
    assert [percent(share) for share in (0.022, 0.0996, 0.357)] == ["2.2 %", "10 %", "36 %"]
