"""The plans people make by hand; what is found is never worse than any of them.

Checkpointing by module at every depth, keeping only the dear operators, recomputing all; and
checkpoints between checkpoints. Not for finding better ones: see explore.py and multi_recompute.py.
"""

from collections.abc import Iterator

from steelyard.ir.graph import Graph
from steelyard.search.single.fast_estimator import FastEstimator

# In a row of modules, what leaves every so manieth is kept, and what leaves every so manieth is
# made again once.
_KEPT_AND_ONCE = tuple(
    (kept, once)
    for kept in (2, 3, 4, 6, 8, 12, 16, 24)
    for once in (1, 2, 3, 4, 6)
    if once < kept and kept % once == 0
)


def simple_plans(tally: FastEstimator) -> Iterator[frozenset[int]]:
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


def checkpointed(tally: FastEstimator, depth: int) -> tuple[frozenset[int], dict[int, int]]:
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


def checkpoints_between(tally: FastEstimator) -> Iterator[frozenset[int]]:
    """Few values kept; of those between them some made again once, and all else twice: on the way
    to the next of these, and when it is wanted itself (Chen et al. 2016, section 4.3)."""
    everything = frozenset(tally.unit_of)
    for depth in range(1, 1 + _deepest(tally)):
        rows, leaving = _rows(tally, depth)
        for kept, once in _KEPT_AND_ONCE:
            if kept <= max(rows.values()):
                again = everything - {s for s in leaving if rows[s] % kept == kept - 1}
                twice = again - {s for s in leaving if rows[s] % once == once - 1}
                yield again.union(tally.often(s, 2) for s in twice)


def _rows(tally: FastEstimator, depth: int) -> tuple[dict[int, int], frozenset[int]]:
    """In which module of the row each value is made, or behind which; what leaves its module."""
    graph = tally.program.graph
    numbers: dict[str | None, int] = {}
    rows: dict[int, int] = {}
    leaving = []
    module: str | None = None
    for storage in sorted(tally.unit_of):
        module = _module(graph, tally.value_on[storage], depth) or module
        rows[storage] = numbers.setdefault(module, len(numbers))
        if any(m != module for m in _readers(graph, tally, storage, depth)):
            leaving.append(storage)
    return rows, frozenset(leaving)


def _readers(graph: Graph, tally: FastEstimator, storage: int, depth: int) -> Iterator[str | None]:
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


def _deepest(tally: FastEstimator) -> int:
    graph = tally.program.graph
    return max((graph.by_name[v].path.count(".") + 1 for v in tally.value_on.values()), default=0)


def _is_dear(tally: FastEstimator, unit: int) -> bool:
    """Products, convolutions, attention: what is worth keeping if little is."""
    return tally.program.graph.by_name[tally.units[unit].node].flops > 0
