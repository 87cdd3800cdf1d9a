"""Finds operators that may multiply but have no FLOP formula, so that they can be reported.

All operators are reported except those known to be memory bound. An operator of another library may
do anything. An operator of torch is memory bound if torch tags it as pointwise or as a reduction,
or if it is listed here. Not for the formulas: see flops.py.
"""

from typing import Any

import torch

from steelyard import _torch
from steelyard.operators.flops import formula_of

# Namespaces of operators that compute nothing, of our own operators, and of casts to and from
# formats with few bits.
_NEVER_MULTIPLY = frozenset(
    {
        "steelyard", "_c10d_functional", "c10d_functional", "c10d", "profiler", "rngprims",
        "inductor", "inductor_prims", "debugprims", "quantized_decomposed", "export", "prim",
    }
)  # fmt: skip
_TORCH = frozenset({"aten", "prims"})
# Memory-bound operators. They access each element a fixed number of times, once per element of a
# pooling window, or O(log n) times in a sort or a Fourier transform. Names are written without
# leading and trailing underscores, and without the endings below.
_ENDINGS = (
    "_backward", "_backward_data", "_forward", "_copy", "_functional", "_forward_only",
    "_scatter", "_per_sample_weights", "_dense", "_with_indices", "_legit", "_no_training", "_impl",
    "_interface", "_kernel", "_update", "_with",
)  # fmt: skip
_MEMORY_BOUND = frozenset(
    {
        "abs", "absolute", "acos", "acosh", "adaptive_avg_pool1d", "adaptive_avg_pool2d",
        "adaptive_avg_pool3d", "adaptive_max_pool2d", "adaptive_max_pool3d", "add", "add_relu",
        "addr", "affine_grid_generator", "alias", "alpha_dropout", "amax", "amin", "aminmax",
        "amp_foreach_non_finite_check_and_unscale", "amp_update_scale", "and", "arange",
        "arccos", "arccosh", "arcsin", "arcsinh", "arctan", "arctan2", "arctanh", "as_strided",
        "asin", "asinh", "atan", "atan2", "atanh", "avg_pool1d", "avg_pool2d", "avg_pool3d",
        "batch_norm", "batch_norm_backward_elemt", "batch_norm_backward_reduce",
        "batch_norm_elemt", "batch_norm_gather_stats", "batch_norm_gather_stats_with_counts",
        "batch_norm_no_update", "batch_norm_reduce", "batch_norm_stats",
        "batch_norm_update_stats", "bernoulli", "bessel_i0", "bessel_i0e", "bessel_i1",
        "bessel_i1e", "bessel_j0", "bessel_j1", "binary_cross_entropy",
        "binary_cross_entropy_with_logits", "bincount", "binomial", "bitwise_and", "bitwise_or",
        "bitwise_xor", "block_diag", "broadcast_in_dim", "broadcast_tensors", "bucketize",
        "cat", "cauchy", "cbrt", "ceil", "channel_shuffle", "chunk_cat", "clone", "col2im",
        "collapse", "collapse_view", "complex", "conj", "conj_physical",
        "constant_pad_nd", "contiguous",
        "convert_element_type", "convert_weight_to_int4pack",
        "convert_weight_to_int4pack_for_cpu", "copy", "copy_from", "copy_from_and_resize",
        "copy_strided", "copy_to", "copysign", "cos", "cosh", "cosine_embedding_loss",
        "ctc_loss", "cudnn_affine_grid_generator", "cudnn_batch_norm", "cudnn_ctc_loss",
        "cudnn_grid_sampler", "cudnn_rnn_flatten_weight", "cummax", "cummin", "cumprod",
        "cumsum", "dequantize", "detach", "device_put", "diag", "diag_embed", "diagonal",
        "dirichlet_grad", "dist", "div", "divide", "dropout", "dyn_quant_pack_4bit_weight",
        "elu", "embedding", "embedding_bag", "embedding_renorm", "empty", "empty_like",
        "empty_permuted", "empty_strided", "eq", "erf", "erf_inv", "erfc", "erfcx", "exp",
        "expand", "expm1", "exponential", "eye", "fake_quantize_learnable_per_channel_affine",
        "fake_quantize_learnable_per_tensor_affine",
        "fake_quantize_per_channel_affine_cachemask",
        "fake_quantize_per_tensor_affine_cachemask",
        "fake_quantize_per_tensor_affine_cachemask_tensor_qparams", "feature_alpha_dropout",
        "feature_dropout", "fft_c2c", "fft_c2r", "fft_fft", "fft_fft2", "fft_fftn",
        "fft_fftshift", "fft_hfft", "fft_hfft2", "fft_hfftn", "fft_ifft", "fft_ifft2",
        "fft_ifftn", "fft_ifftshift", "fft_ihfft", "fft_ihfft2", "fft_ihfftn", "fft_irfft",
        "fft_irfft2", "fft_irfftn", "fft_r2c", "fft_rfft", "fft_rfft2", "fft_rfftn", "fill",
        "fix", "flip", "floor", "floor_divide", "fmod", "foreach_norm", "fractional_max_pool2d",
        "fractional_max_pool3d", "frexp", "full", "full_like", "functional_assert_async",
        "functional_assert_scalar", "functional_sym_constrain_range",
        "functional_sym_constrain_range_for_size", "fused_adagrad", "fused_adam", "fused_adamw",
        "fused_dropout", "fused_moving_avg_obs_fq_helper", "fused_rms_norm", "fused_sgd",
        "gather", "gcd", "ge", "gelu", "geometric", "glu", "glu_backward_jvp", "glu_jvp",
        "greater", "greater_equal", "grid_sampler_2d", "grid_sampler_2d_cpu_fallback",
        "grid_sampler_3d", "gt", "hann_window", "hardshrink", "hardsigmoid", "hardswish",
        "hardtanh", "hash_tensor", "heaviside", "hinge_embedding_loss", "histc", "histogram",
        "histogramdd", "huber_loss", "iand", "im2col", "imag", "index", "index_add",
        "index_copy", "index_fill", "index_put", "index_put_impl", "index_reduce",
        "index_select", "int_repr", "ior", "iota", "isfinite", "isin", "istft", "item", "ixor",
        "jagged_to_padded_dense", "kthvalue", "lazy_clone", "lcm", "le", "leaky_relu", "less",
        "less_equal", "lgamma", "lift", "lift_fresh", "linalg_cross", "linalg_vector_norm",
        "linspace", "log", "log10", "log1p", "log_normal", "log_sigmoid", "log_softmax",
        "logcumsumexp", "logspace", "logsumexp", "lshift", "lt", "lu_unpack", "make_dep_token",
        "make_per_channel_quantized_tensor", "make_per_tensor_quantized_tensor",
        "margin_ranking_loss", "masked_fill", "masked_scale", "masked_scatter", "masked_select",
        "masked_softmax", "max_pool2d", "max_pool3d", "max_unpool2d", "max_unpool3d",
        "maximum_value", "median", "meshgrid", "minimum_value", "miopen_batch_norm",
        "miopen_ctc_loss", "mish", "mkldnn_reshape", "mkldnn_transpose", "mode", "movedim",
        "mse_loss", "mul", "multi_margin_loss", "multilabel_margin_loss", "multinomial",
        "multiply", "nanmedian", "narrow", "native_batch_norm", "native_dropout",
        "native_group_norm", "native_layer_norm", "native_norm", "ndtri", "ne", "neg",
        "neg_view", "negative", "new_empty", "new_empty_strided", "new_full", "new_ones",
        "new_zeros", "new_zeros_with_same_feature_meta", "nll_loss", "nll_loss2d", "nonzero",
        "nonzero_numpy", "nonzero_static", "norm", "normal", "not_equal", "one_hot", "ones",
        "ones_like", "or", "pack_padded_sequence", "pad_packed_sequence", "pad_sequence",
        "padded_dense_to_jagged", "pairwise_distance", "permute", "philox_key_fold_in",
        "philox_key_split", "philox_normal", "philox_uniform", "pin_memory", "pixel_shuffle",
        "pixel_unshuffle", "poisson", "polar", "pow", "prelu", "prod", "put",
        "quantize_per_channel", "quantize_per_tensor", "quantize_per_tensor_dynamic",
        "quantized_batch_norm", "rand", "rand_like", "randint", "randint_like", "randn",
        "randn_like", "random", "randperm", "range", "real", "reflection_pad1d",
        "reflection_pad2d", "reflection_pad3d", "remainder", "renorm", "repeat",
        "repeat_interleave", "replication_pad1d", "replication_pad2d", "replication_pad3d",
        "reshape", "reshape_alias", "resize", "resize_as", "resize_output", "rev", "roll",
        "rot90", "round", "rrelu", "rrelu_with_noise", "rshift", "rsub", "safe_softmax",
        "sample_dirichlet", "scalar_tensor", "scatter", "scatter_add", "scatter_reduce",
        "searchsorted", "segment_reduce", "select", "set", "shift_left",
        "shift_right_arithmetic", "silu", "sin", "sinh", "slice", "slice_inverse",
        "smooth_l1_loss", "soft_margin_loss", "softmax", "softplus", "softshrink", "sort",
        "spdiags", "special_ndtr", "spherical_bessel_j0", "split", "split_dim",
        "split_with_sizes", "sqrt", "squeeze", "stack", "standard_gamma", "standard_gamma_grad",
        "std_mean", "stft", "sub", "subtract", "sum", "swapaxes", "t", "take", "tan", "tanh",
        "tensor_split", "thnn_fused_gru_cell", "thnn_fused_lstm_cell", "threshold", "to",
        "to_copy", "to_dense", "to_padded_tensor", "topk", "trace", "transpose", "tril",
        "tril_indices", "triu", "triu_indices", "true_divide", "unbind", "unfold", "uniform",
        "unique", "unique2", "unique_consecutive", "unique_dim", "unique_dim_consecutive",
        "unsafe_chunk", "unsafe_index", "unsafe_index_put", "unsafe_masked_index",
        "unsafe_masked_index_put_accumulate", "unsafe_split", "unsafe_split_with_sizes",
        "unsafe_view", "unsqueeze", "upsample_bicubic2d", "upsample_bicubic2d_aa",
        "upsample_bilinear2d", "upsample_bilinear2d_aa", "upsample_lanczos2d_aa",
        "upsample_linear1d", "upsample_nearest1d", "upsample_nearest2d", "upsample_nearest3d",
        "upsample_nearest_exact1d", "upsample_nearest_exact2d", "upsample_nearest_exact3d",
        "upsample_trilinear3d", "var", "var_mean", "view", "view_as_complex", "view_as_real",
        "view_of", "view_of_dtype", "weight_norm", "where", "xor", "xor_sum", "zero", "zeros",
        "zeros_like", "zeta",
    }
)  # fmt: skip
# Prefix of operators that apply another operator to a list of tensors in one call.
_FOREACH_PREFIX = "_foreach_"
_TAGS = (torch.Tag.pointwise, torch.Tag.reduction, torch.Tag.view_copy, torch.Tag.inplace_view)


