"""Where a step may be cut into the stages of a pipeline, and the cuts that make them most equal.

Not for cutting: see capture/pipeline_stages.py.
"""

from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise

from steelyard.ir.graph import Graph, Node, OutputKind, Phase

# Of a model with more modules, the inner ones are left alone.
_MOST = 128


def possible_ends(graph: Graph) -> tuple[str, ...]:
    """The modules behind which a stage may end, outermost where several end at once, in the order
    of the forward pass."""
    (loss,) = (graph.position[o.node] for o in graph.outputs if o.kind is OutputKind.LOSS)
    last: dict[str, int] = {}
    for node in graph.forward():
        path = node.path
        while path and not node.is_free:
            last[path] = graph.position[node.name]
            path = path.rpartition(".")[0]
    by_depth = sorted(last, key=lambda path: (path.count("."), last[path]))
    outermost = {last[path]: path for path in reversed(by_depth) if last[path] < loss}
    kept = [path for path in by_depth if outermost.get(last[path]) == path][:_MOST]
    return tuple(sorted(kept, key=last.__getitem__))


def balanced_ends(
    graph: Graph,
    count: int,
    *,
    weight: Callable[[Node], float],
    handing: Callable[[int], float],
) -> tuple[str, ...]:
    """The ends of ``count`` stages of which the heaviest is lightest, with what it hands on and is
    handed; none where there are too few modules.

    What the backward pass weighs counts where its module does.
    """
    ends = possible_ends(graph)
    if len(ends) < count - 1:
        return ()
    nodes = list(graph.forward())
    weights = _weights(graph, nodes, weight)
    place = {path: max(i for i, n in enumerate(nodes) if _is_in(n, path)) for path in ends}
    crossing = _crossing(graph, nodes)
    so_far = [0.0, *accumulate(weights)]
    # Of what lies before each end, and at last before the loss.
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
    """The bytes that a stage which ends behind each forward node would hand on."""
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
    """Where the inner ends of ``count`` stages lie among the places ``at``."""
    last = len(at) - 1

    def heavy(begin: int, end: int) -> float:
        return at[end] - at[begin] + hands[begin] + hands[end]

    best: list[tuple[float, list[int]]] = [(heavy(0, end), []) for end in range(last + 1)]
    for stages in range(2, count + 1):
        best = [
            min(
                (
                    (max(best[mid][0], heavy(mid, end)), [*best[mid][1], mid])
                    for mid in range(stages - 1, end)
                ),
                default=(float("inf"), []),
            )
            for end in range(last + 1)
        ]
    chosen = best[last][1]
    assert all(a < b for a, b in pairwise(chosen))
    return chosen
