"""The statements of a plan on its own error, and on layouts that predictions cannot distinguish."""

from __future__ import annotations

from typing import Any

from steelyard.hardware.calibration import Calibration, Domain, Pairs
from steelyard.ir.parallel_layout import ParallelLayout
from steelyard.predict.analytic.step import AnalyticStep
from steelyard.search.cluster.search import ClusterPlan
from steelyard.search.cluster.uncertainty import describe_layout, rivals, rivals_note

_DOMAIN = Domain(
    rows=2,
    software=("torchtitan",),
    models=("Llama-3.1-8B",),
    kinds=("data parallel",),
    precisions=("bfloat16",),
    parameters=(8, 8),
    devices=(8, 8),
)
_BEST = ParallelLayout(data=8)


def _laid(layout: ParallelLayout, seconds: float) -> ClusterPlan:
    step = AnalyticStep(pipeline_seconds=seconds, exposed_seconds=0, update_seconds=0, stages=())
    return ClusterPlan(layout=layout, micro_batch=1, stages=(), step=step, least_seconds=seconds)


class _Search:
    """A search over layouts with known times."""

    def __init__(self, *others: ClusterPlan, alike: float, unlike: float) -> None:
        self._ways = [_laid(_BEST, 1.0), *others]
        pairs = (Pairs(count=9, high_error=error) for error in (alike, unlike))
        known = Calibration(
            fitted=_DOMAIN, scores=(), **dict(zip(("alike", "unlike"), pairs, strict=True))
        )
        self.calibrations = {"H100": known}

    def candidates(self, ranks: int) -> list[ClusterPlan]:
        assert ranks == 8
        return self._ways

    def plan_layout(self, way: ClusterPlan, limit_bytes: int) -> ClusterPlan:
        assert limit_bytes == 1
        return way


def _said(*others: ClusterPlan, alike: float = 0.05, unlike: float = 0.2) -> str:
    search: Any = _Search(*others, alike=alike, unlike=unlike)
    return rivals_note(rivals(search, _laid(_BEST, 1.0), 1))


def test_a_layout_nearer_than_the_error_between_them_is_named() -> None:
    said = _said(_laid(ParallelLayout(data=4, tensor=2), 1.15))
    assert said.startswith("not distinguishable from data 4 x tensor 2 (~1.15 s): ")
    assert "accurate to within 20 %" in said


def test_a_layout_farther_than_the_error_is_distinguished() -> None:
    assert _said(_laid(ParallelLayout(data=4, tensor=2), 1.25)) == ""


def test_layouts_of_one_kind_are_held_to_the_error_of_that() -> None:
    states = _laid(ParallelLayout(data=8, state_stage=3), 1.1)
    assert _said(states) == ""
    assert "data 8, ZeRO-3" in _said(states, alike=0.15)


def test_layouts_that_differ_in_micro_batches_only_are_no_rivals() -> None:
    assert _said(_laid(ParallelLayout(data=8, micro_batches=4), 1.01)) == ""


def test_no_more_than_three_are_named_and_the_others_counted() -> None:
    others = [_laid(ParallelLayout(data=8 // n, pipeline=n), 1.01) for n in (2, 4, 8)]
    others += [_laid(ParallelLayout(data=8 // n, tensor=n), 1.02) for n in (2, 4)]
    said = _said(*others)
    assert said.count("pipeline") == 3
    assert "and up to 2 more" in said


def test_layouts_are_described_by_their_degrees() -> None:
    assert describe_layout(ParallelLayout()) == "one device"
    assert describe_layout(ParallelLayout(data=2, tensor=4, pipeline=8, state_stage=1)) == (
        "data 2 x tensor 4 x pipeline 8, ZeRO-1"
    )
