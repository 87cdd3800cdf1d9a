"""Operators: what their schemas and tags say of them.

Not for ours: see steelyard/operators.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

# The type of operators that can be named and called again; higher-order ones cannot.
from torch._ops import OpOverload

__all__ = ["OpOverload", "argument", "builtin_of", "draws", "is_view", "mutates", "reads_data"]


def builtin_of(operator: Callable[..., Any]) -> Callable[..., Any]:
    """What calling an operator calls in the end, without the Python in between."""
    return operator._op if isinstance(operator, OpOverload) else operator


def mutates(operator: OpOverload) -> bool:
    """Whether an operator writes into an argument, as its schema says."""
    arguments = operator._schema.arguments
    return any(a.alias_info is not None and a.alias_info.is_write for a in arguments)


def draws(operator: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether a call takes random numbers; attention without dropout is tagged so, wrongly.

    Torch's own operators say so by a tag. Those of others need not, and are taken to draw.
    """
    if operator.namespace not in _TAGGED:
        return True
    if torch.Tag.nondeterministic_seeded not in operator.tags:
        return False
    dropout = argument(operator, args, kwargs, "dropout_p")
    return dropout is None or bool(dropout)


def argument(
    operator: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any], *names: str
) -> Any:
    """What a call gives for the parameter of one of these names; None where there is none."""
    for place, parameter in enumerate(operator._schema.arguments):
        if parameter.name in names:
            given = args[place] if place < len(args) else kwargs.get(parameter.name)
            return parameter.default_value if given is None else given
    return None


# The namespaces (torch 2.13) whose operators carry the tag where they draw; and ours.
_TAGGED = {
    *("aten", "prims", "prim", "profiler", "mkldnn", "mkl", "mkldnn_prepacked", "onednn"),
    *("_c10d_functional", "_c10d_functional_autograd", "c10d", "inductor", "steelyard"),
}


def reads_data(node: torch.fx.Node) -> bool:
    """Whether a node of Dynamo's graph is ``tensor.data``, which has no public function."""
    return node.target is torch._C._autograd._get_data_attr  # type: ignore[attr-defined]  # no stub


def is_view(operator: OpOverload) -> bool:
    """Whether an operator only looks at its first argument's storage, as its schema says."""
    returned = operator._schema.returns
    return bool(returned) and all(
        r.alias_info is not None and not r.alias_info.is_write for r in returned
    )
