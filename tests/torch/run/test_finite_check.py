"""The non-finite values that each rank reports, and the rank that follows from all reports."""

from __future__ import annotations

import pytest
import torch

from steelyard.run.finite_check import (
    ACTIVATIONS,
    BATCH,
    GRADIENTS,
    LOSS,
    NOTHING,
    FiniteWatch,
    NonFiniteValue,
    blamed,
)

NAN, INF, FINE = torch.tensor([1.0, float("nan")]), torch.tensor([float("inf")]), torch.ones(3)


def stepped(watch: FiniteWatch, total: torch.Tensor, /, **seen: torch.Tensor) -> None:
    places = {"activations": ACTIVATIONS, "loss": LOSS, "gradients": GRADIENTS}
    watch.begin()
    for name, value in seen.items():
        watch.saw(places[name], value)
    watch.end(total, lambda: [FINE])


@pytest.mark.parametrize("value", [NAN, INF, -INF, NAN.bfloat16(), INF.half(), NAN.double()])
def test_non_finite_values_are_found_in_every_format(value: torch.Tensor) -> None:
    watch = FiniteWatch()
    stepped(watch, FINE[0], loss=FINE, gradients=torch.cat([FINE.to(value.dtype), value]))
    stepped(watch, NAN[1], loss=NAN)
    assert watch.first == NonFiniteValue(1, GRADIENTS)
    assert watch.failed_at == 2


def test_large_half_precision_values_are_finite() -> None:
    watch = FiniteWatch()
    stepped(watch, NAN[1], gradients=torch.full((100,), 60000.0).half())
    assert watch.first is None


def test_gradients_that_a_scaler_has_skipped_are_not_to_blame() -> None:
    """A later loss is finite, so these gradients have not reached the weights."""
    watch = FiniteWatch()
    stepped(watch, FINE[0], gradients=INF)
    stepped(watch, FINE[0], gradients=FINE)
    stepped(watch, FINE[0], gradients=FINE)
    stepped(watch, NAN[1], loss=FINE)
    assert (watch.first, watch.failed_at, watch.code) == (None, 4, NOTHING)


def test_accumulated_passes_belong_to_one_step() -> None:
    watch = FiniteWatch()
    stepped(watch, FINE[0], gradients=INF)
    watch.adds_up = True
    stepped(watch, FINE[0], gradients=FINE)
    watch.adds_up = False
    stepped(watch, NAN[1], loss=NAN)
    assert (watch.first, watch.failed_at) == (NonFiniteValue(1, GRADIENTS), 2)


def test_a_non_finite_batch_is_blamed_before_its_results() -> None:
    watch = FiniteWatch()
    watch.begin()
    watch.saw(LOSS, NAN)
    watch.end(NAN[1], lambda: [torch.arange(3), NAN])
    assert watch.first == NonFiniteValue(1, BATCH)


def test_the_earliest_rank_is_blamed_or_all_equal_ones() -> None:
    def code(step: int, place: int) -> int:
        return NonFiniteValue(step, place).code

    first = blamed([code(5, LOSS), code(4, GRADIENTS), NOTHING], offset=10)
    assert (first.rank, first.words) == (1, "the local gradients of rank 1, in step 14")
    assert blamed([code(5, LOSS), code(5, ACTIVATIONS)]).rank == 1
    stages = [code(5, GRADIENTS - 0), code(5, GRADIENTS - 1)]
    assert blamed(stages).rank == 1, "the last stage is the first to go back"
    alike = blamed([code(5, LOSS)] * 3)
    assert (alike.rank, alike.words) == (-1, "the local loss of every rank, in step 5")
    two = blamed([NOTHING, code(5, LOSS), code(5, LOSS)])
    assert (two.rank, two.words) == (-1, "the local loss of ranks 1, 2, in step 5")
    assert blamed([NOTHING, NOTHING]).words == ""
    alone = blamed([code(3, BATCH)])
    assert (alone.rank, alone.words, alone.is_batch) == (-1, "the batch, in step 3", True)
    assert blamed([code(3, LOSS)]).words == ""
