"""How recently a step touched what an operator reads, and how to leave the caches just so.

The same addition takes four times as long on tensors that have left the caches: what a step finds
there, a measurement must find there too. Not for timing: see benchmark.py.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from statistics import median_low

import torch

from steelyard.ir.graph import Graph

# Reuse distances in bytes, as caches see them: within the first a value is still in its core's
# own cache, within the second in the one that cores share. Between, a server core of the 2020s.
_NEAR_BYTES = 512 << 10
_FAR_BYTES = 32 << 20
_OWN_CACHE_BYTES = 1 << 20
_NEVER = 1 << 62


def distances(graphs: Sequence[Graph]) -> dict[str, tuple[int, ...]]:
    """By signature, for each input: bytes the step moved since it was last touched.

    The median over the calls of one signature; what a step touches for the first time is far.
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
                    min((moved - touched[s] for s in on if s in touched), default=_NEVER)
                    for on in read
                ]
            )
            moved += node.moved_bytes
            for on in (*read, graph.storages_of(node.name)):
                touched.update(dict.fromkeys(on, moved))
    return {
        signature: tuple(median_low(each) for each in zip(*calls))
        for signature, calls in found.items()
    }


def preparation(inputs: Sequence[tuple[torch.Tensor, int]]) -> Callable[[], None]:
    """What to do before a call, so that it finds each input as near as its distance says."""
    by_age = sorted(inputs, key=lambda given: -given[1])
    far = [_bytes_under(t) for t, age in by_age if _NEAR_BYTES <= age < _FAR_BYTES]
    near = [_bytes_under(t) for t, age in by_age if age < _NEAR_BYTES]
    between = far[0].new_ones(_OWN_CACHE_BYTES) if far else None

    def prepare() -> None:
        for touched in far:
            touched.bitwise_or_(0)
        if between is not None:
            between.bitwise_or_(0)
        for touched in near:
            touched.bitwise_or_(0)

    return prepare


def _bytes_under(tensor: torch.Tensor) -> torch.Tensor:
    """The whole storage, writable even where strides let elements share their bytes."""
    storage = tensor.untyped_storage()
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
