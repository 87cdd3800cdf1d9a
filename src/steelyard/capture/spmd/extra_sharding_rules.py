"""Sharding rules for operators whose DTensor rule (torch 2.13) cannot be used here.

DTensor's rules for operators that move dims or compute sums need a mesh. Its channel-sharded
convolutions and vocabulary-parallel operators are special handlers without rules. A rule returns
pairs of placements: those of the call's inputs and those of its results. Not for views (see
sharding_strategies.py) or for choosing a pair (see partition.py).
"""

from collections.abc import Callable, Sequence

from steelyard.ir.graph import Argument, Node, Tensor
from steelyard.ir.placement import PARTIAL, REPLICATE, Placement, Shard

Pairs = list[tuple[Sequence[Placement], Sequence[Placement]]]
Rule = Callable[[Node, Sequence[Tensor]], Pairs]


# --- operators that move dims, or work on some dims independently


def _map_dims(takes: Sequence[Tensor], target: Callable[[int], int | None]) -> Pairs:
    """Map each sharded dim to one of ``target`` (None: not shardable); partial sums pass
    through.
    """
    rank, count = len(takes[0].shape), len(takes)
    pairs: Pairs = [((PARTIAL,) * count, (PARTIAL,))]
    for dim in range(rank):
        new_dim = target(dim)
        if new_dim is not None:
            pairs.append(((Shard(dim),) * count, (Shard(new_dim),)))
    return pairs


def argument_dim(node: Node, place: int, rank: int, default: int = 0) -> int:
    value = node.args[place] if len(node.args) > place else dict(node.kwargs).get("dim", default)
    assert isinstance(value, int)
    return value % rank if rank else 0


def _permute(node: Node, takes: Sequence[Tensor]) -> Pairs:
    rank = len(takes[0].shape)
    order = node.args[1]
    assert isinstance(order, tuple)
    dims = [int(d) % rank for d in order if isinstance(d, int)]
    return _map_dims(takes, dims.index)


def _transpose(node: Node, takes: Sequence[Tensor]) -> Pairs:
    rank = len(takes[0].shape)
    if node.op == "aten.t.default":
        first, second = 0, rank - 1
    else:
        first, second = argument_dim(node, 1, rank), argument_dim(node, 2, rank)
    swapped = {first: second, second: first}
    return _map_dims(takes, lambda d: swapped.get(d, d))


def _unsqueeze(node: Node, takes: Sequence[Tensor]) -> Pairs:
    new = argument_dim(node, 1, len(takes[0].shape) + 1)
    return _map_dims(takes, lambda d: d + (d >= new))


def _squeeze(node: Node, takes: Sequence[Tensor]) -> Pairs:
    shape = takes[0].shape
    argument = node.args[1] if len(node.args) > 1 else tuple(range(len(shape)))
    listed = argument if isinstance(argument, tuple) else (argument,)
    removed = {d % len(shape) for d in listed if isinstance(d, int) and shape[d] == 1}
    return _map_dims(takes, lambda d: None if d in removed else d - sum(g < d for g in removed))


def _expand(node: Node, takes: Sequence[Tensor]) -> Pairs:
    shape, wide = takes[0].shape, node.outputs[0].shape
    added = len(wide) - len(shape)
    return _map_dims(takes, lambda d: d + added if wide[d + added] == shape[d] else None)


def _all_but_one_dim(
    place: int, *, default: int = 0, removed: bool = False
) -> Callable[..., Pairs]:
    """Allow shards of all dims except the one given at ``place``, which may be removed."""

    def rule(node: Node, takes: Sequence[Tensor]) -> Pairs:
        excluded = argument_dim(node, place, len(takes[0].shape), default)
        return _map_dims(takes, lambda d: None if d == excluded else d - (removed and d > excluded))

    return rule


def _stack(node: Node, takes: Sequence[Tensor]) -> Pairs:
    new = argument_dim(node, 1, len(takes[0].shape) + 1)
    return _map_dims(takes, lambda d: d + (d >= new))


def _padded_gradient(place: int, *, added: bool) -> Callable[..., Pairs]:
    """Allow shards of all dims except the one along which the gradient is padded with zeros."""

    def rule(node: Node, takes: Sequence[Tensor]) -> Pairs:
        dim = argument_dim(node, place, len(node.outputs[0].shape))
        if added:
            return _map_dims(takes, lambda d: d + (d >= dim))
        return _map_dims(takes, lambda d: None if d == dim else d)

    return rule


def _elementwise(_: Node, takes: Sequence[Tensor]) -> Pairs:
    return _map_dims(takes, lambda d: d)


def _all_but_reduced_dim(place: int) -> Callable[..., Pairs]:
    """Allow shards of all dims except the reduced one, which is the argument at ``place``."""

    def rule(node: Node, takes: Sequence[Tensor]) -> Pairs:
        dim = argument_dim(node, place, len(takes[0].shape), -1)
        return [(s, t) for s, t in _map_dims(takes, lambda d: None if d == dim else d)[1:]]

    return rule


