"""Finds values to be sent that their operator can write directly into the shared send buffer.

Not for the memory itself: see comm/shared_memory/slots.py.
"""

from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType

from steelyard.ir.graph import Graph, Node, Tensor

_OUT = (
    "_softmax.default", "add.Tensor", "addcmul.default", "addmm.default", "avg_pool2d.default",
    "baddbmm.default", "bmm.default", "cat.default", "div.Tensor", "elu.default", "erf.default",
    "exp.default", "gelu.default", "hardswish.default", "hardtanh.default", "leaky_relu.default",
    "maximum.default", "mean.dim", "mm.default", "mul.Tensor", "neg.default", "rsqrt.default",
    "sigmoid.default", "silu.default", "sqrt.default", "sub.Tensor", "tanh.default",
)  # fmt: skip
_GRAD_INPUT = (
    "avg_pool2d_backward", "elu_backward", "gelu_backward", "leaky_relu_backward",
    "sigmoid_backward", "silu_backward", "tanh_backward", "threshold_backward",
)  # fmt: skip
# Maps an operator to its out variant and to the keyword for the output. It contains only operators
# of torch 2.13 whose CPU kernels write into the output directly; others copy their result into it
# (tests/torch/test_private_names.py).
WRITING: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        **{f"aten.{op}": (f"aten.{op.partition('.')[0]}.out", "out") for op in _OUT},
        **{f"aten.{op}.default": (f"aten.{op}.grad_input", "grad_input") for op in _GRAD_INPUT},
        "aten._softmax_backward_data.default": ("aten._softmax_backward_data.out", "grad_input"),
        "aten.pow.Tensor_Scalar": ("aten.pow.Tensor_Scalar_out", "out"),
        "aten.sum.dim_IntList": ("aten.sum.IntList_out", "out"),
        "aten.where.self": ("aten.where.self_out", "out"),
    }
)


def written_in_place(part: Graph, sent: Sequence[str], *, kept: Collection[str]) -> dict[str, str]:
    """Map each value of ``sent`` that can be written in place to the node that writes it.

    No other input or output may share its storage, because the memory is reused for another message
    once the other rank has read it.
    """
    found = {}
    for value in sent:
        if value not in part.by_name or value in kept:
            continue
        others = {node.name for node in part.inputs()} | {output.node for output in part.outputs}
        others_storages = {s for name in others - {value} for s in part.storages_of(name)}
        maker = _maker(part, part.by_name[value])
        if maker is not None and others_storages.isdisjoint(part.storages_of(value)):
            found[value] = maker
    return found


def _maker(part: Graph, value: Node) -> str | None:
    if len(value.outputs) != 1:
        return None
    (storage,) = part.storages_of(value.name)
    makers = [n for n in part.nodes if not n.is_view and storage in part.storages_of(n.name)]
    if len(makers) != 1:
        return None
    (maker,) = makers
    nbytes = part.storages[storage].nbytes
    if maker.op not in WRITING or maker.body is not None or len(maker.outputs) != 1:
        return None
    (made,), (sent,) = maker.outputs, value.outputs
    fills = _is_whole(made, nbytes) and _is_whole(sent, nbytes)
    return maker.name if fills and made.dtype == sent.dtype else None


def _is_whole(tensor: Tensor, nbytes: int) -> bool:
    return tensor.is_contiguous and not tensor.pending and tensor.nbytes == nbytes
