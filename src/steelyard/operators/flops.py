"""FLOPs of one operator call; a multiplication and an addition count as one each.

It uses torch's registry, which users extend with
``torch.utils.flop_counter.register_flop_formula``. It adds formulas for operators that torch 2.13
lacks or counts wrongly. Not for operators without any formula: see missing_flops.py.
"""

from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry

from steelyard import _torch

# A complex multiplication and addition take four real multiplications and four real additions.
_REAL_PRODUCTS_OF_A_COMPLEX_ONE = 4


def formula_of(target: Any) -> Callable[..., Any] | None:
    """Return the formula of an operator, or None.

    A formula is called with the operator's arguments and its result as ``out_val``.
    """
    packet = target.overloadpacket
    own = _FORMULAS.get(str(packet))
    return own if own is not None else flop_registry.get(packet)


def flops_of_call(target: Any, args: Any, kwargs: Any, result: Any) -> int:
    """Return the FLOPs of a call, zero if no formula is known. ``out`` is not an operand."""
    assert isinstance(target, _torch.OpOverload)
    formula = formula_of(target)
    if formula is None:
        return 0
    plain = {key: value for key, value in kwargs.items() if key != "out"}
    flops = int(formula(*args, **plain, out_val=result))
    first = _first_tensor(args)
    if first is None:
        return flops
    if first.dtype is torch.float4_e2m1fn_x2:
        flops *= 2  # an element of this dtype packs two values
    return flops * (_REAL_PRODUCTS_OF_A_COMPLEX_ONE if first.is_complex() else 1)


def format_of_call(args: Any) -> str:
    """Return the name of the operand format under which hardware peak rates are declared."""
    first = _first_tensor(args)
    if first is None:
        return ""
    name = str(first.dtype).removeprefix("torch.")
    return next((short for head, short in _FORMATS.items() if name.startswith(head)), name)


_FORMATS = {
    "float8": "float8",
    "float4": "float4",
    "uint8": "int8",
    "complex32": "float16",
    "complex64": "float32",
    "complex128": "float64",
}


def _first_tensor(args: Any) -> torch.Tensor | None:
    leaves = _torch.tree_leaves(args)
    return next((leaf for leaf in leaves if isinstance(leaf, torch.Tensor)), None)


# --- matrix products


def _product(a: Any, b: Any, *_: Any, **__: Any) -> int:
    return int(2 * a.numel() * b.shape[-1])


def _added_product(_: Any, a: Any, b: Any, *__: Any, **___: Any) -> int:
    return _product(a, b)


def _products(left: Sequence[Any], right: Sequence[Any], *_: Any, **__: Any) -> int:
    return sum(_product(a, b) for a, b in zip(left, right, strict=True))


def _product_with_packed(x: Any, *_: Any, out_val: Any, **__: Any) -> int:
    """A product with a packed matrix; only the result shows the width of the matrix."""
    return int(2 * x.numel() * out_val.shape[-1])


def _inner_product(a: Any, *_: Any, **__: Any) -> int:
    return int(2 * a.numel())


def _added_inner_products(_: Any, matrix: Any, *__: Any, **___: Any) -> int:
    return int(2 * matrix.numel())


def _linear(x: Any, weight: Any, *_: Any, **__: Any) -> int:
    return int(2 * x.numel() * weight.shape[0])


def _linear_backward(x: Any, _: Any, weight: Any, mask: Sequence[bool], **__: Any) -> int:
    return _linear(x, weight) * sum(map(bool, mask[:2]))


def _grouped_product(a: Any, b: Any, *_: Any, **__: Any) -> int:
    """A grouped matmul; offsets partition the rows, the columns or the contracted dim.

    All groups together cost as much as one product over the whole dim, for any offsets. Rows
    after the last offset, which belong to no group, are counted as well.
    """
    once = a.numel() // a.shape[0] if a.dim() == 3 and b.dim() == 2 and a.shape[0] else a.numel()
    return int(2 * once * b.shape[-1])


def _grouped_product_backward(a: Any, b: Any, *_: Any, **__: Any) -> int:
    """The gradients of both operands of a product."""
    return 2 * _grouped_product(a, b)


def _trilinear(a: Any, b: Any, c: Any, *expanded: Sequence[int] | int, **__: Any) -> int:
    """A product of three tensors, summed over the dims that the result does not have."""
    shapes = []
    for tensor, dims in zip((a, b, c), expanded, strict=False):
        assert not isinstance(dims, int)
        shape = list(tensor.shape)
        for dim in sorted(dims):
            shape.insert(dim, 1)
        shapes.append(shape)
    return 2 * prod(int(max(sizes)) for sizes in zip(*shapes, strict=True))


