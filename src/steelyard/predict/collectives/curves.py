"""The time of collectives in groups of a declared cluster, as curves over the bytes exchanged.

At each size, the time is that of the fastest algorithm; between sizes, curves are linear. Not for
the algorithms: see algorithms.py.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence

from steelyard.hardware.link import Link
from steelyard.hardware.topology import TopologyLevel
from steelyard.ir.collective import Exchange
from steelyard.predict.collectives.algorithms import (
    CollectiveCost,
    all_gather,
    all_reduce,
    all_to_all,
    reduce_scatter,
)
from steelyard.predict.collectives.routes import Route, route

_ALGORITHMS: Mapping[Exchange, Callable[[Route, int], tuple[CollectiveCost, ...]]] = {
    Exchange.ALL_REDUCE: all_reduce,
    Exchange.ALL_GATHER: all_gather,
    Exchange.REDUCE_SCATTER: reduce_scatter,
    Exchange.ALL_TO_ALL: all_to_all,
}
# Sizes in bytes from a scalar to the gradients of a large model; each is four times the previous
# one.
_SIZES = tuple(1 << power for power in range(2, 37, 2))


def collective_curves(
    tree: TopologyLevel,
    *,
    axis: str,
    numbers: Iterable[int],
    stride: int = 1,
    first: int = 0,
    among: Sequence[int] = (),
) -> dict[tuple[str, Exchange, int, int], Link]:
    """Return the curves of each collective for groups of each size in ``numbers``.

    A group begins at ``first`` and consists of every ``stride``-th rank, among all ranks or those
    in ``among``.
    """
    found = {}
    for ranks in numbers:
        chosen = range(first, first + ranks * stride, stride)
        group = route(tree, [among[rank] for rank in chosen] if among else chosen)
        for kind, algorithms in _ALGORITHMS.items():
            points = [(nbytes, algorithms(group, nbytes)[0].seconds) for nbytes in _SIZES]
            name = f"{kind.value} among {ranks}"
            found[axis, kind, ranks, stride] = Link.curve(points, kind=name, doubt=group.doubt)
    return found
