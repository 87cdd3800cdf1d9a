"""A value written down in 8 bits and read back: the two calls as nodes, and what they hold.

Blocks of elements in memory order share one scale. Not for carrying it out: see operators.py.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from steelyard.ir.graph import Graph, Node, Phase, Ref, Role, Storage, Symbol, Tensor

# One scale of four bytes for so many elements: 1.6 % on top of the codes.
BLOCK = 256
ENCODE, DECODE = "steelyard.encode8.default", "steelyard.decode8.default"
_DTYPES = frozenset({"float32", "bfloat16", "float16"})


def coded_bytes(numel: int, *, dims: int) -> int:
    """Strides, then scales, then codes."""
    return 8 * dims + 4 * -(-numel // BLOCK) + numel


def is_dense(size: Sequence[int], stride: Sequence[int]) -> bool:
    """Each element at a place of its own, and no gap between."""
    dense = 1
    for step, count in sorted((step, count) for count, step in zip(size, stride) if count > 1):
        if step != dense:
            return False
        dense *= count
    return True


def can_be_coded(tensor: Tensor) -> bool:
    """Floating point in up to 32 bits, and nothing put off to whoever reads it."""
    is_floating = tensor.dtype in _DTYPES and not tensor.pending
    return is_floating and is_dense(tensor.shape, tensor.stride)


def chooses(graph: Graph, node: Node) -> bool:
    """Whether it makes indices or a mask of floating-point values: on others, it would make others.

    Signs are kept in 8 bits, and may be asked for. What draws numbers is never called again.
    """
    of_sign = node.op in _OF_SIGNS and len(node.args) > 1 and node.args[1] == 0
    if of_sign or node.is_random or _OF_FORM.match(node.op):
        return False
    read = (t for name in node.inputs for t in graph.by_name[name].outputs)
    is_float = any("float" in t.dtype for t in read)
    return is_float and any("float" not in t.dtype for t in node.outputs)


# What looks at the shape of its argument and at none of its elements: empty_like, new_zeros.
_OF_FORM = re.compile(r"aten\.(\w+_like|new_\w+)\.")
_OF_SIGNS = frozenset(f"aten.{name}.Scalar" for name in ("eq", "ne", "lt", "le", "gt", "ge"))


def chosen_by(graph: Graph) -> frozenset[str]:
    """The values that some operator chooses by, itself or by way of a look."""
    found: set[str] = set()
    for node in reversed(graph.nodes):
        if chooses(graph, node) or (node.name in found and graph.is_look(node)):
            found.update(node.inputs)
    return frozenset(found)


def settled(graph: Graph) -> frozenset[str]:
    """What is not to be made of other values than in the forward pass: what some operator chooses
    by, and what it makes of that."""
    choosing = {node.name for node in graph.nodes if chooses(graph, node)}
    results = {n.name for n in graph.nodes if n.is_getitem and n.inputs[0] in choosing}
    return chosen_by(graph) | choosing | results


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizedActivation:
    """The two calls for one value, and the storage that lies between them."""

    value: str
    storage: Storage
    encode: Node
    decode: Node

    @classmethod
    def of(cls, graph: Graph, value: str, *, number: int) -> "QuantizedActivation":
        """``number`` is that of the storage between, which the graph is to get."""
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
            # Not of the forward pass: whatever names or counts that sees the step as captured.
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
        held = Storage(nbytes=nbytes, role=Role.ACTIVATION)
        return cls(value=value, storage=held, encode=encode, decode=decode)
