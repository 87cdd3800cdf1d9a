"""DTensor internals: the placements that DTensor supports for an operator.

Not for Steelyard's own rules: see capture/spmd.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._ops import OpOverload

from steelyard._torch.private_names import require


def dtensor_strategies(
    operator: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> list[list[tuple[str, int]]]:
    """Return the result and input placements that DTensor supports for a call on one mesh axis.

    Each placement is a word and a dim: whole, shard, sum, or other. ``args`` contain (shape,
    stride, dtype) for tensors. The result is empty if DTensor has no rule, or if its rule itself
    rewrites sizes among the arguments.
    """
    require("dtensor")
    # Imports torch.distributed, which is not needed to plan for one device.
    from torch.distributed.tensor import DTensor, Partial, Replicate
    from torch.distributed.tensor._dtensor_spec import TensorMeta

    table = DTensor._op_dispatcher.sharding_propagator
    rule = table.op_single_dim_strategy_funcs.get(operator)
    if (
        rule is None
        or operator in table.op_to_shape_and_stride_idx
        # From torch 2.13 on; before that there are no rules for these operators.
        or operator in getattr(table, "op_to_scalar_shape_adjuster", ())
    ):
        return []

    def to_tensor_meta(value: Any) -> Any:
        if isinstance(value, MetaTensor):
            return TensorMeta(torch.Size(value.shape), value.stride, value.dtype)
        return [to_tensor_meta(v) for v in value] if isinstance(value, list) else value

    def describe(placement: Any) -> tuple[str, int]:
        if placement is None or isinstance(placement, Replicate):
            return "whole", 0
        if type(placement) is Partial:
            return ("sum", 0) if placement.reduce_op == "sum" else ("other", 0)
        dim = getattr(placement, "dim", None)
        return ("shard", dim) if isinstance(dim, int) else ("other", 0)

    found = rule.func(
        operator,
        tuple(map(to_tensor_meta, args)),
        {key: to_tensor_meta(v) for key, v in kwargs.items()},
    )
    return [[describe(placement) for placement in strategy] for strategy in found]


@dataclass(frozen=True, slots=True)
class MetaTensor:
    """A tensor among the arguments of a call that is never executed."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
