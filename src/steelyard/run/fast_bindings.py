"""The quickest way to call each operator: torch's own Python binding where it has the same meaning.

``torch.ops`` reads its arguments against a schema at every call, which costs about as much again
as a small kernel. Not for which operator to call: see operators.py.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional as F

from steelyard import _torch
from steelyard.ir.graph import Node
from steelyard.operators import callable_of, decode8, encode8, masked_scale, operator_named
from steelyard.passes.pipeline.in_place_sends import WRITING

# Public builtins that take an overload's arguments in its own order; with these keywords, no other.
# Each is compared with its operator in tests/run/test_calls.py.
_Binding = Callable[..., Any]
_PLAIN: dict[str, _Binding] = {
    "aten.bernoulli.p": torch.bernoulli,
    "aten.bmm.default": torch.bmm,
    "aten.cat.default": torch.cat,
    "aten.div.Tensor": torch.div,
    "aten.embedding.default": torch.embedding,
    "aten.exp.default": torch.exp,
    "aten.expand.default": torch.Tensor.expand,
    "aten.gelu.default": F.gelu,
    "aten.masked_fill.Scalar": torch.masked_fill,
    "aten.mm.default": torch.mm,
    "aten.mul.Tensor": torch.mul,
    "aten.native_layer_norm.default": torch.native_layer_norm,
    "aten.neg.default": torch.neg,
    "aten.permute.default": torch.permute,
    "aten.relu.default": torch.relu,
    "aten.rsqrt.default": torch.rsqrt,
    "aten.select.int": torch.select,
    "aten.sigmoid.default": torch.sigmoid,
    "aten.sum.dim_IntList": torch.sum,
    "aten.t.default": torch.t,
    "aten.tanh.default": torch.tanh,
    "aten.transpose.int": torch.transpose,
    "aten.unsqueeze.default": torch.unsqueeze,
    # Some kernels lay their result out otherwise than torch's own description of them says, and
    # such a result may have no view of the shape; it has a copy.
    "aten._unsafe_view.default": torch.reshape,
    "aten.view.default": torch.reshape,
    "aten.where.self": torch.where,
    # Without the dispatcher, which takes longer to call Python than C++.
    "steelyard.decode8.default": decode8,
    "steelyard.encode8.default": encode8,
    "steelyard.masked_scale.default": masked_scale,
}
_BINDINGS: dict[str, tuple[_Binding, frozenset[str]]] = {
    "aten.add.Tensor": (torch.add, frozenset({"alpha"})),
    "aten.sub.Tensor": (torch.sub, frozenset({"alpha"})),
    "aten.addmm.default": (torch.addmm, frozenset({"beta", "alpha"})),
    "aten.clone.default": (torch.clone, frozenset({"memory_format"})),
    "aten.empty_like.default": (torch.empty_like, frozenset({"dtype"})),
    **{op: (binding, frozenset()) for op, binding in _PLAIN.items()},
}


# Where the next result may be made, if there is room.
Room = Callable[[], torch.Tensor | None]


def made_in(room: Room, node: Node) -> Callable[..., Any]:
    """Carries the node out where ``room`` says, and as ever where there is none."""
    plainly = quickest(node)
    op, keyword = WRITING[node.op]
    writing = _torch.builtin_of(operator_named(op))
    (planned,) = node.outputs

    def make(*args: Any, **kwargs: Any) -> Any:
        place = room()
        if place is None:
            return plainly(*args, **kwargs)
        return writing(*args, **kwargs, **{keyword: place.view(planned.shape)})

    return make


def quickest(node: Node) -> Callable[..., Any]:
    if node.body is not None:
        return callable_of(node)
    binding, keywords = _BINDINGS.get(node.op, (None, frozenset[str]()))
    if binding is not None and keywords.issuperset(key for key, _ in node.kwargs):
        return binding
    return _torch.builtin_of(operator_named(node.op))
