"""Runs of equal sibling blocks: which indices of a ModuleList may share one rule.

Equal is what was compared operator by operator, never what looks alike: Gemma's alternating layers
have the same class and shapes. Not for planning deep models from few blocks: see truncate.py.
"""

from collections.abc import Iterator

from torch import nn

from steelyard.ir.graph import BlockRun, Graph, Node, without_refs


def equal_runs(model: nn.Module, graph: Graph) -> tuple[BlockRun, ...]:
    """Maximal stretches of two or more siblings whose forward passes agree."""
    found: list[BlockRun] = []
    for prefix, count in _lists(model):
        sketches = _sketches(graph, prefix)
        start = 0
        while start < count:
            end = start + 1
            while end < count and sketches.get(end) and sketches.get(end) == sketches.get(start):
                end += 1
            if end - start > 1:
                found.append(BlockRun(prefix=prefix, first=start, count=end - start))
            start = end
    return tuple(found)


def _lists(model: nn.Module) -> Iterator[tuple[str, int]]:
    """Containers whose children are named 0, 1, 2, ..."""
    for name, module in model.named_modules():
        children = [child for child, _ in module.named_children()]
        if len(children) > 1 and children == [str(i) for i in range(len(children))]:
            yield name, len(children)


def _sketches(graph: Graph, prefix: str) -> dict[int, tuple[str, ...]]:
    """Each block's nodes, without names: operator, module inside the block, layout, arguments."""
    sketches: dict[int, list[str]] = {}
    head = f"{prefix}." if prefix else ""
    for node in graph.forward():
        if not node.path.startswith(head):
            continue
        index, _, inside = node.path[len(head) :].partition(".")
        if index.isdigit():
            sketches.setdefault(int(index), []).append(sketch(node, inside))
    return {index: tuple(sorted(lines)) for index, lines in sketches.items()}


def sketch(node: Node, inside: str) -> str:
    """A node without its name: what must agree for two blocks to be called equal."""
    layouts = [(t.shape, t.stride, t.dtype) for t in node.outputs]
    plain = without_refs((*node.args, *(a for _, a in node.kwargs)))
    return f"{node.phase}|{inside}|{node.op}|{node.nth}|{layouts}|{plain}"
