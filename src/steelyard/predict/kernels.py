"""What one kernel of a stack takes on a declared device, from what it computes and what it moves.

A product's time is that of its FLOPs and that of its bytes, one after the other: the share of the
peak that it reaches rises with its arithmetic intensity, as S I / (I + S P / (B W)) of a peak P and
a bandwidth W of which shares S and B are reached, and half of S where both take as long. (Williams,
Waterman and Patterson, "Roofline", CACM 52(4), 2009, bound it by the larger of the two.)
Not for which calls make a kernel: see fused.py.
"""

from steelyard.core.costs import Costs
from steelyard.core.graph import Node
from steelyard.core.stack import Stack
from steelyard.predict.fused import Kernel

_ATTENTION = "aten._scaled_dot_product_"
_ITEM_BYTES = 2


def kernel_seconds(kernel: Kernel, costs: Costs, stack: Stack | None) -> float:
    """Without a stack, what the costs say of each call."""
    if stack is None:
        return sum(costs.seconds(node).value for node in kernel.nodes)
    device = costs.device
    first = kernel.nodes[0]
    seconds = kernel.moved_bytes / (stack.bandwidth_share * device.bytes_per_second)
    if first.flops:
        dtype = first.outputs[0].dtype
        rate = stack.peak_share * device.flops_in(dtype)
        seconds += computed_flops(first) / rate
        seconds += _tile_bytes(first) / (stack.bandwidth_share * device.bytes_per_second)
    return device.call_seconds + seconds


def computed_flops(node: Node) -> float:
    """Kernels of attention leave out what a causal mask hides."""
    return node.flops / 2 if node.op.startswith(_ATTENTION) and True in node.args else node.flops


def _tile_bytes(node: Node) -> float:
    """What the products inside a kernel of attention hand on, as if it left the chip: they are no
    denser than a head is wide. The scores themselves are not moved.
    """
    if not node.op.startswith(_ATTENTION):
        return 0.0
    width = node.outputs[0].shape[-1]
    return computed_flops(node) / (2 * width) * _ITEM_BYTES
