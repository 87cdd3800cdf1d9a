"""The closed form and the compiled table equal the replay of the schedule."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from steelyard.errors import BadInput
from steelyard.ir.parallel_layout import ParallelLayout
from steelyard.ir.pipeline_schedule import ActionKind, schedule_order
from steelyard.predict.pipeline.duration import (
    least_interleaved_seconds,
    least_pipeline_seconds,
    path_weights,
    pipeline_seconds,
)
from steelyard.predict.pipeline.replay import StageCost, replay

# Integers, so that both sums are bitwise equal; a small range, so that there are ties.
_SECONDS = st.integers(1, 4) | st.integers(1, 60)


@st.composite
def _pipelines(draw: st.DrawFn) -> tuple[ParallelLayout, list[tuple[float, float]]]:
    ranks, virtual = draw(st.integers(1, 7)), draw(st.sampled_from((1, 1, 2, 3)))
    rounds = draw(st.integers(1, 4))
    micro_batches = draw(st.integers(1, 16)) if virtual == 1 else ranks * rounds
    passes = st.tuples(_SECONDS, _SECONDS)
    size = ranks * virtual
    layout = ParallelLayout(pipeline=ranks, virtual=virtual, micro_batches=micro_batches)
    return layout, [(f, b) for f, b in draw(st.lists(passes, min_size=size, max_size=size))]


def _replayed(layout: ParallelLayout, passes: list[tuple[float, float]]) -> float:
    order = schedule_order(
        num_ranks=layout.pipeline, micro_batches=layout.micro_batches, virtual=layout.virtual
    )
    kinds = ActionKind.FORWARD, ActionKind.BACKWARD
    return replay(order, [StageCost(seconds=dict(zip(kinds, pair))) for pair in passes]).seconds


@settings(max_examples=400, deadline=None)
@given(_pipelines())
def test_the_seconds_of_a_pipeline_are_those_of_the_replay(
    pipeline: tuple[ParallelLayout, list[tuple[float, float]]],
) -> None:
    assert pipeline_seconds(*pipeline) == _replayed(*pipeline)


@settings(max_examples=400, deadline=None)
@given(_pipelines())
def test_no_pipeline_takes_less_than_its_bound(
    pipeline: tuple[ParallelLayout, list[tuple[float, float]]],
) -> None:
    layout, passes = pipeline
    ranks = layout.pipeline
    of_rank = [sum(map(sum, passes[rank::ranks])) for rank in range(ranks)]
    if layout.virtual == 1:
        bound = least_pipeline_seconds(layout, slowest=max(of_rank), total=sum(of_rank))
    else:
        bound = least_interleaved_seconds(
            layout,
            slowest=max(of_rank),
            last=of_rank[-1],
            first_runs=sum(map(sum, passes[: ranks - 1])),
        )
    assert bound <= pipeline_seconds(layout, passes) * (1 + 1e-12)


@settings(max_examples=400, deadline=None)
@given(_pipelines(), st.floats(0, 1))
def test_no_pipeline_takes_less_than_its_weighted_passes(
    pipeline: tuple[ParallelLayout, list[tuple[float, float]]], share: float
) -> None:
    layout, passes = pipeline[0], pipeline[1][: pipeline[0].pipeline]
    few = 1 + layout.micro_batches % layout.pipeline
    layout = replace(layout, virtual=1, micro_batches=few)
    weights = path_weights(layout, backward_share=share)
    pairs = zip(weights, passes, strict=True)
    bound = sum(w[0] * forward + w[1] * backward for w, (forward, backward) in pairs)
    assert bound <= pipeline_seconds(layout, passes) * (1 + 1e-12)


@pytest.mark.parametrize("virtual", [1, 4])
def test_equal_stages_take_what_the_textbook_says(virtual: int) -> None:
    """Narayanan et al., SC 2021, section 2.2: (m + (p - 1) / v) times a stage; the bounds are
    tight."""
    layout = ParallelLayout(pipeline=4, virtual=virtual, micro_batches=8)
    passes = [(1 / virtual, 2 / virtual)] * 4 * virtual
    assert pipeline_seconds(layout, passes) == pytest.approx(3 * (8 + 3 / virtual))
    if virtual == 1:
        assert least_pipeline_seconds(layout, slowest=3, total=12) == pytest.approx(33)


@pytest.mark.parametrize("micro_batches", range(1, 6))
def test_weighted_stages_are_equal_if_their_backward_share_is_as_told(micro_batches: int) -> None:
    layout = ParallelLayout(pipeline=5, micro_batches=micro_batches)
    weights = path_weights(layout, backward_share=2 / 3)
    sums = [forward + 2 * backward for forward, backward in weights]
    assert sums == pytest.approx([sums[0]] * 5)
    assert weights[0][0] == 1


@pytest.mark.parametrize("micro_batches", range(1, 6))
def test_some_pipeline_takes_its_bound_if_micro_batches_are_few(micro_batches: int) -> None:
    """The last ``m - 1`` stages are half as long as the others."""
    long, layout = 5 - micro_batches, ParallelLayout(pipeline=4, micro_batches=micro_batches)
    passes = [(2.0, 2.0)] * long + [(1.0, 1.0)] * (4 - long)
    slowest, total = max(map(sum, passes)), sum(map(sum, passes))
    bound = least_pipeline_seconds(layout, slowest=slowest, total=total)
    assert pipeline_seconds(layout, passes) == pytest.approx(bound) == 16


def test_micro_batches_that_fill_no_rounds_are_refused() -> None:
    with pytest.raises(BadInput, match="equal rounds"):
        schedule_order(num_ranks=2, micro_batches=5, virtual=2)
