"""Ranks share a batch if together they train what one device would train, including statistics
of all samples."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from steelyard.capture.batch.independence_proof import Reduction, Splitting
from tests.support.samples import (
    Counting,
    class_loss,
    data,
    net,
    shared,
    spread_loss,
    squared_mean_loss,
    sum_loss,
    verdict,
    weighed_loss,
)


class Remembering(nn.Module):
    """A model that keeps a running mean of its inputs, as a teacher or a codebook does."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = net()
        self.register_buffer("seen", torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        self.seen.lerp_(x.detach().mean(0), 0.1)
        out: Tensor = self.inner(x)
        return out


def normed(**said: Any) -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8, **said), nn.Tanh(), nn.Linear(8, 3))


@pytest.mark.parametrize("said", [{}, {"affine": False}, {"track_running_stats": False}])
@pytest.mark.parametrize(
    ("loss", "reduction"), [(class_loss, Reduction.COUNTED), (sum_loss, Reduction.SUM)]
)
def test_batch_statistics_can_be_computed_over_all_ranks(
    said: dict[str, Any], loss: Any, reduction: Reduction
) -> None:
    sample = normed(**said), loss, data()
    assert "computes its statistics over the whole batch" in verdict(sample).reason
    assert shared(sample) == Splitting(reduction=reduction)


def test_step_counters_are_equal_on_all_ranks() -> None:
    assert shared((Counting(), class_loss, data())).reason == ""


@pytest.mark.parametrize("loss", [squared_mean_loss, spread_loss, weighed_loss])
def test_other_coupling_is_found_beside_batch_statistics(loss: Any) -> None:
    assert shared((normed(), loss, data())).reason


class Folded(nn.Module):
    """A model with statistics over samples in another dim than the first."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x).t().unsqueeze(0)
        h = nn.functional.batch_norm(h, None, None, training=True)
        out: Tensor = self.down(h.squeeze(0).t().tanh())
        return out


def test_statistics_along_another_dim_are_found() -> None:
    assert "computes statistics over samples" in shared((Folded(), class_loss, data())).reason
    assert verdict((Folded(), class_loss, data())).reason


def test_a_buffer_of_per_rank_values_is_no_statistic() -> None:
    assert "buffer seen is updated" in shared((Remembering(), class_loss, data())).reason
    behind = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Tanh(), Remembering())
    assert "buffer 3.seen is updated" in shared((behind, class_loss, data())).reason
