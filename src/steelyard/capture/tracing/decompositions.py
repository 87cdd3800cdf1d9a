"""The named tables of decompositions that a step may be captured with.

Part of a plan's fingerprint: under another table the same model has other operators.
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


def in_two_products(x: torch.Tensor, mask: torch.Tensor, scale: float) -> torch.Tensor:
    """For a compiler, which makes one loop of them."""
    return x.mul(mask).mul(scale)


def in_one_call(x: torch.Tensor, mask: torch.Tensor, scale: float) -> torch.Tensor:
    """The same bits, with nothing held between."""
    strides = zip(x.shape, x.stride(), mask.stride(), strict=True)
    if any(size > 1 and ours != theirs for size, ours, theirs in strides):
        return in_two_products(x, mask, scale)  # the result is to lie as x does
    product: torch.Tensor = torch.ops.steelyard.masked_scale.default(x, mask, scale)
    return product


def native_dropout(
    x: torch.Tensor, probability: float, train: bool | None, *, masked: _Masked = in_two_products
) -> tuple[torch.Tensor, torch.Tensor]:
    """Dropout with its randomness apart: only the boolean mask is bound to the generator.

    Bitwise equal to eager on the CPU. Undecomposed, output and mask come from one random operator
    and both have to be kept; so split, the output can be computed again from the mask.
    """
    if train is False or probability == 0:
        return x.clone(), torch.ones_like(x, dtype=torch.bool)
    if probability == 1:
        return torch.zeros_like(x), torch.zeros_like(x, dtype=torch.bool)
    like = aten.empty_like.default(x, dtype=torch.bool)
    # Eager draws in the order in which the elements lie in memory.
    order = sorted(range(x.dim()), key=lambda d: (-like.stride(d), d))
    drawn = aten.bernoulli.p(like.permute(order), 1 - probability)
    mask = drawn.permute([order.index(d) for d in range(x.dim())])
    return masked(x, mask, kept_scale(probability, x.dtype)), mask


def kept_scale(probability: float, dtype: torch.dtype) -> float:
    """1 / (1 - p) as eager computes it: divided in float32, then rounded to the tensor's dtype."""
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
    grad: torch.Tensor, mask: torch.Tensor, scale: float, *, masked: _Masked = in_two_products
) -> torch.Tensor:
    """What the CPU's kernel computes: torch's fake one (2.13) lays a transposed result out anew.

    Autograd's formula scales by an unrounded 1 / (1 - p); eager's mask holds a rounded one.
    """
    rounded = kept_scale(1 - 1 / scale, grad.dtype) if scale else scale
    return masked(grad, mask, rounded)


def native_layer_norm_backward(
    grad: torch.Tensor, x: torch.Tensor, shape: list[int], *statistics: Any
) -> Any:
    """The kernel copies what is not contiguous and its result is; torch's fake one (2.13) lays the
    result out like the gradient. So the copy is made before it, where it can be seen.
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
    return {**_torch.inductor_decompositions(), **_dropout(in_two_products)}


_TABLES: dict[str, Callable[[], Decompositions]] = {
    "python-1": partial(_python, in_two_products),
    "python-2": partial(_python, in_one_call),
    "inductor-1": _inductor,
    # Operators whole, as trades over ranks look for them; they are taken apart where they are
    # compiled.
    "inductor-2": partial(_python, in_two_products),
}
