"""Operator properties from schemas and tags.

Not for Steelyard's own operators: see steelyard/operators.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

# The type of operators that can be called by name; higher-order operators are of other types.
from torch._ops import OpOverload

__all__ = ["OpOverload", "argument", "builtin_of", "draws", "is_view", "mutates", "reads_data"]


def builtin_of(operator: Callable[..., Any]) -> Callable[..., Any]:
    """Return the builtin that an operator ends up calling, without the Python wrapper."""
    return operator._op if isinstance(operator, OpOverload) else operator


def mutates(operator: OpOverload) -> bool:
    """True if an operator writes into an argument, according to its schema."""
    arguments = operator._schema.arguments
    return any(a.alias_info is not None and a.alias_info.is_write for a in arguments)


def draws(operator: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """True if a call draws random numbers; attention without dropout is wrongly tagged as such.

    Torch's own operators have a tag for this. Operators of other libraries may lack it and are
    assumed to draw.
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
    """Return a call's value for the parameter with one of these names; None if there is none."""
    for place, parameter in enumerate(operator._schema.arguments):
        if parameter.name in names:
            given = args[place] if place < len(args) else kwargs.get(parameter.name)
            return parameter.default_value if given is None else given
    return None


# The namespaces (torch 2.13) whose operators have the tag if they draw, plus Steelyard's own.
_TAGGED = {
    *("aten", "prims", "prim", "profiler", "mkldnn", "mkl", "mkldnn_prepacked", "onednn"),
    *("_c10d_functional", "_c10d_functional_autograd", "c10d", "inductor", "steelyard"),
}


def reads_data(node: torch.fx.Node) -> bool:
    """True if a node of Dynamo's graph is ``tensor.data``, which has no public function."""
    return node.target is torch._C._autograd._get_data_attr  # type: ignore[attr-defined]  # no stub


def is_view(operator: OpOverload) -> bool:
    """True if an operator returns only views of its first argument, according to its schema."""
    returned = operator._schema.returns
    return bool(returned) and all(
        r.alias_info is not None and not r.alias_info.is_write for r in returned
    )