def _leading_dims(count: int) -> Callable[..., Pairs]:
    """Allow shards of the first ``count`` dims, or of all but the last ``-count`` if negative."""

    def rule(_: Node, takes: Sequence[Tensor]) -> Pairs:
        rank = len(takes[0].shape)
        allowed = count if count > 0 else rank + count
        return [((Shard(d),) * len(takes), (Shard(d),)) for d in range(allowed)]

    return rule


# --- sums


def _reduction(node: Node, takes: Sequence[Tensor]) -> Pairs:
    shape = takes[0].shape
    argument = node.args[1] if len(node.args) > 1 else None
    listed = argument if isinstance(argument, tuple) else () if argument is None else (argument,)
    dims = {d % len(shape) for d in listed if isinstance(d, int)} or set(range(len(shape)))
    keeps_dims = len(node.outputs[0].shape) == len(shape)
    is_sum = node.op.startswith("aten.sum")
    is_linear = is_sum or node.op.startswith("aten.mean")
    pairs: Pairs = [((PARTIAL,), (PARTIAL,))] if is_linear else []
    for dim in range(len(shape)):
        if dim not in dims:
            new_dim = dim if keeps_dims else dim - sum(d < dim for d in dims)
            pairs.append(((Shard(dim),), (Shard(new_dim),)))
        elif is_sum:
            pairs.append(((Shard(dim),), (PARTIAL,)))
    return pairs


# --- products


def _convolution(node: Node, takes: Sequence[Tensor]) -> Pairs:
    pairs: Pairs = [((Shard(0), *(REPLICATE,) * (len(takes) - 1)), (Shard(0),))]
    if _is_plain_convolution(node.args[6:9]):
        bias = len(takes) - 2
        pairs.append(((REPLICATE, *(Shard(0),) * (1 + bias)), (Shard(1),)))
        pairs.append(((Shard(1), Shard(1), *(PARTIAL,) * bias), (PARTIAL,)))
    return pairs


def _convolution_backward(node: Node, _: Sequence[Tensor]) -> Pairs:
    pairs: Pairs = [((Shard(0), Shard(0), REPLICATE), (Shard(0), PARTIAL, PARTIAL))]
    if _is_plain_convolution(node.args[7:10]):
        pairs.append(((Shard(1), REPLICATE, Shard(0)), (PARTIAL, Shard(0), Shard(0))))
        pairs.append(((REPLICATE, Shard(1), Shard(1)), (Shard(1), Shard(1), REPLICATE)))
    return pairs


def _is_plain_convolution(arguments: Sequence[Argument]) -> bool:
    is_transposed, _, groups = arguments
    return not is_transposed and groups == 1


def _attention(_: Node, takes: Sequence[Tensor]) -> Pairs:
    """Shard by samples or by heads; a mask that is broadcast over them stays replicated."""
    heads = takes[0].shape[1]
    pairs: Pairs = []
    for dim in (0, 1):
        if all(t.shape[1] == heads for t in takes if len(t.shape) > 3 and t.shape[1] != 1):
            placements = [
                Shard(dim) if t.shape[dim] == takes[0].shape[dim] else REPLICATE for t in takes
            ]
            pairs.append((placements, (Shard(dim),)))
    return pairs


def _masked_scale(_: Node, takes: Sequence[Tensor]) -> Pairs:
    pairs: Pairs = [((PARTIAL, REPLICATE), (PARTIAL,))]
    return pairs + [((Shard(d), Shard(d)), (Shard(d),)) for d in range(len(takes[0].shape))]


# --- vocabulary-parallel operators; see vocab_parallel.py


def _embedding(_: Node, takes: Sequence[Tensor]) -> Pairs:
    rank = len(takes[1].shape)
    pairs: Pairs = [((Shard(1), REPLICATE), (Shard(rank),)), ((Shard(0), REPLICATE), (PARTIAL,))]
    return pairs + [((REPLICATE, Shard(d)), (Shard(d),)) for d in range(rank)]


def _embedding_backward(node: Node, takes: Sequence[Tensor]) -> Pairs:
    rank = len(takes[1].shape)
    pairs: Pairs = [
        ((Shard(rank), REPLICATE), (Shard(1),)),
        ((PARTIAL, REPLICATE), (PARTIAL,)),
    ]
    if node.args[3:5] == (-1, False):
        pairs.append(((REPLICATE, REPLICATE), (Shard(0),)))
    return pairs + [((Shard(d), Shard(d)), (PARTIAL,)) for d in range(rank)]


def _log_softmax(node: Node, takes: Sequence[Tensor]) -> Pairs:
    place = 1 if len(takes) == 1 else 2
    dim = argument_dim(node, place, len(takes[0].shape))
    return [*_all_but_reduced_dim(place)(node, takes), ((Shard(dim),) * len(takes), (Shard(dim),))]


