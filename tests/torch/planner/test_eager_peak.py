"""The predicted memory of eager PyTorch, compared with the metered peak of an eager step."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import steelyard as sy
from steelyard.capture.eager_baseline import run_eager_baseline
from steelyard.measure.operators.memory import meter
from tests.harness import in_a_hurry
from tests.zoo import case

Batch = tuple[Tensor, Tensor]


class Convolutions(nn.Module):
    """The kernels of 3x3 convolutions need a larger workspace than any activation."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 64, 3, padding=1)
        self.second = nn.Conv2d(64, 64, 3, padding=1)
        self.head = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.second(torch.relu(self.first(x))))
        logits: Tensor = self.head(nn.functional.gelu(self.second(x)).mean((2, 3)))
        return logits


def loss(model: nn.Module, batch: Batch) -> Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


@pytest.fixture(scope="module", autouse=True)
def _in_a_hurry(costs: Path) -> Iterator[None]:
    with in_a_hurry(costs):
        yield


def metered_eager(model: nn.Module, batch: Batch) -> int:
    def step() -> None:
        loss(model, batch).backward()
        model.zero_grad()

    held = [*model.parameters(), *batch]
    return meter(step).peak_bytes + sum(t.nbytes for t in held)


def test_the_eager_peak_includes_kernel_workspace() -> None:
    torch.manual_seed(0)
    model, batch = Convolutions(), (torch.randn(8, 3, 24, 24), torch.randint(10, (8,)))
    planned = sy.plan(model, loss, batch)
    session = planned.session
    without = planned.plan.before.peak.resident_bytes + session.source.twin().peak_bytes()
    before, true = planned.baseline.memory_bytes.value, metered_eager(model, batch)
    assert before == pytest.approx(true, rel=0.01)
    assert without < 0.9 * true  # without the workspace, the prediction is far too low


def test_memory_hidden_in_kernels_makes_the_eager_peak_unknown() -> None:
    assert run_eager_baseline(*case("lstm").make()).has_unknown
    assert not run_eager_baseline(*case("mlp").make()).has_unknown
