"""The plans people make by hand; what is found is never worse than any of them.

Checkpointing by module at every depth, keeping only the dear operators, recomputing all. Not for
finding better ones: see explore.py.
"""

from collections.abc import Iterator

from steelyard.core.graph import Graph
from steelyard.search.tally import Tally


def simple_plans(tally: Tally) -> Iterator[frozenset[int]]:
    """Sets of storages to recompute."""
    everything = frozenset(tally.unit_of)
    yield everything
    dear = frozenset(s for s, u in tally.unit_of.items() if _is_dear(tally, u))
    yield everything - dear
    for depth in range(1, 1 + _deepest(tally)):
        inner, bounds = checkpointed(tally, depth)
        for plan in (inner, inner - dear):
            yield plan
            for every in (2, 3):
                yield frozenset(s for s in plan if bounds[s] % every)


def checkpointed(tally: Tally, depth: int) -> tuple[frozenset[int], dict[int, int]]:
    """What modules at this depth make and only they read; and each value's place in the row.

    This is torch.utils.checkpoint around each of them: inputs are kept, what is inside is not.
    """
    graph = tally.program.graph
    rows: dict[str, int] = {}
    place: dict[int, int] = {}
    inner = []
    for storage in sorted(tally.unit_of):
        module = _module(graph, tally.value_on[storage], depth)
        if module is None:
            continue
        place[storage] = rows.setdefault(module, len(rows))
        if all(m == module for m in _readers(graph, tally, storage, depth)):
            inner.append(storage)
    return frozenset(inner), place


def _readers(graph: Graph, tally: Tally, storage: int, depth: int) -> Iterator[str | None]:
    """Modules of the forward operators that read a value or a view of it."""
    pending = [tally.value_on[storage]]
    while pending:
        for user in graph.users[pending.pop()]:
            node = graph.by_name[user]
            if node.phase != "forward":
                continue
            if node.is_free:
                pending.append(user)
            else:
                yield _module(graph, user, depth)


def _module(graph: Graph, name: str, depth: int) -> str | None:
    parts = graph.by_name[name].path.split(".")
    return ".".join(parts[:depth]) if len(parts) >= depth and parts[0] else None


def _deepest(tally: Tally) -> int:
    graph = tally.program.graph
    return max((graph.by_name[v].path.count(".") + 1 for v in tally.value_on.values()), default=0)


def _is_dear(tally: Tally, unit: int) -> bool:
    """Products, convolutions, attention: what is worth keeping if little is."""
    return tally.program.graph.by_name[tally.units[unit].node].flops > 0
