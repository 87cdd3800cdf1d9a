"""How calls act on some of the columns of their arguments: what has them in its last dim, however
its leading dims are named. Not for rows: see row_rules.py.
"""

from collections.abc import Callable
from dataclasses import replace

from steelyard.ir.graph import Graph, Node, Symbol

IsPointwise = Callable[[str], bool]
_RESHAPES = ("aten.view.default", "aten._unsafe_view.default", "aten.reshape.default")
_COPIES = ("aten.clone.default", "aten._to_copy.default")
_PLAIN_LAYOUTS = ("torch.preserve_format", "torch.contiguous_format")


def in_columns(
    graph: Graph, node: Node, *, columns: int, is_pointwise: IsPointwise
) -> dict[str, bool] | None:
    """By input, whether a slice of the result takes some columns of it, or all that there is; None
    where the result is not made column by column."""
    is_reshaped = node.op in _RESHAPES
    layout = dict(node.kwargs).get("memory_format")
    if (
        not (is_reshaped or node.op in _COPIES or is_pointwise(node.op))
        or node.is_random
        or node.mutates
        or len(node.outputs) != 1
        or (isinstance(layout, Symbol) and layout.text not in _PLAIN_LAYOUTS)
    ):
        return None
    (made,) = node.outputs
    if not made.is_contiguous or made.pending or made.shape[-1:] != (columns,):
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
    """The same call on so many columns: sizes that count them are others."""
    if node.op not in _RESHAPES:
        return node
    return replace(node, args=(node.args[0], (*node.outputs[0].shape[:-1], count)))
