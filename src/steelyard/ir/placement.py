"""How one tensor lies on the ranks of a mesh axis: whole on each, a part on each, a term on each.

The words are DTensor's. Not for which placements an operator allows
(capture/spmd/sharding_strategies.py), nor for which are chosen.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

from steelyard.ir.graph import Tensor


@dataclass(frozen=True, slots=True)
class Replicate:
    """Every rank holds all of it."""


@dataclass(frozen=True, slots=True)
class Partial:
    """Every rank holds a term; the tensor is their sum."""


@dataclass(frozen=True, slots=True)
class Shard:
    """Every rank holds a part along ``dim``.

    ``groups`` cuts the dim into so many equal stretches first, of each of which a rank holds its
    part: queries, keys and values that lie in one weight are three.
    """

    dim: int
    groups: int = 1


Placement = Replicate | Shard | Partial

REPLICATE = Replicate()
PARTIAL = Partial()


@dataclass(frozen=True, slots=True, kw_only=True)
class Strategy:
    """One way to call an operator on parts: the placements it takes, and those of what it gives."""

    takes: tuple[Placement, ...]
    gives: tuple[Placement, ...]


def fits(tensor: Tensor, placement: Placement, num_ranks: int) -> bool:
    """Whether all ranks hold the same number of elements."""
    if not isinstance(placement, Shard):
        return True
    if placement.dim >= len(tensor.shape):
        return False
    size = tensor.shape[placement.dim]
    return size > 0 and size % (placement.groups * num_ranks) == 0


def local_shape(shape: tuple[int, ...], placement: Placement, num_ranks: int) -> tuple[int, ...]:
    if not isinstance(placement, Shard):
        return shape
    sizes = list(shape)
    sizes[placement.dim] //= num_ranks
    return tuple(sizes)


def local_tensor(tensor: Tensor, placement: Placement, num_ranks: int) -> Tensor:
    """One rank's part, dense in memory in the order in which the whole was."""
    shape = local_shape(tensor.shape, placement, num_ranks)
    if shape == tensor.shape:
        return tensor
    stride = local_stride(tensor.shape, tensor.stride, shape)
    return replace(tensor, shape=shape, stride=stride, offset=0)


def local_stride(
    shape: tuple[int, ...], stride: tuple[int, ...], part: tuple[int, ...]
) -> tuple[int, ...]:
    """Of a part of that shape, dense in memory in the order in which the whole is."""
    found, step = [0] * len(part), 1
    for dim in sorted(range(len(part)), key=lambda d: (stride[d], -d)):
        # An expanded dim has no memory of its own.
        if stride[dim] or shape[dim] == 1:
            found[dim] = step
            step *= part[dim]
    return tuple(found)


def seen_through(
    shape: tuple[int, ...], viewed: tuple[int, ...], shard: Shard, num_ranks: int
) -> Shard | None:
    """Where a shard of a tensor lies when its elements, in their order, are given another shape.

    Which rank holds an element is one digit of its place in that order. A dim of the new shape
    holds that digit whole, or the parts are no shard of it.
    """
    unit = math.prod(shape[shard.dim :]) // (shard.groups * num_ranks)
    for dim in range(len(viewed)):
        inner, outer = math.prod(viewed[dim + 1 :]), math.prod(viewed[dim:])
        if inner and unit % inner == 0 and outer % (unit * num_ranks) == 0:
            return Shard(dim, outer // (unit * num_ranks))
    return None


def groups_of(placements: Iterable[Placement]) -> tuple[int, ...]:
    found = {p.groups for p in placements if isinstance(p, Shard)}
    return tuple(sorted(found | {1}))
