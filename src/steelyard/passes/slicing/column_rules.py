"""Rules for calls on a slice of columns (the last dim of a value), with any leading dims.

Not for rows: see row_rules.py.
"""

from dataclasses import replace

from steelyard.ir.graph import Graph, Node
from steelyard.passes.slicing.row_rules import RESHAPES, IsPointwise, unusual_layout

_COPIES = ("aten.clone.default", "aten._to_copy.default")


def in_columns(
    graph: Graph, node: Node, *, columns: int, is_pointwise: IsPointwise
) -> dict[str, bool] | None:
    """Map each input to True if a slice of the result reads only its columns, or False if all of
    it.

    None if the result cannot be computed column by column.
    """
    is_reshaped = node.op in RESHAPES
    if (
        not (is_reshaped or node.op in _COPIES or is_pointwise(node.op))
        or node.is_random
        or node.mutates
        or len(node.outputs) != 1
        or unusual_layout(node)
    ):
        return None
    (result,) = node.outputs
    if not result.is_contiguous or result.pending or result.shape[-1:] != (columns,):
        return None
    found: dict[str, bool] = {}
    for name in node.inputs:
        read = graph.by_name[name].outputs[0]
        is_spread = not read.shape or read.shape[-1] == 1
        if read.pending or not (is_spread or read.shape[-1] == columns):
            return None
        if is_reshaped and is_spread:
            return None
        found[name] = not is_spread
    return found


def on_columns(node: Node, count: int) -> Node:
    """Return the call on ``count`` columns; the size argument of a reshape is adjusted."""
    if node.op not in RESHAPES:
        return node
    return replace(node, args=(node.args[0], (*node.outputs[0].shape[:-1], count)))