def may_multiply_uncounted(target: Any, args: Any, kwargs: Any, result: Any) -> bool:
    """True if an operator has no formula and may sum up products, as far as is known."""
    assert isinstance(target, _torch.OpOverload)
    if formula_of(target) is not None or target.namespace in _NEVER_MULTIPLY:
        return False
    given = [x for x in _torch.tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
    if not given or _torch.is_view(target):
        return False
    if target.namespace not in _TORCH:
        return True
    return not _is_listed(target) and not _has_no_real_numbers(result)


def _is_listed(target: _torch.OpOverload) -> bool:
    if any(tag in target.tags for tag in _TAGS):
        return True
    name = target._schema.name.partition("::")[2]
    if name.startswith(_FOREACH_PREFIX):
        return name.removeprefix(_FOREACH_PREFIX).rstrip("_") != "mm"
    return _stem(name) in _MEMORY_BOUND


def _stem(name: str) -> str:
    """Strip outer underscores and known endings until the name is in the list or nothing is
    left.
    """
    while True:
        name = name.strip("_")
        if name in _MEMORY_BOUND:
            return name
        ending = next((e for e in _ENDINGS if name.endswith(e) and name != e), None)
        if ending is None:
            return name
        name = name.removesuffix(ending)


def _has_no_real_numbers(result: Any) -> bool:
    """True if the result consists only of indices, masks or counts, or has no tensors."""
    tensors = [x for x in _torch.tree_leaves(result) if isinstance(x, torch.Tensor)]
    return not any(x.is_floating_point() or x.is_complex() for x in tensors)
