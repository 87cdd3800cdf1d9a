"""Seconds of one kernel on a declared device, from its FLOPs and the bytes that it moves.

The time of a product is that of its FLOPs plus that of its bytes. Let P be the peak, W the
bandwidth, and S and B the shares of them that are reached. At arithmetic intensity I, a product
then reaches the share S I / (I + S P / (B W)) of the peak, which is half of S if FLOPs and bytes
take equally long. (Williams, Waterman and Patterson, "Roofline", CACM 52(4), 2009, take the larger
of the two times instead.) Not for grouping calls into kernels: see fusion.py.
"""

from steelyard.hardware.software_stack import SoftwareStack
from steelyard.ir.graph import Node
from steelyard.predict.analytic.fusion import FusedKernel
from steelyard.predict.cost_table import CostTable

_ATTENTION = "aten._scaled_dot_product_"
# The number of rows of queries for which an attention kernel streams all keys and values once:
# FlashAttention and FlashAttention-2 (Dao et al., 2022 and 2023), and Triton's kernel.
_QUERIES = 128
_ITEM_BYTES = 2


def kernel_seconds(kernel: FusedKernel, costs: CostTable, stack: SoftwareStack | None) -> float:
    """Return the seconds of a kernel; without a software stack, the sum of the costs of its
    calls.
    """
    if stack is None:
        return sum(costs.seconds(node).value for node in kernel.nodes)
    device, node = costs.device, kernel.nodes[0]
    if node.waits_for:
        return 0.0  # one stream waits for another
    bandwidth = stack.bandwidth_share * device.bytes_per_second
    call_seconds = device.call_seconds if stack.call_seconds is None else stack.call_seconds
    if node.collective is not None:
        return call_seconds  # its memory traffic is included in the link's time
    seconds = (kernel.moved_bytes + _streamed_bytes(node)) / bandwidth
    if node.flops:
        share = stack.peak_share * (stack.attention_share if _is_attention(node) else 1)
        seconds += computed_flops(node) / (share * device.flops_in(node.product_format))
    # The call overhead is hidden while the previous kernel runs.
    return max(call_seconds, seconds)


def computed_flops(node: Node) -> float:
    """Return the FLOPs that a kernel computes.

    Attention kernels skip blocks that a causal mask hides completely, but compute partly hidden
    ones.
    """
    if not _is_attention(node) or True not in node.args:
        return node.flops
    queries = node.outputs[0].shape[-2]
    return node.flops * min(1.0, (1 + _QUERIES / queries) / 2)


def _is_attention(node: Node) -> bool:
    return node.op.startswith(_ATTENTION)


def _streamed_bytes(node: Node) -> float:
    """Return the bytes of keys and values, which are read again for each block of queries.

    Attention scores cause no traffic.
    """
    return computed_flops(node) / (2 * _QUERIES) * _ITEM_BYTES if _is_attention(node) else 0.0
