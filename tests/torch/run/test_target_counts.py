"""Micro-batches with different numbers of counted targets are weighted as in the whole batch, or
refused."""

import pytest
import torch
from torch import nn

from steelyard.capture.batch.independence_proof import Reduction
from steelyard.capture.step import CapturedStep
from steelyard.errors import Mismatch
from steelyard.ir.program import Program
from steelyard.run.step import LiveStep


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(11, 8), nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 11))


def _loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return nn.functional.cross_entropy(model(batch["x"]).flatten(0, 1), batch["y"].flatten())


def _batch(*kept: int) -> dict[str, torch.Tensor]:
    """Return a batch of rows of ten targets, of which this many count."""
    torch.manual_seed(1)
    x = torch.randint(0, 11, (len(kept), 10))
    y = torch.randint(0, 11, (len(kept), 10))
    for row, count in enumerate(kept):
        y[row, count:] = -100
    return {"x": x, "y": y}


def _step(model: nn.Module, loss: object, batch: object, *, parts: int) -> LiveStep:
    source = CapturedStep(model=model, loss=loss, batch=batch)  # type: ignore[arg-type]
    assert source.why_not_split() is None
    captured = source.captured(micro_batches=parts)
    return LiveStep(
        model,
        Program.plain(captured.graph).repeated(parts),
        constants=captured.constants,
        batch=batch,
        reduction=source.reduction().value,
    )


@pytest.mark.parametrize("kept", [(10, 3, 7, 1), (5, 5, 5, 5), (10, 0, 4, 9)])
@pytest.mark.parametrize("parts", [2, 4])
def test_micro_batches_are_weighted_by_their_counts(kept: tuple[int, ...], parts: int) -> None:
    model, twin, batch = _model(), _model(), _batch(*kept)
    loss = _step(model, _loss, batch, parts=parts).backward(batch)
    whole = _loss(twin, batch)
    whole.backward()
    torch.testing.assert_close(loss, whole.detach(), rtol=1e-6, atol=0)
    for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-5, atol=1e-7)


def test_the_reduction_is_read_off_the_graph() -> None:
    source = CapturedStep(model=_model(), loss=_loss, batch=_batch(4, 4, 4, 4))
    assert source.reduction() is Reduction.COUNTED


def test_a_counted_mean_with_other_loss_terms_refuses_unequal_counts() -> None:
    def with_penalty(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return _loss(model, batch) + model(batch["x"]).pow(2).mean()

    model, even = _model(), _batch(4, 4, 4, 4)
    step = _step(model, with_penalty, even, parts=2)
    step.backward(even)
    step.zero_grad()
    with pytest.raises(Mismatch, match="count 9 to 11 targets"):
        step.backward(_batch(4, 5, 4, 7))
    assert all(p.grad is None for p in model.parameters())


def _with_a_head_beside(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    out = model(batch["x"]).flatten(0, 1)
    return _loss(model, batch) + 0.4 * nn.functional.cross_entropy(-out, batch["others"].flatten())


def _with_others(batch: dict[str, torch.Tensor], *kept: int) -> dict[str, torch.Tensor]:
    return {**batch, "others": _batch(*kept)["y"].flip(1)}


def test_two_means_that_count_alike_weigh_the_parts_of_later_batches() -> None:
    model, twin = _model(), _model()
    even = _with_others(_batch(4, 4, 4, 4), 10, 10, 10, 10)
    step = _step(model, _with_a_head_beside, even, parts=2)
    later = _with_others(_batch(1, 1, 6, 0), 3, 1, 10, 2)
    step.backward(later)
    _with_a_head_beside(twin, later).backward()
    for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-5, atol=1e-7)


def test_two_means_that_count_differently_are_refused_before_anything_runs() -> None:
    model, even = _model(), _with_others(_batch(4, 4, 4, 4), 10, 10, 10, 10)
    step = _step(model, _with_a_head_beside, even, parts=2)
    later = _with_others(_batch(4, 5, 4, 7), 10, 10, 10, 10)
    with pytest.raises(Mismatch, match="micro-batch 1 of 2 holds 9 of the 20 targets") as error:
        step.backward(later)
    assert "20 of the 40 of another" in str(error.value)
    assert all(p.grad is None for p in model.parameters())
    assert CapturedStep(model=model, loss=_with_a_head_beside, batch=later).why_not_split()


def test_a_sum_over_the_batch_of_a_counted_mean_refuses_unequal_counts() -> None:
    def times_the_samples(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return _loss(model, batch) * len(batch["x"])

    model, even = _model(), _batch(4, 4, 4, 4)
    step = _step(model, times_the_samples, even, parts=2)
    step.backward(even)
    with pytest.raises(Mismatch, match="count 9 to 11 targets"):
        step.backward(_batch(4, 5, 4, 7))
