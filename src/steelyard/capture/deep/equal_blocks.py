"""Finds runs of equal sibling blocks: indices of a ModuleList that one rule may cover.

Blocks are compared operator by operator, because class and shapes are not enough: Gemma's
alternating layers agree in both. Not for planning deep models from few blocks: see truncate.py.
"""

from collections.abc import Iterator

from torch import nn

from steelyard.ir.graph import BlockRun, Graph, Node, without_refs


def equal_runs(model: nn.Module, graph: Graph) -> tuple[BlockRun, ...]:
    """Return the maximal runs of two or more siblings whose forward passes are equal."""
    found: list[BlockRun] = []
    for prefix, count in _block_lists(model):
        descriptions = _block_descriptions(graph, prefix)
        start = 0
        while start < count:
            end = start + 1
            while (
                end < count
                and descriptions.get(end)
                and descriptions.get(end) == descriptions.get(start)
            ):
                end += 1
            if end - start > 1:
                found.append(BlockRun(prefix=prefix, first=start, count=end - start))
            start = end
    return tuple(found)


def _block_lists(model: nn.Module) -> Iterator[tuple[str, int]]:
    """Yield each container whose children are named 0, 1, 2, ..., with their number."""
    for name, module in model.named_modules():
        children = [child for child, _ in module.named_children()]
        if len(children) > 1 and children == [str(i) for i in range(len(children))]:
            yield name, len(children)


def _block_descriptions(graph: Graph, prefix: str) -> dict[int, tuple[str, ...]]:
    """Describe the nodes of each block: operator, module within the block, layouts, arguments."""
    descriptions: dict[int, list[str]] = {}
    head = f"{prefix}." if prefix else ""
    for node in graph.forward():
        if not node.path.startswith(head):
            continue
        index, _, inside = node.path[len(head) :].partition(".")
        if index.isdigit():
            descriptions.setdefault(int(index), []).append(describe_node(node, inside))
    return {index: tuple(sorted(lines)) for index, lines in descriptions.items()}


def describe_node(node: Node, inside: str) -> str:
    """Describe a node without its name; equal blocks have equal descriptions."""
    layouts = [(t.shape, t.stride, t.dtype) for t in node.outputs]
    plain = without_refs((*node.args, *(a for _, a in node.kwargs)))
    return f"{node.phase}|{inside}|{node.op}|{node.nth}|{layouts}|{plain}"
