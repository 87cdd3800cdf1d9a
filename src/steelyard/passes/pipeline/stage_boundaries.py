"""Chooses the boundaries of pipeline stages: possible ends, and the most balanced ones.

Not for splitting the graph: see capture/pipeline_stages.py.
"""

from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise

from steelyard.ir.graph import Graph, Node, OutputKind, Phase

# In a model with more modules than this, the innermost ones are not considered.
_MOST = 128


def possible_ends(graph: Graph) -> tuple[str, ...]:
    """Return the modules after which a stage may end, in the order of the forward pass.

    Of several modules that end at the same node, only the outermost is returned.
    """
    (loss,) = (graph.position[o.node] for o in graph.outputs if o.kind is OutputKind.LOSS)
    last: dict[str, int] = {}
    for node in graph.forward():
        path = node.path
        while path and not node.is_free:
            last[path] = graph.position[node.name]
            path = path.rpartition(".")[0]
    by_depth = sorted(last, key=lambda path: (path.count("."), last[path]))
    outermost = {last[path]: path for path in reversed(by_depth) if last[path] < loss}
    outermost_ends = [path for path in by_depth if outermost.get(last[path]) == path][:_MOST]
    return tuple(sorted(outermost_ends, key=last.__getitem__))


def balanced_ends(
    graph: Graph,
    count: int,
    *,
    weight: Callable[[Node], float],
    handing: Callable[[int], float],
) -> tuple[str, ...]:
    """Return the stage ends that minimise the weight of the heaviest of ``count`` stages.

    The weight of a stage includes sending and receiving its boundary values (``handing``), and the
    backward pass of its modules. The result is empty if there are too few modules.
    """
    ends = possible_ends(graph)
    if len(ends) < count - 1:
        return ()
    nodes = list(graph.forward())
    weights = _weights(graph, nodes, weight)
    place = {path: max(i for i, n in enumerate(nodes) if _is_in(n, path)) for path in ends}
    crossing = _crossing(graph, nodes)
    so_far = [0.0, *accumulate(weights)]
    # The cumulative weight before each end; the last entry is that before the loss.
    at = [0.0, *(so_far[place[path] + 1] for path in ends), so_far[-1]]
    hands = [0.0, *(handing(crossing[place[path]]) for path in ends), 0.0]
    chosen = _lightest(at, hands, count)
    return tuple(ends[index - 1] for index in chosen)


def _is_in(node: Node, path: str) -> bool:
    return not node.is_free and (node.path == path or node.path.startswith(f"{path}."))


def _weights(graph: Graph, nodes: Sequence[Node], weight: Callable[[Node], float]) -> list[float]:
    forward: dict[str, float] = {}
    backward: dict[str, float] = {}
    for node in graph.nodes:
        side = forward if node.phase is Phase.FORWARD else backward
        side[node.path] = side.get(node.path, 0.0) + weight(node)
    return [
        weight(n) * (1 + backward.get(n.path, 0.0) / forward[n.path]) if forward[n.path] else 0.0
        for n in nodes
    ]


def _crossing(graph: Graph, nodes: Sequence[Node]) -> list[int]:
    """Return, for each forward node, the bytes that a stage ending after it would send on."""
    resident = {t.storage for node in graph.inputs() for t in node.outputs}
    made: dict[int, int] = {}
    read: dict[int, int] = {}
    for index, node in enumerate(nodes):
        for storage in graph.storages_of(node.name):
            made.setdefault(storage, index)
        for name in node.inputs:
            read.update(dict.fromkeys(graph.storages_of(name), index))
    change = [0] * (len(nodes) + 1)
    for storage, last in read.items():
        if storage in made and storage not in resident:
            change[made[storage]] += graph.storages[storage].nbytes
            change[last] -= graph.storages[storage].nbytes
    return list(accumulate(change))


def _lightest(at: Sequence[float], hands: Sequence[float], count: int) -> list[int]:
    """Return indices into ``at`` of the inner ends of ``count`` stages (dynamic programming)."""
    last = len(at) - 1

    def stage_weight(begin: int, end: int) -> float:
        return at[end] - at[begin] + hands[begin] + hands[end]

    best: list[tuple[float, list[int]]] = [(stage_weight(0, end), []) for end in range(last + 1)]
    for stages in range(2, count + 1):
        best = [
            min(
                (
                    (max(best[mid][0], stage_weight(mid, end)), [*best[mid][1], mid])
                    for mid in range(stages - 1, end)
                ),
                default=(float("inf"), []),
            )
            for end in range(last + 1)
        ]
    chosen = best[last][1]
    assert all(a < b for a, b in pairwise(chosen))
    return chosen
