"""DTensor: the placements that it knows for an operator.

Not for rules of ours: see capture/spmd.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._ops import OpOverload


def dtensor_strategies(
    operator: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> list[list[tuple[str, int]]]:
    """The placements of results and tensors that DTensor knows for a call on one mesh axis.

    Each as a word and a dim: whole, shard, sum, or other. ``args`` hold (shape, stride, dtype) for
    tensors. Empty where it has no rule, or one that rewrites sizes among the arguments itself.
    """
    # Imports torch.distributed, which nobody else needs who plans for one device.
    from torch.distributed.tensor import DTensor, Partial, Replicate
    from torch.distributed.tensor._dtensor_spec import TensorMeta

    table = DTensor._op_dispatcher.sharding_propagator
    rule = table.op_single_dim_strategy_funcs.get(operator)
    if (
        rule is None
        or operator in table.op_to_shape_and_stride_idx
        or operator in table.op_to_scalar_shape_adjuster
    ):
        return []

    def described(value: Any) -> Any:
        if isinstance(value, MetaTensor):
            return TensorMeta(torch.Size(value.shape), value.stride, value.dtype)
        return [described(v) for v in value] if isinstance(value, list) else value

    def word(placement: Any) -> tuple[str, int]:
        if placement is None or isinstance(placement, Replicate):
            return "whole", 0
        if type(placement) is Partial:
            return ("sum", 0) if placement.reduce_op == "sum" else ("other", 0)
        dim = getattr(placement, "dim", None)
        return ("shard", dim) if isinstance(dim, int) else ("other", 0)

    found = rule.func(
        operator, tuple(map(described, args)), {key: described(v) for key, v in kwargs.items()}
    )
    return [[word(placement) for placement in strategy] for strategy in found]


@dataclass(frozen=True, slots=True)
class MetaTensor:
    """A tensor among the arguments of a call that nobody carries out."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
