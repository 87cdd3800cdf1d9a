"""Collective curves and subsets of the ranks of a declared cluster, from its topology.

Not for the curve of one group: see collectives/curves.py. Not for choosing a subset: see
rank_subsets.py.
"""

from collections.abc import Collection, Sequence

from steelyard.hardware.cluster import Cluster
from steelyard.hardware.link import Link
from steelyard.ir.collective import Exchange
from steelyard.ir.parallel_layout import DATA, PIPELINE, TENSOR
from steelyard.predict.collectives.curves import collective_curves
from steelyard.predict.rank_subsets import Subset, best_joined, declared_seconds, numbers_of_ranks

# Declared clusters with more devices than this use the first ones in order, without comparing
# subsets.
_MAX_DEVICES_COMPARED = 64


def declared_curves(cluster: Cluster) -> dict[tuple[str, Exchange, int, int], Link]:
    """Return the collective curves of a declared cluster, for the groups that a step may use.

    The groups are: neighbours that shard tensors, the corresponding ranks of all such groups (which
    share the batch), and ranks of adjacent pipeline stages.
    """
    count = cluster.num_devices
    if count == 1 or cluster.is_here:
        return {}
    # The numbers of ranks that a step may use: see search/ranks/layout_search.py.
    return _curves_on(cluster, {*_divisors(count), *numbers_of_ranks(count), 2})


def _curves_on(
    cluster: Cluster, rank_counts: Collection[int], among: Sequence[int] = ()
) -> dict[tuple[str, Exchange, int, int], Link]:
    """Return the curves for these numbers of ranks, for groups of each size that divides them.

    The ranks are the first ones, or those in ``among``.
    """
    group_sizes: dict[int, set[int]] = {}
    for ranks in rank_counts:
        for stride in _divisors(ranks)[:-1]:
            group_sizes.setdefault(stride, set()).update(_divisors(ranks // stride)[1:])
    found: dict[tuple[str, Exchange, int, int], Link] = {}
    for stride, sizes in group_sizes.items():
        for axis in (DATA, PIPELINE) if stride > 1 else (DATA, PIPELINE, TENSOR):
            found |= collective_curves(
                cluster.tree, axis=axis, numbers=sorted(sizes), stride=stride, among=among
            )
    return found


def declared_subsets(cluster: Cluster) -> dict[int, Subset]:
    """Return the devices to use for each number of ranks, unless these are simply the first
    ones.
    """
    count = cluster.num_devices
    if not 2 < count <= _MAX_DEVICES_COMPARED or cluster.is_here:
        return {}
    fastest = cluster.fastest.flops_per_second
    devices = [cluster.tree.device_of(rank) for rank in range(count)]
    speeds = [device.flops_per_second / fastest for device in devices]
    groups = best_joined(declared_seconds(cluster.tree), speeds)
    return {
        number: Subset(ranks=group, collective_curves=_curves_on(cluster, [number], group))
        for number, group in groups.items()
        if 1 < number < count and group != tuple(range(number))
    }


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]
