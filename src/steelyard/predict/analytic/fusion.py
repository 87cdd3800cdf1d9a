"""Kernel fusion: the calls of a step that a fusing compiler runs as one kernel, and their traffic.

A kernel reads values made outside of it and writes values read outside of it. The backward pass
counts as outside, so saved activations are written. Not for a kernel's seconds: see roofline.py.
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
    """The groups of calls that run as one kernel, by name, for any size of tensors.

    ``makers`` maps each value to the calls that computed it, ``readers`` maps each storage to the
    calls that read it.
    """

    groups: tuple[tuple[str, ...], ...]
    makers: Mapping[str, frozenset[str]]
    readers: Mapping[int, set[str]]

    def kernels(self, graph: Graph) -> tuple[FusedKernel, ...]:
        """Return the kernels of all calls that cost something."""
        found = []
        for group in self.groups:
            nodes = tuple(graph.by_name[name] for name in group)
            moved = nodes[0].moved_bytes
            if len(nodes) > 1:
                moved = _read_bytes(graph, nodes, self.makers) + _written_bytes(nodes, self.readers)
            found.append(FusedKernel(nodes=nodes, moved_bytes=moved))
        return tuple(found)


def fused(graph: Graph, place: Callable[[Node], Hashable]) -> tuple[FusedKernel, ...]:
    """Return the kernels of all calls that cost something; calls are fused only within one
    ``place``.
    """
    return fusing(graph, place).kernels(graph)


def fusing(graph: Graph, place: Callable[[Node], Hashable]) -> Fusing:
    makers = _makers(graph)
    fusible = {n.name for n in graph.nodes if preserves_numel(graph, n)}
    depth = _depths(graph, fusible, place)
    kernel_of: dict[str, list[str]] = {}
    for node in graph.nodes:
        if node.is_free or is_allocation(node):
            continue
        mine = kernel_of[node.name] = [node.name]
        # If both have the same depth and place, no call between them is outside of the kernel.
        for name in node.inputs if node.name in fusible else ():
            for maker in makers[name] & fusible:
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
    """True if the node only allocates: it launches no kernel, and nothing reads its contents."""
    return node.op.partition(".")[2].startswith(("empty", "new_empty"))


def preserves_numel(graph: Graph, node: Node) -> bool:
    """True if a node is pointwise or works along rows.

    Such a node returns as many elements as it reads, and is not a product.
    """
    alone = node.flops or node.collective or node.waits_for or node.body or node.mutates
    if node.is_free or alone or is_allocation(node):
        return False
    taken = [t.numel for name in node.inputs for t in graph.by_name[name].outputs]
    given = [t.numel for t in node.outputs]
    return bool(taken and given) and max(taken) == max(given)


def _makers(graph: Graph) -> dict[str, frozenset[str]]:
    """Map each value to the calls that computed it; views and unpacked tuples are followed back."""
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
    graph: Graph, fusible: set[str], place: Callable[[Node], Hashable]
) -> dict[str, tuple[Hashable, int]]:
    """Return the place and the depth of each value.

    The depth grows with each call that cannot be fused, and with each change of place.
    """
    found: dict[str, tuple[Hashable, int]] = {}
    for node in graph.nodes:
        here = place(node)
        if node.is_free and not node.is_input:
            found[node.name] = max((found[i] for i in node.inputs), key=_second, default=(here, 0))
            continue
        before = [found[i][1] + (found[i][0] != here) for i in node.inputs]
        found[node.name] = here, max(before, default=0) + (node.name not in fusible)
    return found


def _second(pair: tuple[Hashable, int]) -> int:
    return pair[1]


def _readers(graph: Graph) -> dict[int, set[str]]:
    """Map each storage to its readers.

    Outputs of the step have the reader ``""``, which is in no kernel.
    """
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
