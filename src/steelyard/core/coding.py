"""A value written down in 8 bits and read back: the two calls as nodes, and what they hold.

Blocks of elements in memory order share one scale. Not for carrying it out: see operators.py.
"""

from dataclasses import dataclass

from steelyard.core.graph import Graph, Node, Phase, Ref, Role, Storage, Symbol, Tensor

# One scale of four bytes for so many elements: 1.6 % on top of the codes.
BLOCK = 256
ENCODE, DECODE = "steelyard.encode8.default", "steelyard.decode8.default"
_DTYPES = frozenset({"float32", "bfloat16", "float16"})


def coded_bytes(numel: int) -> int:
    """Codes, and before them the scales."""
    return 4 * -(-numel // BLOCK) + numel


def can_be_coded(tensor: Tensor) -> bool:
    """Floating point in up to 32 bits, each element at a place of its own and no gap between."""
    extents = sorted((step, size) for size, step in zip(tensor.shape, tensor.stride) if size > 1)
    dense = 1
    for step, size in extents:
        if step != dense:
            return False
        dense *= size
    return tensor.dtype in _DTYPES and not tensor.pending


@dataclass(frozen=True, slots=True, kw_only=True)
class Coding:
    """The two calls for one value, and the storage that lies between them."""

    value: str
    storage: Storage
    encode: Node
    decode: Node

    @classmethod
    def of(cls, graph: Graph, value: str, *, number: int) -> "Coding":
        """``number`` is that of the storage between, which the graph is to get."""
        node = graph.by_name[value]
        (tensor,) = node.outputs
        nbytes = coded_bytes(tensor.numel)
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
