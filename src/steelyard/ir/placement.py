"""The placement of a tensor on the ranks of a mesh axis: replicated, sharded or as partial sums.

The words are DTensor's. Not for the placements that an operator allows
(capture/spmd/sharding_strategies.py) or for choosing among them.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

from steelyard.ir.graph import Tensor


@dataclass(frozen=True, slots=True)
class Replicate:
    """Every rank has the whole tensor."""


@dataclass(frozen=True, slots=True)
class Partial:
    """Every rank has one term; the tensor is the sum of all."""


@dataclass(frozen=True, slots=True)
class Shard:
    """Every rank has an equal part along ``dim``.

    The dim is first split into ``groups`` equal sections; a rank has its part of each section. A
    packed weight of queries, keys and values has three groups.
    """

    dim: int
    groups: int = 1


Placement = Replicate | Shard | Partial

REPLICATE = Replicate()
PARTIAL = Partial()


@dataclass(frozen=True, slots=True, kw_only=True)
class Strategy:
    """A valid combination of input and output placements for one operator call."""

    takes: tuple[Placement, ...]
    gives: tuple[Placement, ...]


def fits(tensor: Tensor, placement: Placement, num_ranks: int) -> bool:
    """True if the placement gives all ranks the same number of elements."""
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
    """Return one rank's part of the tensor, dense and in the dim order of the whole tensor."""
    shape = local_shape(tensor.shape, placement, num_ranks)
    if shape == tensor.shape:
        return tensor
    stride = local_stride(tensor.shape, tensor.stride, shape)
    return replace(tensor, shape=shape, stride=stride, offset=0)


def local_stride(
    shape: tuple[int, ...], stride: tuple[int, ...], part: tuple[int, ...]
) -> tuple[int, ...]:
    """Return the strides of a dense part of shape ``part``, in the dim order of the whole
    tensor.
    """
    strides, step = [0] * len(part), 1
    for dim in sorted(range(len(part)), key=lambda d: (stride[d], -d)):
        # An expanded dim takes no memory of its own.
        if stride[dim] or shape[dim] == 1:
            strides[dim] = step
            step *= part[dim]
    return tuple(strides)


def seen_through(
    shape: tuple[int, ...], viewed: tuple[int, ...], shard: Shard, num_ranks: int
) -> Shard | None:
    """Return the placement of a sharded tensor after a reshape to ``viewed``; None if none exists.

    Written in mixed radix, one digit of an element's flat index is its rank. A single dim of the
    new shape must contain this whole digit; otherwise the parts are not shards of the view.
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
