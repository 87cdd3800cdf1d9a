"""Small steps whose batch may or may not be split or shared, and the expected reasons.

Not for models that others wrote: see tests/zoo.
"""

import torch
from torch import Tensor, nn

from steelyard.capture.batch.independence_proof import Splitting
from steelyard.capture.step import CapturedStep
from tests.zoo.case import Sample


def verdict(sample: Sample) -> Splitting:
    model, loss, batch = sample
    return CapturedStep(model=model, loss=loss, batch=batch).splitting()


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Dropout(0.3), nn.Linear(8, 3))


def data(count: int = 6) -> dict[str, Tensor]:
    return {"x": torch.randn(count, 8), "y": torch.randint(3, (count,))}


def class_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return nn.functional.cross_entropy(model(batch["x"]), batch["y"])


def sum_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return model(batch["x"]).square().sum()


def squared_mean_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Return a loss with a term over all samples together, which is at most a thousandth of it."""
    return class_loss(model, batch) + 1e-3 * model(batch["x"]).mean(0).square().sum()


def spread_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Return a loss in which samples are compared with one another."""
    out = model(batch["x"])
    return torch.cdist(out, out).mean() + out.square().mean()


def weighed_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return nn.functional.cross_entropy(
        model(batch["x"]), batch["y"], weight=torch.tensor([1.0, 7.0, 0.1])
    )


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = net()
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        self.steps.add_(1)
        out: Tensor = self.inner(x)
        return out


def shared(sample: Sample) -> Splitting:
    model, loss, batch = sample
    return CapturedStep(model=model, loss=loss, batch=batch).sharing()
