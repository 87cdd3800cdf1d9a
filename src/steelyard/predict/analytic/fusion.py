"""Which calls of a step a stack that fuses runs as one kernel, and what such a kernel moves.

It moves what was made outside and is read in it, and what is made in it and read outside: by the
backward pass too, so that what is kept is written. Not for what that takes: see roofline.py.
"""

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from steelyard.ir.graph import Graph, Node


@dataclass(frozen=True, slots=True, kw_only=True)
class FusedKernel:
    nodes: tuple[Node, ...]
    moved_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Fusing:
    """Which calls of a graph run as one, by their names: the same however large its tensors are.

    ``makers`` are of each value the calls that computed it, ``readers`` of each storage the calls
    that read it.
    """

    groups: tuple[tuple[str, ...], ...]
    makers: Mapping[str, frozenset[str]]
    readers: Mapping[int, set[str]]

    def kernels(self, graph: Graph) -> tuple[FusedKernel, ...]:
        """All calls that cost something."""
        found = []
        for group in self.groups:
            nodes = tuple(graph.by_name[name] for name in group)
            moved = nodes[0].moved_bytes
            if len(nodes) > 1:
                moved = _read_bytes(graph, nodes, self.makers) + _written_bytes(nodes, self.readers)
            found.append(FusedKernel(nodes=nodes, moved_bytes=moved))
        return tuple(found)


def fused(graph: Graph, place: Callable[[Node], Hashable]) -> tuple[FusedKernel, ...]:
    """All calls of the graph that cost something; none is fused with one of another place."""
    return fusing(graph, place).kernels(graph)


def fusing(graph: Graph, place: Callable[[Node], Hashable]) -> Fusing:
    makers = _makers(graph)
    even = {n.name for n in graph.nodes if is_even(graph, n)}
    depth = _depths(graph, even, place)
    kernel_of: dict[str, list[str]] = {}
    for node in graph.nodes:
        if node.is_free or is_allocation(node):
            continue
        mine = kernel_of[node.name] = [node.name]
        # Of one depth and place: nothing that is not of the kernel lies between them.
        for name in node.inputs if node.name in even else ():
            for maker in makers[name] & even:
                theirs = kernel_of[maker]
                if theirs is mine or depth[maker] != depth[node.name]:
                    continue
                theirs.extend(mine)
                kernel_of.update(dict.fromkeys(mine, theirs))
                mine = theirs
    groups = {id(names): tuple(names) for names in kernel_of.values()}
    return Fusing(groups=tuple(groups.values()), makers=makers, readers=_readers(graph))


def unfused(nodes: Iterable[Node]) -> tuple[FusedKernel, ...]:
    return tuple(FusedKernel(nodes=(n,), moved_bytes=n.moved_bytes) for n in nodes if not n.is_free)


def is_allocation(node: Node) -> bool:
    """It launches no kernel, and nothing is read of what it gives."""
    return node.op.partition(".")[2].startswith(("empty", "new_empty"))


def is_even(graph: Graph, node: Node) -> bool:
    """It gives as many elements as it takes, and is no product: pointwise, or along rows."""
    alone = node.flops or node.collective or node.waits_for or node.body or node.mutates
    if node.is_free or alone or is_allocation(node):
        return False
    taken = [t.numel for name in node.inputs for t in graph.by_name[name].outputs]
    given = [t.numel for t in node.outputs]
    return bool(taken and given) and max(taken) == max(given)


def _makers(graph: Graph) -> dict[str, frozenset[str]]:
    """Of each value the calls that computed it, seen through views and tuples taken apart."""
    found: dict[str, frozenset[str]] = {}
    for node in graph.nodes:
        through = node.is_free and not node.is_input
        found[node.name] = (
            frozenset().union(*(found[i] for i in node.inputs))
            if through
            else frozenset((node.name,))
        )
    return found


def _depths(
    graph: Graph, even: set[str], place: Callable[[Node], Hashable]
) -> dict[str, tuple[Hashable, int]]:
    """Further with each call that is not fused, and from place to place."""
    found: dict[str, tuple[Hashable, int]] = {}
    for node in graph.nodes:
        here = place(node)
        if node.is_free and not node.is_input:
            found[node.name] = max((found[i] for i in node.inputs), key=_second, default=(here, 0))
            continue
        before = [found[i][1] + (found[i][0] != here) for i in node.inputs]
        found[node.name] = here, max(before, default=0) + (node.name not in even)
    return found


def _second(pair: tuple[Hashable, int]) -> int:
    return pair[1]


def _readers(graph: Graph) -> dict[int, set[str]]:
    """By storage. What leaves the step is read by nobody in it, and for good."""
    found: dict[int, set[str]] = defaultdict(set)
    for node in graph.nodes:
        for name in node.inputs if not node.is_free else ():
            for storage in graph.storages_of(name):
                found[storage].add(node.name)
    for output in graph.outputs:
        for storage in graph.storages_of(output.node):
            found[storage].add("")
    return found


def _read_bytes(graph: Graph, nodes: Sequence[Node], makers: Mapping[str, frozenset[str]]) -> int:
    inside = {n.name for n in nodes}
    read: dict[int, int] = {}
    for node in nodes:
        for name in node.inputs:
            made = makers[name]
            if made <= inside or all(is_allocation(graph.by_name[m]) for m in made):
                continue
            for tensor in graph.by_name[name].outputs:
                read[tensor.storage] = max(read.get(tensor.storage, 0), tensor.nbytes)
    return sum(read.values())


def _written_bytes(nodes: Sequence[Node], readers: Mapping[int, set[str]]) -> int:
    inside = {n.name for n in nodes}
    return sum(
        tensor.nbytes
        for node in nodes
        for tensor in node.outputs
        if readers[tensor.storage] - inside
    )
