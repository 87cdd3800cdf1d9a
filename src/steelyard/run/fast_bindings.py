"""Finds the fastest way to call each operator: torch's own Python binding, if it means the same.

``torch.ops`` parses its arguments against a schema at every call, which costs about as much as a
small kernel. Not for choosing the operator: see operators/.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional as F

from steelyard import _torch
from steelyard.ir.graph import Node
from steelyard.operators import callable_of, decode8, encode8, masked_scale, operator_named
from steelyard.passes.pipeline.in_place_sends import WRITING

# Public builtins that take the arguments of an overload in the same order, with exactly these
# keywords. Each is compared with its operator in tests/torch/run/test_fast_bindings.py.
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
    # Some kernels return a layout that differs from torch's shape inference. Such a result cannot
    # always be viewed in the new shape; reshape then copies it.
    "aten._unsafe_view.default": torch.reshape,
    "aten.view.default": torch.reshape,
    "aten.where.self": torch.where,
    # Called without the dispatcher, which is slower for operators in Python than for those in C++.
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


# Returns the memory into which the next result is written, or None to allocate it.
OutputBuffer = Callable[[], torch.Tensor | None]


def writing_into(buffer: OutputBuffer, node: Node) -> Callable[..., Any]:
    """Return a call that writes the node's result into ``buffer()``, or allocates it as usual if
    that is None.
    """
    allocating = fastest_call(node)
    op, keyword = WRITING[node.op]
    write_out = _torch.builtin_of(operator_named(op))
    (planned,) = node.outputs

    def call(*args: Any, **kwargs: Any) -> Any:
        memory = buffer()
        if memory is None:
            return allocating(*args, **kwargs)
        return write_out(*args, **kwargs, **{keyword: memory.view(planned.shape)})

    return call


def fastest_call(node: Node) -> Callable[..., Any]:
    """Return the fastest callable for a node's operator."""
    if node.body is not None:
        return callable_of(node)
    binding, keywords = _BINDINGS.get(node.op, (None, frozenset[str]()))
    if binding is not None and keywords.issuperset(key for key, _ in node.kwargs):
        return binding
    return _torch.builtin_of(operator_named(node.op))
