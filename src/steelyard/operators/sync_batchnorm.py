"""Synchronised batch normalisation in several calls, between which ranks exchange data.

Statistics are two rows, the mean and variance of each channel. Sums are two rows, the gradients of
weight and bias. Not for the collectives: see passes/data_parallel/sync_batchnorm.py.
"""

import torch

_aten = torch.ops.aten


def batch_norm_stats(x: torch.Tensor) -> torch.Tensor:
    """Return the statistics of this rank's samples."""
    return torch.stack(_aten.batch_norm_update_stats.default(x, None, None, 0.0))


def batch_norm_gather_stats(gathered: torch.Tensor, num_ranks: int) -> torch.Tensor:
    """Return the statistics of all samples from those of each rank, for equal shares."""
    means, variances = gathered.view(num_ranks, 2, -1).unbind(1)
    mean = means.mean(0)
    # The total variance is the variance within ranks plus the variance between ranks, which avoids
    # cancellation.
    return torch.stack((mean, variances.add((means - mean).square()).mean(0)))


def batch_norm_elemt(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    statistics: torch.Tensor,
    eps: float,
) -> torch.Tensor:
    mean, variance = statistics.unbind()
    result: torch.Tensor
    result, _, _ = _aten._native_batch_norm_legit_no_training.default(
        x, weight, bias, mean, variance, 0.0, eps
    )
    return result


def update_running_mean(
    buffer: torch.Tensor, statistics: torch.Tensor, momentum: float
) -> torch.Tensor:
    return buffer.lerp(statistics[0], momentum)


def update_running_var(
    buffer: torch.Tensor, statistics: torch.Tensor, momentum: float, count: int
) -> torch.Tensor:
    """Update the running variance with the unbiased variance of ``count`` values."""
    return buffer.lerp(statistics[1] * (count / (count - 1)), momentum)


def batch_norm_backward_reduce(
    gradient: torch.Tensor, x: torch.Tensor, statistics: torch.Tensor, eps: float
) -> torch.Tensor:
    """Return this rank's contribution to the gradients of weight and bias."""
    mean, variance = statistics.unbind()
    # Both modes give the same gradients of weight and bias. The GPU kernel needs saved statistics,
    # which it reads only in training mode.
    saved = (None, None) if x.device.type == "cpu" else (mean, variance.add(eps).rsqrt_())
    _, of_weight, of_bias = _aten.native_batch_norm_backward.default(
        gradient, x, None, mean, variance, *saved, saved[0] is not None, eps, [False, True, True]
    )
    return torch.stack((of_weight, of_bias))


def batch_norm_backward_elemt(
    gradient: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor | None,
    statistics: torch.Tensor,
    sums: torch.Tensor,
    count: int,
    eps: float,
) -> torch.Tensor:
    """Return the gradient of ``x``.

    ``sums`` are over all ``count`` values of a channel on all ranks, because each value contributed
    to the channel's mean and variance.
    """
    mean, variance = statistics.unbind()
    inverse = variance.add(eps).rsqrt_()
    scale = inverse if weight is None else inverse * weight
    of_weight, of_bias = sums.unbind()
    slope = scale * inverse * of_weight / -count
    offset = scale * of_bias / -count - slope * mean
    scale, slope, offset = (v.view(1, -1, *[1] * (x.dim() - 2)) for v in (scale, slope, offset))
    return gradient.mul(scale).addcmul_(x, slope).add_(offset)
