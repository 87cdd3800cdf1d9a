"""A pipelined step on ranks under each of torch's schedules, compared with the same
micro-batches on one device: the loss, every gradient, and parameters and buffers after 20 steps
of AdamW. Messages use the link, and under some schedules also slots."""

from __future__ import annotations

from typing import Any

import pytest

from tests.system.dist.pipelines import MICRO_BATCHES, STEPS
from tests.system.dist.ranks import on_ranks, on_two_ranks

pytestmark = pytest.mark.dist

_ROUNDING = 1e-9


@pytest.mark.parametrize("model", ["gpt", "resnet"])
def test_two_pipeline_ranks_equal_one_device(model: str) -> None:
    ranks = on_two_ranks(f"tests.system.dist.pipelines:two_of_{model}")
    assert sum("through slots" in schedule for schedule in ranks[0]) == (4 if model == "gpt" else 0)
    assert sum("through slots" not in schedule for schedule in ranks[0]) == 7
    for schedule in ranks[0]:
        as_one_device(model, schedule, [rank[schedule] for rank in ranks])
        if "through slots" in schedule:
            # Results of dropout and of the backward pass of a norm are copied instead.
            made = sum(rank[schedule]["made there"] for rank in ranks)
            assert made >= STEPS * MICRO_BATCHES, schedule


def test_branches_of_a_model_can_lie_on_different_devices() -> None:
    ranks = on_two_ranks("tests.system.dist.pipelines:two_of_towers")
    for schedule in ranks[0]:
        as_one_device("towers", schedule, [rank[schedule] for rank in ranks])
    held = [{name.partition(".")[0] for name in rank["1F1B"]["held"]} for rank in ranks]
    assert held == [{"left"}, {"right", "head"}]


@pytest.mark.long
@pytest.mark.parametrize("model", ["llama"])
def test_four_pipeline_ranks_equal_one_device(model: str) -> None:
    ranks = on_ranks(f"tests.system.dist.pipelines:four_of_{model}", count=4)
    assert {"1F1B", "1F1B through slots"} < set(ranks[0])
    for schedule in ranks[0]:
        as_one_device(model, schedule, [rank[schedule] for rank in ranks])


@pytest.mark.long
@pytest.mark.parametrize("model", ["gpt", "resnet"])
def test_two_stages_of_two_tensor_parallel_ranks_equal_one_device(model: str) -> None:
    """The backward pass is whole, or in two parts."""
    ranks = on_ranks(f"tests.system.dist.pipelines:parts_of_{model}", count=4)
    assert set(ranks[0]) == {"1F1B", "ZBVZeroBubble"}
    for schedule in ranks[0]:
        own = [rank[schedule] for rank in ranks]
        as_one_device(model, schedule, own)
        # The ranks of one stage hold the same tensors, most of them by halves.
        assert own[0]["held"] == own[1]["held"] != own[2]["held"] == own[3]["held"]
        assert own[0]["share"] == own[1]["share"], schedule
        assert own[0]["share"] + own[2]["share"] < 0.7, schedule


def test_a_failed_call_keeps_the_gradients_of_earlier_ones() -> None:
    assert on_two_ranks("tests.system.dist.pipelines:failed_of_gpt") == [True, True]


def test_stages_need_no_autograd() -> None:
    """torch's schedules refuse to start if autograd is disabled."""
    for within, outside, alike in on_two_ranks("tests.system.dist.pipelines:without_gradients_of_gpt"):
        assert within == outside
        assert alike


def as_one_device(model: str, schedule: str, ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        for what in ("loss", "gradients", "parameters", "buffers"):
            assert rank[what] <= _ROUNDING, (schedule, what)
        # Each rank holds only its own part.
        assert 0 < len(rank["held"]) < len(rank["all"]), schedule
    if model == "resnet":
        assert all(rank["num_buffers"] for rank in ranks), schedule
    assert {name for rank in ranks for name in rank["held"]} == set(ranks[0]["all"])


@pytest.mark.parametrize(("model", "within"), [("gpt", 0.005), ("relus", 0.09)])
def test_measured_peak_of_each_rank_is_the_predicted_one(model: str, within: float) -> None:
    """Small stages send much compared with what they hold.

    If a backward pass is in two parts, the replay may count one such value that is already freed.
    """
    for rank in on_two_ranks(f"tests.system.dist.pipelines:peaks_of_{model}"):
        assert len(rank) == 7
        for schedule, (predicted, metered) in rank.items():
            assert predicted == pytest.approx(metered, rel=within), schedule