def _nll_loss(node: Node, takes: Sequence[Tensor]) -> Pairs:
    """Shard by classes, for a mean or sum over the rows without class weights."""
    if node.args[2] is not None or node.args[3] not in (1, 2) or len(takes[0].shape) != 2:
        return []
    return [((Shard(1), REPLICATE), (REPLICATE, REPLICATE))]


def _nll_loss_backward(node: Node, takes: Sequence[Tensor]) -> Pairs:
    if node.args[3] is not None or node.args[4] not in (1, 2) or len(takes[1].shape) != 2:
        return []
    return [((REPLICATE, Shard(1), REPLICATE, REPLICATE), (Shard(1),))]


# Operators that need each rank's rows or classes to be contiguous: no shards in groups.
CONTIGUOUS_SHARDS_ONLY = frozenset({
    "aten.embedding.default", "aten.embedding_dense_backward.default",
    "aten._log_softmax.default", "aten._log_softmax_backward_data.default",
    "aten.nll_loss_forward.default", "aten.nll_loss_backward.default",
})  # fmt: skip

RULES: dict[str, Rule] = {
    "aten.permute.default": _permute,
    "aten.t.default": _transpose,
    "aten.transpose.int": _transpose,
    "aten.unsqueeze.default": _unsqueeze,
    "aten.squeeze.dim": _squeeze,
    "aten.squeeze.dims": _squeeze,
    "aten.squeeze.default": _squeeze,
    "aten.expand.default": _expand,
    "aten.clone.default": _elementwise,
    "steelyard.copy_strided": _elementwise,
    "aten.slice.Tensor": _all_but_one_dim(1),
    "aten.select.int": _all_but_one_dim(1, removed=True),
    "aten.unbind.int": _all_but_one_dim(1, removed=True),
    "aten.split.Tensor": _all_but_one_dim(2),
    "aten.split_with_sizes.default": _all_but_one_dim(2),
    "aten.cat.default": _all_but_one_dim(1),
    "aten.stack.default": _stack,
    "aten.slice_backward.default": _padded_gradient(2, added=False),
    "aten.select_backward.default": _padded_gradient(2, added=True),
    "aten._softmax.default": _all_but_reduced_dim(1),
    "aten._safe_softmax.default": _all_but_reduced_dim(1),
    "aten._softmax_backward_data.default": _all_but_reduced_dim(2),
    "aten._log_softmax.default": _log_softmax,
    "aten._log_softmax_backward_data.default": _log_softmax,
    "aten.cumsum.default": _all_but_reduced_dim(1),
    "aten.topk.default": _all_but_reduced_dim(2),
    "aten.triu.default": _leading_dims(-2),
    "aten.tril.default": _leading_dims(-2),
    "aten.max_pool2d_with_indices.default": _leading_dims(2),
    "aten.max_pool2d_with_indices_backward.default": _leading_dims(2),
    "aten.avg_pool2d.default": _leading_dims(2),
    "aten.avg_pool2d_backward.default": _leading_dims(2),
    "aten._adaptive_avg_pool2d.default": _leading_dims(2),
    "aten._adaptive_avg_pool2d_backward.default": _leading_dims(2),
    "aten.sum.dim_IntList": _reduction,
    "aten.sum.default": _reduction,
    "aten.mean.dim": _reduction,
    "aten.mean.default": _reduction,
    "aten.amax.default": _reduction,
    "aten.amin.default": _reduction,
    "aten.all.dim": _reduction,
    "aten.any.dim": _reduction,
    "aten.convolution.default": _convolution,
    "aten.convolution_backward.default": _convolution_backward,
    "aten._scaled_dot_product_flash_attention_for_cpu.default": _attention,
    "aten._scaled_dot_product_flash_attention_for_cpu_backward.default": _attention,
    "steelyard.masked_scale.default": _masked_scale,
    "aten.embedding.default": _embedding,
    "aten.embedding_dense_backward.default": _embedding_backward,
    "aten.nll_loss_forward.default": _nll_loss,
    "aten.nll_loss_backward.default": _nll_loss_backward,
}  # fmt: skip

# Operators that read only the shape of their input, each with an operator that takes this shape as
# an argument. The latter creates the full tensor when the input is sharded.
SHAPE_ONLY = {
    "aten.empty_like.default": "aten.new_empty_strided.default",
    "aten.zeros_like.default": "aten.new_zeros.default",
    "aten.ones_like.default": "aten.new_ones.default",
    "aten.full_like.default": "aten.new_full.default",
    "aten.new_empty.default": "",
    "aten.new_empty_strided.default": "",
    "aten.new_zeros.default": "",
    "aten.new_ones.default": "",
    "aten.new_full.default": "",
}
