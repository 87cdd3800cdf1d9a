"""What one kernel of a stack takes on a declared device, from what it computes and what it moves.

A product's time is that of its FLOPs and that of its bytes, one after the other: the share of the
peak that it reaches rises with its arithmetic intensity, as S I / (I + S P / (B W)) of a peak P and
a bandwidth W of which shares S and B are reached, and half of S where both take as long. (Williams,
Waterman and Patterson, "Roofline", CACM 52(4), 2009, bound it by the larger of the two.)
Not for which calls make a kernel: see fusion.py.
"""

from steelyard.hardware.software_stack import SoftwareStack
from steelyard.ir.graph import Node
from steelyard.predict.analytic.fusion import FusedKernel
from steelyard.predict.cost_table import CostTable

_ATTENTION = "aten._scaled_dot_product_"
# Rows of queries that a kernel of attention holds while all keys and values pass by: FlashAttention
# and FlashAttention-2 (Dao et al., 2022 and 2023), and Triton's.
_QUERIES = 128
_ITEM_BYTES = 2


def kernel_seconds(kernel: FusedKernel, costs: CostTable, stack: SoftwareStack | None) -> float:
    """Without a stack, what the costs say of each call."""
    if stack is None:
        return sum(costs.seconds(node).value for node in kernel.nodes)
    device, node = costs.device, kernel.nodes[0]
    if node.waits_for:
        return 0.0  # one stream waits for another
    bandwidth = stack.bandwidth_share * device.bytes_per_second
    calling = device.call_seconds if stack.call_seconds is None else stack.call_seconds
    if node.collective is not None:
        return calling  # what it reads and writes is in what its link takes
    seconds = (kernel.moved_bytes + _passing_bytes(node)) / bandwidth
    if node.flops:
        share = stack.peak_share * (stack.attention_share if _is_attention(node) else 1)
        seconds += computed_flops(node) / (share * device.flops_in(node.product_format))
    # While one runs, the next is called.
    return max(calling, seconds)


def computed_flops(node: Node) -> float:
    """Kernels of attention leave out blocks that a causal mask hides, but not parts of them."""
    if not _is_attention(node) or True not in node.args:
        return node.flops
    queries = node.outputs[0].shape[-2]
    return node.flops * min(1.0, (1 + _QUERIES / queries) / 2)


def _is_attention(node: Node) -> bool:
    return node.op.startswith(_ATTENTION)


def _passing_bytes(node: Node) -> float:
    """Keys and values, read again for each block of queries. The scores are not moved."""
    return computed_flops(node) / (2 * _QUERIES) * _ITEM_BYTES if _is_attention(node) else 0.0
