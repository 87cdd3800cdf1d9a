"""The named decomposition tables that can be used to capture a step.

The name is part of a plan's fingerprint, because another table turns the same model into other
operators. Not for tracing: see joint_graph.py.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch

from steelyard import _torch
from steelyard.capture.tracing.joint_graph import Decompositions

aten = torch.ops.aten
_Masked = Callable[[torch.Tensor, torch.Tensor, float], torch.Tensor]


def masked_scale_in_two_ops(x: torch.Tensor, mask: torch.Tensor, scale: float) -> torch.Tensor:
    """Multiply by mask and scale in two operators, for a compiler that fuses them."""
    return x.mul(mask).mul(scale)


def masked_scale_in_one_op(x: torch.Tensor, mask: torch.Tensor, scale: float) -> torch.Tensor:
    """Multiply by mask and scale in one operator: the same bits, without a temporary."""
    strides = zip(x.shape, x.stride(), mask.stride(), strict=True)
    if any(size > 1 and x_stride != mask_stride for size, x_stride, mask_stride in strides):
        return masked_scale_in_two_ops(x, mask, scale)  # the result must have the strides of x
    product: torch.Tensor = torch.ops.steelyard.masked_scale.default(x, mask, scale)
    return product


def native_dropout(
    x: torch.Tensor,
    probability: float,
    train: bool | None,
    *,
    masked: _Masked = masked_scale_in_two_ops,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Dropout whose only random operator is the one that draws the boolean mask.

    Bitwise equal to eager on the CPU. Without this decomposition, output and mask come from one
    random operator and both must be saved; with it, the output can be recomputed from the mask.
    """
    if train is False or probability == 0:
        return x.clone(), torch.ones_like(x, dtype=torch.bool)
    if probability == 1:
        return torch.zeros_like(x), torch.zeros_like(x, dtype=torch.bool)
    like = aten.empty_like.default(x, dtype=torch.bool)
    # Eager draws the elements in memory order.
    order = sorted(range(x.dim()), key=lambda d: (-like.stride(d), d))
    drawn = aten.bernoulli.p(like.permute(order), 1 - probability)
    mask = drawn.permute([order.index(d) for d in range(x.dim())])
    return masked(x, mask, dropout_scale(probability, x.dtype)), mask


def dropout_scale(probability: float, dtype: torch.dtype) -> float:
    """Return 1 / (1 - p) as eager PyTorch does: in float32, then rounded to the tensor's dtype."""
    if dtype is torch.float64:
        return 1.0 / (1.0 - probability)
    scale = np.float32(1.0) / np.float32(1.0 - probability)
    if dtype is torch.float16:
        return float(np.float16(scale))
    if dtype is torch.bfloat16:
        bits = int(scale.view(np.uint32))
        return float(np.uint32((bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000).view(np.float32))
    return float(scale)


def native_dropout_backward(
    grad: torch.Tensor,
    mask: torch.Tensor,
    scale: float,
    *,
    masked: _Masked = masked_scale_in_two_ops,
) -> torch.Tensor:
    """Dropout's backward as the CPU kernel computes it.

    Torch's fake kernel (2.13) gives a transposed result other strides. Autograd's formula scales by
    an unrounded 1 / (1 - p), the mask in eager PyTorch by a rounded one.
    """
    rounded = dropout_scale(1 - 1 / scale, grad.dtype) if scale else scale
    return masked(grad, mask, rounded)


def native_layer_norm_backward(
    grad: torch.Tensor, x: torch.Tensor, shape: list[int], *statistics: Any
) -> Any:
    """LayerNorm's backward with explicit copies of non-contiguous inputs.

    The kernel copies such inputs itself and returns a contiguous result, but torch's fake kernel
    (2.13) gives the result the strides of the gradient. An explicit copy is visible in the graph.
    """
    if grad.is_contiguous() and x.is_contiguous():
        return NotImplemented
    args = (grad.contiguous(), x.contiguous(), shape, *statistics)
    return aten.native_layer_norm_backward.default(*args)


def table(name: str) -> Decompositions:
    return _TABLES[name]()


def _dropout(masked: _Masked) -> Decompositions:
    return {
        aten.native_dropout.default: partial(native_dropout, masked=masked),
        aten.native_dropout_backward.default: partial(native_dropout_backward, masked=masked),
    }


def _python(masked: _Masked) -> Decompositions:
    return {**_dropout(masked), aten.native_layer_norm_backward.default: native_layer_norm_backward}


def _inductor() -> Decompositions:
    return {**_torch.inductor_decompositions(), **_dropout(masked_scale_in_two_ops)}


_TABLES: dict[str, Callable[[], Decompositions]] = {
    "python-1": partial(_python, masked_scale_in_two_ops),
    "python-2": partial(_python, masked_scale_in_one_op),
    "inductor-1": _inductor,
    # Keeps operators that multi-rank trades look for; Inductor decomposes them when it compiles.
    "inductor-2": partial(_python, masked_scale_in_two_ops),
}
