"""Redistribution: change the placement of one value by a collective, a slice or both.

Like DTensor's ``redistribute``, but recorded as nodes of the graph. Not for deciding when to
redistribute: see partition.py.
"""

import math

from steelyard.capture.spmd.local_graph import LocalGraphBuilder
from steelyard.ir.collective import Exchange
from steelyard.ir.graph import Node, Ref, Symbol
from steelyard.ir.placement import REPLICATE, Partial, Placement, Replicate, Shard, local_tensor

_CONTIGUOUS = Symbol("torch.contiguous_format")


def redistribute(
    local: LocalGraphBuilder, value: str, old: Placement, new: Placement, *, at: Node
) -> str:
    """Return ``value``, which has the placement ``old``, in the placement ``new``.

    If no single collective suffices, the value is replicated in between.
    """
    if old == new:
        return value
    match old, new:
        case Partial(), Replicate():
            return local.exchange(Exchange.ALL_REDUCE, to_contiguous(local, value, at=at), at=at)
        case Partial(), Shard():
            return _reduce_scatter(local, value, new, at=at)
        case Shard(), Replicate():
            return _all_gather(local, value, old, at=at)
        case Replicate(), Shard():
            return local_part(local, value, new, at=at)
        case Replicate(), Partial():
            # Rank 0 has the full value as its term, the others have zeros. Multiplying by 0 would
            # not do: infinity times 0 is not zero.
            op = "aten.zeros_like.default" if local.rank else "aten.clone.default"
            return local.call(op, Ref(value), at=at, suffix="term")
    whole = redistribute(local, value, old, REPLICATE, at=at)
    return redistribute(local, whole, REPLICATE, new, at=at)


def received_bytes(nbytes: int, old: Placement, new: Placement, num_ranks: int) -> float:
    """Return how many bytes a rank receives for a tensor of ``nbytes`` bytes in total."""
    others_bytes = nbytes * (num_ranks - 1) / num_ranks
    if old == new or isinstance(old, Replicate):
        return 0.0
    if isinstance(old, Partial):
        return others_bytes if isinstance(new, Shard) else 2 * others_bytes
    return others_bytes


def to_contiguous(local: LocalGraphBuilder, value: str, *, at: Node) -> str:
    if local.tensor(value).is_contiguous:
        return value
    return local.call("aten.clone.default", Ref(value), at=at, memory_format=_CONTIGUOUS)


def view_as(local: LocalGraphBuilder, value: str, shape: tuple[int, ...], *, at: Node) -> str:
    if local.shape(value) == shape:
        return value
    return local.call("aten.view.default", Ref(value), shape, at=at)


def local_part(local: LocalGraphBuilder, value: str, shard: Shard, *, at: Node) -> str:
    """Return this rank's shard of a replicated value, as dense as the full value.

    The shard is a copy, unless it is already dense or the full value is expanded. Some kernels
    trust that their inputs are dense (LayerNorm's backward would read the wrong means), and a view
    would keep the full value alive.
    """
    whole, ranks = local.tensor(value), local.num_ranks
    size = whole.shape[shard.dim] // (shard.groups * ranks)
    dense = local_tensor(whole, shard, ranks)
    if shard.groups > 1:
        before, after = whole.shape[: shard.dim], whole.shape[shard.dim + 1 :]
        split = view_as(local, value, (*before, shard.groups, ranks, size, *after), at=at)
        part = local.call("aten.select.int", Ref(split), shard.dim + 1, local.rank, at=at)
        return view_as(local, to_contiguous(local, part, at=at), dense.shape, at=at)
    start = local.rank * size
    part = local.call("aten.slice.Tensor", Ref(value), shard.dim, start, start + size, at=at)
    if local.tensor(part).stride == dense.stride or 0 in whole.stride:
        return part
    return local.call("steelyard.copy_strided", Ref(part), dense.shape, dense.stride, at=at)


def _all_gather(local: LocalGraphBuilder, value: str, shard: Shard, *, at: Node) -> str:
    shape, ranks = local.shape(value), local.num_ranks
    value = to_contiguous(local, value, at=at)
    value = view_as(local, value, (1, math.prod(shape)), at=at)
    whole = local.exchange(Exchange.ALL_GATHER, value, at=at)
    before, after = shape[: shard.dim], shape[shard.dim + 1 :]
    size = shape[shard.dim] // shard.groups
    whole = view_as(local, whole, (ranks, *before, shard.groups, size, *after), at=at)
    rank_dim = shard.dim + 1
    if math.prod(before) * shard.groups > 1:
        order = (*range(1, rank_dim + 1), 0, *range(rank_dim + 1, len(shape) + 2))
        permuted = local.call("aten.permute.default", Ref(whole), order, at=at)
        whole = to_contiguous(local, permuted, at=at)
    return view_as(local, whole, (*before, shard.groups * ranks * size, *after), at=at)


def _reduce_scatter(local: LocalGraphBuilder, value: str, shard: Shard, *, at: Node) -> str:
    shape, ranks = local.shape(value), local.num_ranks
    before, after = shape[: shard.dim], shape[shard.dim + 1 :]
    size = shape[shard.dim] // (shard.groups * ranks)
    value = to_contiguous(local, value, at=at)
    if math.prod(before) * shard.groups > 1:
        split = view_as(local, value, (*before, shard.groups, ranks, size, *after), at=at)
        rank_dim = shard.dim + 1
        order = (rank_dim, *range(rank_dim), *range(rank_dim + 1, len(shape) + 2))
        permuted = local.call("aten.permute.default", Ref(split), order, at=at)
        value = to_contiguous(local, permuted, at=at)
    value = view_as(local, value, (ranks, math.prod(shape) // ranks), at=at)
    part = local.exchange(Exchange.REDUCE_SCATTER, value, at=at)
    return view_as(local, part, (*before, shard.groups * size, *after), at=at)
