"""Micro-batches that count unequal targets: weighed as the whole batch weighs them, or refused."""

import pytest
import torch
from torch import nn

from steelyard.capture.batching import Reduction
from steelyard.capture.source import StepSource
from steelyard.core.errors import Mismatch
from steelyard.core.program import Program
from steelyard.run.step import LiveStep


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(11, 8), nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 11))


def _loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return nn.functional.cross_entropy(model(batch["x"]).flatten(0, 1), batch["y"].flatten())


def _batch(*kept: int) -> dict[str, torch.Tensor]:
    """Rows of ten targets of which so many count."""
    torch.manual_seed(1)
    x = torch.randint(0, 11, (len(kept), 10))
    y = torch.randint(0, 11, (len(kept), 10))
    for row, count in enumerate(kept):
        y[row, count:] = -100
    return {"x": x, "y": y}


def _step(model: nn.Module, loss: object, batch: object, *, parts: int) -> LiveStep:
    source = StepSource(model=model, loss=loss, batch=batch)  # type: ignore[arg-type]
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
def test_the_parts_weigh_what_they_count(kept: tuple[int, ...], parts: int) -> None:
    model, twin, batch = _model(), _model(), _batch(*kept)
    loss = _step(model, _loss, batch, parts=parts).backward(batch)
    whole = _loss(twin, batch)
    whole.backward()
    torch.testing.assert_close(loss, whole.detach(), rtol=1e-6, atol=0)
    for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-5, atol=1e-7)


def test_the_reduction_is_read_off_the_graph() -> None:
    source = StepSource(model=_model(), loss=_loss, batch=_batch(4, 4, 4, 4))
    assert source.reduction() is Reduction.COUNTED


def test_a_counted_mean_beside_other_terms_refuses_unequal_counts() -> None:
    def with_penalty(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return _loss(model, batch) + model(batch["x"]).pow(2).mean()

    model, even = _model(), _batch(4, 4, 4, 4)
    step = _step(model, with_penalty, even, parts=2)
    step.backward(even)
    step.zero_grad()
    with pytest.raises(Mismatch, match="count 9 to 11 targets"):
        step.backward(_batch(4, 5, 4, 7))
    assert all(p.grad is None for p in model.parameters())
