"""The checkpointing plans that people write by hand; the search never returns a worse plan.

The plans are checkpoints around modules at every depth, saving only the results of expensive
operators, recomputing everything, and nested checkpoints. Not for finding better plans: see
explore.py and multi_recompute.py.
"""

from collections.abc import Iterator

from steelyard.ir.graph import Graph
from steelyard.search.single.estimator.fast_estimator import FastEstimator

# In a sequence of modules: save the outputs of every n-th module, and recompute the outputs of
# every m-th module once.
_SAVED_AND_ONCE_INTERVALS = tuple(
    (saved_interval, once_interval)
    for saved_interval in (2, 3, 4, 6, 8, 12, 16, 24)
    for once_interval in (1, 2, 3, 4, 6)
    if once_interval < saved_interval and saved_interval % once_interval == 0
)


def simple_plans(estimator: FastEstimator) -> Iterator[frozenset[int]]:
    """Yield sets of storages whose values are recomputed."""
    all_storages = frozenset(estimator.unit_of)
    yield all_storages
    expensive = frozenset(s for s, u in estimator.unit_of.items() if _is_expensive(estimator, u))
    yield all_storages - expensive
    for depth in range(1, 1 + _max_depth(estimator)):
        inner, positions = checkpointed(estimator, depth)
        for plan in (inner, inner - expensive):
            yield plan
            for interval in (2, 3):
                yield frozenset(s for s in plan if positions[s] % interval)


def checkpointed(estimator: FastEstimator, depth: int) -> tuple[frozenset[int], dict[int, int]]:
    """Return the values internal to modules at this depth, and the index of each value's module.

    Recomputing the internal values is equivalent to torch.utils.checkpoint around each of these
    modules: their inputs are saved, and everything inside is recomputed.
    """
    graph = estimator.program.graph
    rows: dict[str, int] = {}
    positions: dict[int, int] = {}
    inner = []
    for storage in sorted(estimator.unit_of):
        module = _module(graph, estimator.value_on[storage], depth)
        if module is None:
            continue
        positions[storage] = rows.setdefault(module, len(rows))
        if all(m == module for m in _readers(graph, estimator, storage, depth)):
            inner.append(storage)
    return frozenset(inner), positions


def checkpoints_between(estimator: FastEstimator) -> Iterator[frozenset[int]]:
    """Yield nested checkpointing plans (Chen et al. 2016, section 4.3).

    A few values are saved. Some of the values between them are recomputed once. All others are
    recomputed twice: once to compute the next of the former, and once for their own use in the
    backward pass.
    """
    all_storages = frozenset(estimator.unit_of)
    for depth in range(1, 1 + _max_depth(estimator)):
        rows, module_outputs = _rows(estimator, depth)
        for saved_interval, once_interval in _SAVED_AND_ONCE_INTERVALS:
            if saved_interval <= max(rows.values()):
                recomputed = all_storages - {
                    s for s in module_outputs if rows[s] % saved_interval == saved_interval - 1
                }
                twice = recomputed - {
                    s for s in module_outputs if rows[s] % once_interval == once_interval - 1
                }
                yield recomputed.union(estimator.repeat_choice(s, 2) for s in twice)


def _rows(estimator: FastEstimator, depth: int) -> tuple[dict[int, int], frozenset[int]]:
    """Return the position of each value's module, and the values that other modules read.

    If a value is made outside of all modules at this depth, it belongs to the module before it.
    """
    graph = estimator.program.graph
    numbers: dict[str | None, int] = {}
    rows: dict[int, int] = {}
    module_outputs = []
    module: str | None = None
    for storage in sorted(estimator.unit_of):
        module = _module(graph, estimator.value_on[storage], depth) or module
        rows[storage] = numbers.setdefault(module, len(numbers))
        if any(m != module for m in _readers(graph, estimator, storage, depth)):
            module_outputs.append(storage)
    return rows, frozenset(module_outputs)


def _readers(
    graph: Graph, estimator: FastEstimator, storage: int, depth: int
) -> Iterator[str | None]:
    """Yield the modules of the forward operators that read a value or a view of it."""
    pending = [estimator.value_on[storage]]
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


def _max_depth(estimator: FastEstimator) -> int:
    graph = estimator.program.graph
    return max(
        (graph.by_name[v].path.count(".") + 1 for v in estimator.value_on.values()), default=0
    )


def _is_expensive(estimator: FastEstimator, unit: int) -> bool:
    """True for matmuls, convolutions and attention, which are the first operators to save."""
    return estimator.program.graph.by_name[estimator.units[unit].node].flops > 0
