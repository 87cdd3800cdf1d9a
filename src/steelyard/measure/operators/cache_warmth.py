"""Cache warmth of operator inputs: reuse distances in a step, and code that reproduces them.

The same addition takes four times as long on tensors that have left the caches, so a measurement
must find its inputs as warm as a step does. Not for timing: see benchmark.py.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from statistics import median_low

import torch

from steelyard.ir.graph import Graph

# Reuse distances in bytes. Below the first, a value is still in the core's own cache; below the
# second, it is in the cache that cores share. The sizes are those of a server core of the 2020s.
_OWN_CACHE_DISTANCE = 512 << 10
_SHARED_CACHE_DISTANCE = 32 << 20
_OWN_CACHE_BYTES = 1 << 20
_NEVER = 1 << 62


def distances(graphs: Sequence[Graph]) -> dict[str, tuple[int, ...]]:
    """Return each signature's reuse distances: the bytes moved since each input was last used.

    A distance is the median over the calls with this signature; it is infinite at the first use.
    """
    found: dict[str, list[list[int]]] = defaultdict(list)
    for graph in graphs:
        moved = 0
        touched: dict[int, int] = {}
        for node in graph.nodes:
            if node.is_free:
                continue
            read = [graph.storages_of(name) for name in node.inputs]
            found[node.signature].append(
                [
                    min((moved - touched[s] for s in storages if s in touched), default=_NEVER)
                    for storages in read
                ]
            )
            moved += node.moved_bytes
            for storages in (*read, graph.storages_of(node.name)):
                touched.update(dict.fromkeys(storages, moved))
    return {
        signature: tuple(median_low(each) for each in zip(*calls))
        for signature, calls in found.items()
    }


def preparation(inputs: Sequence[tuple[torch.Tensor, int]]) -> Callable[[], None]:
    """Return a function that brings each input into the cache level of its reuse distance."""
    by_age = sorted(inputs, key=lambda given: -given[1])
    shared = [
        _bytes_under(t) for t, age in by_age if _OWN_CACHE_DISTANCE <= age < _SHARED_CACHE_DISTANCE
    ]
    own = [_bytes_under(t) for t, age in by_age if age < _OWN_CACHE_DISTANCE]
    evicting = shared[0].new_ones(_OWN_CACHE_BYTES) if shared else None

    def prepare() -> None:
        for touched in shared:
            touched.bitwise_or_(0)
        if evicting is not None:
            evicting.bitwise_or_(0)
        for touched in own:
            touched.bitwise_or_(0)

    return prepare


def _bytes_under(tensor: torch.Tensor) -> torch.Tensor:
    """Return the whole storage as bytes, which can be written even if strides make elements
    overlap.
    """
    storage = tensor.untyped_storage()
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
