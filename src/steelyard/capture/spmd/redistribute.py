"""One value laid out otherwise on the ranks: gathered, summed, cut, or both of the last two.

As DTensor's ``redistribute``, but as nodes of the graph. Not for when: see partition.py.
"""

import math

from steelyard.capture.spmd.local_graph import LocalGraphBuilder
from steelyard.ir.collective import Exchange
from steelyard.ir.graph import Node, Ref, Symbol
from steelyard.ir.placement import REPLICATE, Partial, Placement, Replicate, Shard, local_tensor

_CONTIGUOUS = Symbol("torch.contiguous_format")


def redistributed(
    local: LocalGraphBuilder, value: str, old: Placement, new: Placement, *, at: Node
) -> str:
    """``value`` lies as ``old`` says, and what is returned as ``new`` says. By way of the whole,
    where there is no single exchange for it."""
    if old == new:
        return value
    match old, new:
        case Partial(), Replicate():
            return local.exchanged(Exchange.ALL_REDUCE, contiguous(local, value, at=at), at=at)
        case Partial(), Shard():
            return _scattered(local, value, new, at=at)
        case Shard(), Replicate():
            return _gathered(local, value, old, at=at)
        case Replicate(), Shard():
            return cut(local, value, new, at=at)
        case Replicate(), Partial():
            # The first rank's term is all of it. (Not by a factor: of infinity, 0 makes no zero.)
            op = "aten.zeros_like.default" if local.rank else "aten.clone.default"
            return local.call(op, Ref(value), at=at, said="term")
    whole = redistributed(local, value, old, REPLICATE, at=at)
    return redistributed(local, whole, REPLICATE, new, at=at)


def received_bytes(nbytes: int, old: Placement, new: Placement, num_ranks: int) -> float:
    """What passes a rank's link, of a tensor that is ``nbytes`` large as a whole."""
    once = nbytes * (num_ranks - 1) / num_ranks
    if old == new or isinstance(old, Replicate):
        return 0.0
    if isinstance(old, Partial):
        return once if isinstance(new, Shard) else 2 * once
    return once


def contiguous(local: LocalGraphBuilder, value: str, *, at: Node) -> str:
    if local.tensor(value).is_contiguous:
        return value
    return local.call("aten.clone.default", Ref(value), at=at, memory_format=_CONTIGUOUS)


def viewed(local: LocalGraphBuilder, value: str, shape: tuple[int, ...], *, at: Node) -> str:
    if local.shape(value) == shape:
        return value
    return local.call("aten.view.default", Ref(value), shape, at=at)


def cut(local: LocalGraphBuilder, value: str, shard: Shard, *, at: Node) -> str:
    """This rank's part of a value that is there whole, dense as the whole is.

    A copy, unless it lies in one piece or the whole is expanded: some kernels trust that what they
    are given is dense (that of LayerNorm's backward pass reads other means than those it gets), and
    of a view the whole would have to stay.
    """
    whole, ranks = local.tensor(value), local.num_ranks
    size = whole.shape[shard.dim] // (shard.groups * ranks)
    dense = local_tensor(whole, shard, ranks)
    if shard.groups > 1:
        before, after = whole.shape[: shard.dim], whole.shape[shard.dim + 1 :]
        split = viewed(local, value, (*before, shard.groups, ranks, size, *after), at=at)
        part = local.call("aten.select.int", Ref(split), shard.dim + 1, local.rank, at=at)
        return viewed(local, contiguous(local, part, at=at), dense.shape, at=at)
    start = local.rank * size
    part = local.call("aten.slice.Tensor", Ref(value), shard.dim, start, start + size, at=at)
    if local.tensor(part).stride == dense.stride or 0 in whole.stride:
        return part
    return local.call("steelyard.copy_laid_out", Ref(part), dense.shape, dense.stride, at=at)


def _gathered(local: LocalGraphBuilder, value: str, shard: Shard, *, at: Node) -> str:
    shape, ranks = local.shape(value), local.num_ranks
    value = contiguous(local, value, at=at)
    value = viewed(local, value, (1, math.prod(shape)), at=at)
    whole = local.exchanged(Exchange.ALL_GATHER, value, at=at)
    before, after = shape[: shard.dim], shape[shard.dim + 1 :]
    size = shape[shard.dim] // shard.groups
    whole = viewed(local, whole, (ranks, *before, shard.groups, size, *after), at=at)
    place = shard.dim + 1
    if math.prod(before) * shard.groups > 1:
        order = (*range(1, place + 1), 0, *range(place + 1, len(shape) + 2))
        turned = local.call("aten.permute.default", Ref(whole), order, at=at)
        whole = contiguous(local, turned, at=at)
    return viewed(local, whole, (*before, shard.groups * ranks * size, *after), at=at)


def _scattered(local: LocalGraphBuilder, value: str, shard: Shard, *, at: Node) -> str:
    shape, ranks = local.shape(value), local.num_ranks
    before, after = shape[: shard.dim], shape[shard.dim + 1 :]
    size = shape[shard.dim] // (shard.groups * ranks)
    value = contiguous(local, value, at=at)
    if math.prod(before) * shard.groups > 1:
        split = viewed(local, value, (*before, shard.groups, ranks, size, *after), at=at)
        place = shard.dim + 1
        order = (place, *range(place), *range(place + 1, len(shape) + 2))
        turned = local.call("aten.permute.default", Ref(split), order, at=at)
        value = contiguous(local, turned, at=at)
    value = viewed(local, value, (ranks, math.prod(shape) // ranks), at=at)
    part = local.exchanged(Exchange.REDUCE_SCATTER, value, at=at)
    return viewed(local, part, (*before, shard.groups * size, *after), at=at)