# --- convolutions


def _convolution_backward(gradient: Any, x: Any, weight: Any, *rest: Any, **named: Any) -> int:
    """The gradients of input and weight; each costs as much as the forward pass.

    Torch's formula (2.13) ignores groups for the weight gradient: for a depthwise convolution its
    result is too large by a factor of the number of channels.
    """
    transposed = named["transposed"] if "transposed" in named else rest[4]
    mask = named["output_mask"] if "output_mask" in named else rest[7]
    places = (x if transposed else gradient).shape
    return int(2 * places[0] * prod(places[2:]) * weight.numel() * sum(mask[:2]))


def _convolution_over_time(_: Any, weight: Any, *__: Any, out_val: Any, **___: Any) -> int:
    return int(2 * out_val.shape[0] * out_val.shape[1] * weight.numel())


def _convolution_over_time_backward(
    gradient: Any, _: Any, weight: Any, *__: Any, **___: Any
) -> int:
    return int(2 * 2 * gradient.shape[0] * gradient.shape[1] * weight.numel())


# --- attention


def _attention(query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    batch, heads, rows, width = query.shape
    return int(2 * batch * heads * rows * key.shape[-2] * (width + value.shape[-1]))


def _attention_backward(_: Any, query: Any, key: Any, value: Any, *__: Any, **___: Any) -> int:
    batch, heads, rows, width = query.shape
    # Five products: the recomputed scores, and one for each of dP, dV, dQ, dK.
    return int(2 * batch * heads * rows * key.shape[-2] * (3 * width + 2 * value.shape[-1]))


# --- recurrent layers in one call


def _recurrent(x: Any, w_in: Any, w_hidden: Any, *_: Any, **__: Any) -> int:
    return int(2 * x.shape[0] * x.shape[1] * (w_in.numel() + w_hidden.numel()))


def _recurrent_backward(x: Any, w_in: Any, w_hidden: Any, *_: Any, **__: Any) -> int:
    return 2 * _recurrent(x, w_in, w_hidden)


def _recurrent_layers(x: Any, weights: Sequence[Any], *_: Any, **__: Any) -> int:
    matrices = sum(weight.numel() for weight in weights if weight.dim() > 1)
    return int(2 * prod(x.shape[:-1]) * matrices)


def _recurrent_layers_backward(x: Any, weights: Sequence[Any], *_: Any, **__: Any) -> int:
    return 2 * _recurrent_layers(x, weights)


# --- distances: for each pair and coordinate a difference, a power and a sum


def _distances(a: Any, b: Any, *_: Any, **__: Any) -> int:
    return int(3 * prod(a.shape[:-2]) * a.shape[-2] * b.shape[-2] * a.shape[-1])


def _distances_by_product(a: Any, b: Any, *_: Any, **__: Any) -> int:
    return int(2 * a.numel() * b.shape[-2])


def _distances_backward(_: Any, a: Any, b: Any, *__: Any, **___: Any) -> int:
    return _distances(a, b)


def _distances_within(a: Any, *_: Any, **__: Any) -> int:
    return int(3 * a.shape[0] * (a.shape[0] - 1) // 2 * a.shape[1])


def _distances_within_backward(_: Any, a: Any, *__: Any, **___: Any) -> int:
    return _distances_within(a)


# --- factorisations and solutions, by the leading terms of LAPACK's counts (Blackford and Dongarra,
# LAPACK Working Note 41, 1999). Iterative algorithms (eigenvalues, singular values, the matrix
# exponential) have no such count, so there is no formula for them.


def _matrices(a: Any) -> tuple[int, int, int]:
    return prod(a.shape[:-2]), a.shape[-2], a.shape[-1]


def _cholesky(a: Any, *_: Any, **__: Any) -> int:
    count, n, _n = _matrices(a)
    return count * n**3 // 3


def _lu(a: Any, *_: Any, **__: Any) -> int:
    count, m, n = _matrices(a)
    short, long = min(m, n), max(m, n)
    return int(count * (long * short**2 - short**3 / 3))


def _inverse(a: Any, *_: Any, **__: Any) -> int:
    count, n, _n = _matrices(a)
    return count * 2 * n**3


def _solution(a: Any, b: Any, *_: Any, **__: Any) -> int:
    return _lu(a) + _two_substitutions(a, b)


def _substitution(a: Any, b: Any, *_: Any, **__: Any) -> int:
    return int(a.shape[-1] * b.numel())


def _substitution_in(b: Any, a: Any, *_: Any, **__: Any) -> int:
    return _substitution(a, b)


def _two_substitutions(a: Any, b: Any, *_: Any, **__: Any) -> int:
    return 2 * _substitution(a, b)


def _two_substitutions_in(b: Any, a: Any, *_: Any, **__: Any) -> int:
    return _two_substitutions(a, b)


def _solution_by_lu(a: Any, _: Any, b: Any, *__: Any, **___: Any) -> int:
    return _two_substitutions(a, b)


def _reflections(a: Any, *_: Any, **__: Any) -> int:
    count, m, n = _matrices(a)
    short, long = min(m, n), max(m, n)
    return int(count * (2 * long * short**2 - 2 * short**3 / 3))


def _qr(a: Any, mode: str = "reduced", *_: Any, **__: Any) -> int:
    return _reflections(a) * (1 if mode == "r" else 2)


_FORMULAS: Mapping[str, Callable[..., int]] = {
    **dict.fromkeys(("aten.dot", "aten.vdot", "aten.mv"), _inner_product),
    **dict.fromkeys(("aten._int_mm", "aten._scaled_mm_v2", "aten.matmul"), _product),
    **dict.fromkeys(
        ("aten._grouped_mm", "aten._scaled_grouped_mm", "aten._scaled_grouped_mm_v2"),
        _grouped_product,
    ),
    # An operator of transformers, used where torch's grouped product rejects the inputs.
    "transformers.grouped_mm_fallback": _grouped_product,
    "transformers.grouped_mm_fallback_backward": _grouped_product_backward,
    "aten.addbmm": _added_product,
    "aten._addmm_activation": _added_product,
    "aten.addmv": _added_inner_products,
    "aten._foreach_mm": _products,
    "aten.linear": _linear,
    "aten.linear_backward": _linear_backward,
    "aten._trilinear": _trilinear,
    **dict.fromkeys(
        (
            "aten._weight_int4pack_mm",
            "aten._weight_int4pack_mm_for_cpu",
            "aten._weight_int4pack_mm_with_scales_and_zeros",
            "aten._weight_int8pack_mm",
            "aten._dyn_quant_matmul_4bit",
        ),
        _product_with_packed,
    ),
    "aten.convolution_backward": _convolution_backward,
    "aten.conv_tbc": _convolution_over_time,
    "aten.conv_tbc_backward": _convolution_over_time_backward,
    "aten._scaled_dot_product_flash_attention_for_cpu": _attention,
    "aten._scaled_dot_product_flash_attention_for_cpu_backward": _attention_backward,
    "aten._scaled_dot_product_fused_attention_overrideable": _attention,
    "aten._scaled_dot_product_fused_attention_overrideable_backward": _attention_backward,
    "aten.mkldnn_rnn_layer": _recurrent,
    "aten.mkldnn_rnn_layer_backward": _recurrent_backward,
    **dict.fromkeys(("aten._cudnn_rnn", "aten.miopen_rnn"), _recurrent_layers),
    **dict.fromkeys(
        ("aten._cudnn_rnn_backward", "aten.miopen_rnn_backward"), _recurrent_layers_backward
    ),
    "aten._cdist_forward": _distances,
    "aten._cdist_backward": _distances_backward,
    "aten._euclidean_dist": _distances_by_product,
    "aten._pdist_forward": _distances_within,
    "aten._pdist_backward": _distances_within_backward,
    **dict.fromkeys(
        ("aten.linalg_cholesky_ex", "aten.cholesky", "aten.linalg_ldl_factor_ex"), _cholesky
    ),
    **dict.fromkeys(
        (
            "aten.linalg_lu_factor_ex",
            "aten.linalg_lu",
            "aten._linalg_det",
            "aten._linalg_slogdet",
        ),
        _lu,
    ),
    "aten.linalg_inv_ex": _inverse,
    "aten.cholesky_inverse": _inverse,
    "aten._linalg_solve_ex": _solution,
    "aten.linalg_solve_triangular": _substitution,
    "aten.triangular_solve": _substitution_in,
    "aten.cholesky_solve": _two_substitutions_in,
    "aten._cholesky_solve_helper": _two_substitutions_in,
    "aten.linalg_lu_solve": _solution_by_lu,
    "aten.linalg_ldl_solve": _solution_by_lu,
    "aten.linalg_qr": _qr,
    "aten.linalg_householder_product": _reflections,
}
