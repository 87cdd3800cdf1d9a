"""Batch normalisation in several calls equals torch's own over all samples, forward and
backward."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from steelyard.operators import sync_batchnorm as norms

EPS = 1e-5


def in_pieces(
    shares: list[Tensor], gradients: list[Tensor], weight: Tensor | None, bias: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the result and the gradients of input, weight and bias, from this many ranks."""
    count = sum(x.numel() // x.shape[1] for x in shares)
    gathered = torch.cat([norms.batch_norm_stats(x) for x in shares])
    both = norms.batch_norm_gather_stats(gathered, len(shares))
    made = [norms.batch_norm_elemt(x, weight, bias, both, EPS) for x in shares]
    pairs = list(zip(gradients, shares, strict=True))
    sums = [norms.batch_norm_backward_reduce(g, x, both, EPS) for g, x in pairs]
    total = torch.stack(sums).sum(0)
    back = [
        norms.batch_norm_backward_elemt(g, x, weight, both, total, count, EPS) for g, x in pairs
    ]
    return torch.cat(made), torch.cat(back), *total


@pytest.mark.parametrize("shape", [(12, 3), (12, 3, 5), (12, 3, 4, 4), (12, 3, 2, 3, 2)])
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("is_affine", [True, False])
def test_statistics_of_pieces_give_those_of_the_whole(
    shape: tuple[int, ...], ranks: int, is_affine: bool
) -> None:
    torch.manual_seed(0)
    # The values are far from zero, and each share has another mean, so that the variance between
    # ranks counts too.
    x = torch.randn(shape, dtype=torch.float64) + torch.arange(12.0).view(
        -1, *[1] * (len(shape) - 1)
    )
    x.requires_grad_()
    given = torch.randn_like(x)
    norm = nn.BatchNorm1d(3, affine=is_affine, dtype=torch.float64)
    if is_affine:
        nn.init.normal_(norm.weight)
        nn.init.normal_(norm.bias)
    expected = nn.functional.batch_norm(x, None, None, norm.weight, norm.bias, True, 0.1, EPS)
    expected.backward(given)
    with torch.no_grad():
        made, back, of_weight, of_bias = in_pieces(
            [*x.detach().chunk(ranks)], [*given.chunk(ranks)], norm.weight, norm.bias
        )
    torch.testing.assert_close(made, expected.detach(), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(back, x.grad, rtol=1e-9, atol=1e-12)
    if is_affine:
        torch.testing.assert_close(of_weight, norm.weight.grad, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(of_bias, norm.bias.grad, rtol=1e-12, atol=1e-12)


def test_large_means_cause_no_cancellation() -> None:
    x = torch.randn(64, 3, 4, dtype=torch.float64) + 1e6
    gathered = torch.cat([norms.batch_norm_stats(part) for part in x.chunk(2)])
    _, variance = norms.batch_norm_gather_stats(gathered, 2)
    torch.testing.assert_close(variance, x.var((0, 2), unbiased=False), rtol=1e-9, atol=0.0)


def test_running_statistics_equal_those_of_torch() -> None:
    torch.manual_seed(0)
    x = torch.randn(8, 3, 4, dtype=torch.float64)
    norm = nn.BatchNorm1d(3, momentum=0.3, dtype=torch.float64)
    before = norm.running_mean.clone(), norm.running_var.clone()
    norm(x)
    both = norms.batch_norm_stats(x)
    torch.testing.assert_close(norms.update_running_mean(before[0], both, 0.3), norm.running_mean)
    torch.testing.assert_close(norms.update_running_var(before[1], both, 0.3, 32), norm.running_var)
