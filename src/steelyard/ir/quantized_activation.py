"""Activations quantized to 8 bits: the encode and decode nodes, and the bytes they need.

Blocks of elements in memory order share one scale. Not for executing the calls: see operators/.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from steelyard.ir.graph import Graph, Node, Phase, Ref, Role, Storage, Symbol, Tensor

# One scale of four bytes per block: 1.6 % in addition to the codes.
BLOCK = 256
ENCODE, DECODE = "steelyard.encode8.default", "steelyard.decode8.default"
_DTYPES = frozenset({"float32", "bfloat16", "float16"})


def coded_bytes(numel: int, *, dims: int) -> int:
    """Return the bytes of an encoded tensor: strides, scales, codes."""
    return 8 * dims + 4 * -(-numel // BLOCK) + numel


def is_dense(size: Sequence[int], stride: Sequence[int]) -> bool:
    """True if the elements neither overlap nor leave gaps."""
    expected = 1
    for step, count in sorted((step, count) for count, step in zip(size, stride) if count > 1):
        if step != expected:
            return False
        expected *= count
    return True


def can_be_coded(tensor: Tensor) -> bool:
    """True for dense floating-point tensors of up to 32 bits without pending lazy operations."""
    is_floating = tensor.dtype in _DTYPES and not tensor.pending
    return is_floating and is_dense(tensor.shape, tensor.stride)


def chooses(graph: Graph, node: Node) -> bool:
    """True if the node makes indices or a mask from floating-point values.

    Inexact inputs could change these. Comparisons with zero are exempt, because 8 bits preserve
    signs. Random operators are exempt, because they are never called again.
    """
    is_sign_test = node.op in _COMPARISONS and len(node.args) > 1 and node.args[1] == 0
    if is_sign_test or node.is_random or _SHAPE_ONLY.match(node.op):
        return False
    read = (t for name in node.inputs for t in graph.by_name[name].outputs)
    is_float = any("float" in t.dtype for t in read)
    return is_float and any("float" not in t.dtype for t in node.outputs)


# Operators that read only the shape of their argument: empty_like, new_zeros.
_SHAPE_ONLY = re.compile(r"aten\.(\w+_like|new_\w+)\.")
_COMPARISONS = frozenset(f"aten.{name}.Scalar" for name in ("eq", "ne", "lt", "le", "gt", "ge"))


def chosen_by(graph: Graph) -> frozenset[str]:
    """Return the values on which some operator bases a choice, directly or through a view."""
    found: set[str] = set()
    for node in reversed(graph.nodes):
        if chooses(graph, node) or (node.name in found and graph.is_alias(node)):
            found.update(node.inputs)
    return frozenset(found)


def settled(graph: Graph) -> frozenset[str]:
    """Return the values that must not be recomputed from inexact inputs.

    These are the values on which operators base a choice, those operators, and their results.
    """
    choosing = {node.name for node in graph.nodes if chooses(graph, node)}
    results = {n.name for n in graph.nodes if n.is_getitem and n.inputs[0] in choosing}
    return chosen_by(graph) | choosing | results


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizedActivation:
    """The encode and decode calls for one value, and the storage between them."""

    value: str
    storage: Storage
    encode: Node
    decode: Node

    @classmethod
    def of(cls, graph: Graph, value: str, *, number: int) -> "QuantizedActivation":
        """Return the calls; ``number`` is the index that the graph will give to the storage."""
        node = graph.by_name[value]
        (tensor,) = node.outputs
        nbytes = coded_bytes(tensor.numel, dims=len(tensor.shape))
        coded = Tensor(shape=(nbytes,), stride=(1,), dtype="uint8", storage=number)
        like = f"{tensor.dtype}{list(tensor.shape)};{list(tensor.stride)}"
        encode = Node(
            name=f"{value}.coded",
            op=ENCODE,
            args=(Ref(value), tensor.stride),
            inputs=(value,),
            outputs=(coded,),
            # Marked as part of the backward pass: code that names or counts forward nodes must see
            # the step as it was captured.
            phase=Phase.BACKWARD,
            path=node.path,
            line=node.line,
            signature=f"{ENCODE}({like})",
            moved_bytes=tensor.nbytes + nbytes,
        )
        decode = Node(
            name=f"{value}.decoded",
            op=DECODE,
            args=(
                Ref(encode.name),
                tensor.shape,
                tensor.stride,
                Symbol(f"torch.{tensor.dtype}"),
            ),
            inputs=(encode.name,),
            outputs=node.outputs,
            phase=Phase.BACKWARD,
            path=node.path,
            line=node.line,
            signature=f"{DECODE}({like})",
            moved_bytes=tensor.nbytes + nbytes,
        )
        storage = Storage(nbytes=nbytes, role=Role.ACTIVATION)
        return cls(value=value, storage=storage, encode=encode, decode=decode)
