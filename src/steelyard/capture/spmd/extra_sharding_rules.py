"""Which placements operators take and give for which DTensor (torch 2.13) has no rule of use here.

Its rules for those that move dims or sum ask for a mesh; convolutions by channel and split
vocabularies it carries out in handlers of its own. A rule lists pairs: what a call takes, and what
it gives then. Not for views, nor for which pair is taken: see sharding_strategies.py and
partition.py.
"""

from collections.abc import Callable, Sequence

from steelyard.ir.graph import Argument, Node, Tensor
from steelyard.ir.placement import PARTIAL, REPLICATE, Placement, Shard

Pairs = list[tuple[Sequence[Placement], Sequence[Placement]]]
Rule = Callable[[Node, Sequence[Tensor]], Pairs]


# --- operators that put dims elsewhere, or keep some of them apart


def _moved(takes: Sequence[Tensor], target: Callable[[int], int | None]) -> Pairs:
    """Shards go where ``target`` says that their dim goes; a sum may as well be moved in terms."""
    rank, count = len(takes[0].shape), len(takes)
    pairs: Pairs = [((PARTIAL,) * count, (PARTIAL,))]
    for dim in range(rank):
        place = target(dim)
        if place is not None:
            pairs.append(((Shard(dim),) * count, (Shard(place),)))
    return pairs


def argument_dim(node: Node, place: int, rank: int, default: int = 0) -> int:
    value = node.args[place] if len(node.args) > place else dict(node.kwargs).get("dim", default)
    assert isinstance(value, int)
    return value % rank if rank else 0


def _permuted(node: Node, takes: Sequence[Tensor]) -> Pairs:
    rank = len(takes[0].shape)
    order = node.args[1]
    assert isinstance(order, tuple)
    dims = [int(d) % rank for d in order if isinstance(d, int)]
    return _moved(takes, dims.index)


def _transposed(node: Node, takes: Sequence[Tensor]) -> Pairs:
    rank = len(takes[0].shape)
    if node.op == "aten.t.default":
        one, other = 0, rank - 1
    else:
        one, other = argument_dim(node, 1, rank), argument_dim(node, 2, rank)
    swapped = {one: other, other: one}
    return _moved(takes, lambda d: swapped.get(d, d))


def _unsqueezed(node: Node, takes: Sequence[Tensor]) -> Pairs:
    new = argument_dim(node, 1, len(takes[0].shape) + 1)
    return _moved(takes, lambda d: d + (d >= new))


def _squeezed(node: Node, takes: Sequence[Tensor]) -> Pairs:
    shape = takes[0].shape
    given = node.args[1] if len(node.args) > 1 else tuple(range(len(shape)))
    listed = given if isinstance(given, tuple) else (given,)
    gone = {d % len(shape) for d in listed if isinstance(d, int) and shape[d] == 1}
    return _moved(takes, lambda d: None if d in gone else d - sum(g < d for g in gone))


def _expanded(node: Node, takes: Sequence[Tensor]) -> Pairs:
    shape, wide = takes[0].shape, node.outputs[0].shape
    ahead = len(wide) - len(shape)
    return _moved(takes, lambda d: d + ahead if wide[d + ahead] == shape[d] else None)


def _but_one(place: int, *, default: int = 0, removed: bool = False) -> Callable[..., Pairs]:
    """All dims but the one that the argument at ``place`` names, which may be gone afterwards."""

    def rule(node: Node, takes: Sequence[Tensor]) -> Pairs:
        gone = argument_dim(node, place, len(takes[0].shape), default)
        return _moved(takes, lambda d: None if d == gone else d - (removed and d > gone))

    return rule


def _stacked(node: Node, takes: Sequence[Tensor]) -> Pairs:
    new = argument_dim(node, 1, len(takes[0].shape) + 1)
    return _moved(takes, lambda d: d + (d >= new))


def _put_back(place: int, *, added: bool) -> Callable[..., Pairs]:
    """The gradient of a part, in zeros along the dim of which it was a part."""

    def rule(node: Node, takes: Sequence[Tensor]) -> Pairs:
        dim = argument_dim(node, place, len(node.outputs[0].shape))
        if added:
            return _moved(takes, lambda d: d + (d >= dim))
        return _moved(takes, lambda d: None if d == dim else d)

    return rule


def _alike(_: Node, takes: Sequence[Tensor]) -> Pairs:
    return _moved(takes, lambda d: d)


def _apart(place: int) -> Callable[..., Pairs]:
    """Each line along the dim that the argument at ``place`` names is worked on by itself."""

    def rule(node: Node, takes: Sequence[Tensor]) -> Pairs:
        dim = argument_dim(node, place, len(takes[0].shape), -1)
        return [(s, t) for s, t in _moved(takes, lambda d: None if d == dim else d)[1:]]

    return rule


def _first(count: int) -> Callable[..., Pairs]:
    """The first ``count`` dims hold what does not meet; from the end where it is negative."""

    def rule(_: Node, takes: Sequence[Tensor]) -> Pairs:
        rank = len(takes[0].shape)
        kept = count if count > 0 else rank + count
        return [((Shard(d),) * len(takes), (Shard(d),)) for d in range(kept)]

    return rule


# --- sums


def _reduced(node: Node, takes: Sequence[Tensor]) -> Pairs:
    shape = takes[0].shape
    given = node.args[1] if len(node.args) > 1 else None
    listed = given if isinstance(given, tuple) else () if given is None else (given,)
    dims = {d % len(shape) for d in listed if isinstance(d, int)} or set(range(len(shape)))
    stays = len(node.outputs[0].shape) == len(shape)
    is_sum = node.op.startswith("aten.sum")
    is_linear = is_sum or node.op.startswith("aten.mean")
    pairs: Pairs = [((PARTIAL,), (PARTIAL,))] if is_linear else []
    for dim in range(len(shape)):
        if dim not in dims:
            place = dim if stays else dim - sum(d < dim for d in dims)
            pairs.append(((Shard(dim),), (Shard(place),)))
        elif is_sum:
            pairs.append(((Shard(dim),), (PARTIAL,)))
    return pairs


# --- products


def _convolved(node: Node, takes: Sequence[Tensor]) -> Pairs:
    pairs: Pairs = [((Shard(0), *(REPLICATE,) * (len(takes) - 1)), (Shard(0),))]
    if _is_plain_convolution(node.args[6:9]):
        bias = len(takes) - 2
        pairs.append(((REPLICATE, *(Shard(0),) * (1 + bias)), (Shard(1),)))
        pairs.append(((Shard(1), Shard(1), *(PARTIAL,) * bias), (PARTIAL,)))
    return pairs


def _convolved_back(node: Node, _: Sequence[Tensor]) -> Pairs:
    pairs: Pairs = [((Shard(0), Shard(0), REPLICATE), (Shard(0), PARTIAL, PARTIAL))]
    if _is_plain_convolution(node.args[7:10]):
        pairs.append(((Shard(1), REPLICATE, Shard(0)), (PARTIAL, Shard(0), Shard(0))))
        pairs.append(((REPLICATE, Shard(1), Shard(1)), (Shard(1), Shard(1), REPLICATE)))
    return pairs


def _is_plain_convolution(arguments: Sequence[Argument]) -> bool:
    is_transposed, _, groups = arguments
    return not is_transposed and groups == 1


def _attention(_: Node, takes: Sequence[Tensor]) -> Pairs:
    """Samples and heads are worked on by themselves; a mask may be the same for all of them."""
    heads = takes[0].shape[1]
    pairs: Pairs = []
    for dim in (0, 1):
        if all(t.shape[1] == heads for t in takes if len(t.shape) > 3 and t.shape[1] != 1):
            given = [
                Shard(dim) if t.shape[dim] == takes[0].shape[dim] else REPLICATE for t in takes
            ]
            pairs.append((given, (Shard(dim),)))
    return pairs


def _masked(_: Node, takes: Sequence[Tensor]) -> Pairs:
    pairs: Pairs = [((PARTIAL, REPLICATE), (PARTIAL,))]
    return pairs + [((Shard(d), Shard(d)), (Shard(d),)) for d in range(len(takes[0].shape))]


# --- a vocabulary in parts; see vocab_parallel.py


def _looked_up(_: Node, takes: Sequence[Tensor]) -> Pairs:
    rank = len(takes[1].shape)
    pairs: Pairs = [((Shard(1), REPLICATE), (Shard(rank),)), ((Shard(0), REPLICATE), (PARTIAL,))]
    return pairs + [((REPLICATE, Shard(d)), (Shard(d),)) for d in range(rank)]


def _looked_up_back(node: Node, takes: Sequence[Tensor]) -> Pairs:
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
    return [*_apart(place)(node, takes), ((Shard(dim),) * len(takes), (Shard(dim),))]


def _lost(node: Node, takes: Sequence[Tensor]) -> Pairs:
    """The mean or sum over rows of the scores of their targets, classes unweighed."""
    if node.args[2] is not None or node.args[3] not in (1, 2) or len(takes[0].shape) != 2:
        return []
    return [((Shard(1), REPLICATE), (REPLICATE, REPLICATE))]


def _lost_back(node: Node, takes: Sequence[Tensor]) -> Pairs:
    if node.args[3] is not None or node.args[4] not in (1, 2) or len(takes[1].shape) != 2:
        return []
    return [((REPLICATE, Shard(1), REPLICATE, REPLICATE), (Shard(1),))]


# Each rank's rows or classes are to follow one another.
BY_ROWS = frozenset({
    "aten.embedding.default", "aten.embedding_dense_backward.default",
    "aten._log_softmax.default", "aten._log_softmax_backward_data.default",
    "aten.nll_loss_forward.default", "aten.nll_loss_backward.default",
})  # fmt: skip

OWN: dict[str, Rule] = {
    "aten.permute.default": _permuted,
    "aten.t.default": _transposed,
    "aten.transpose.int": _transposed,
    "aten.unsqueeze.default": _unsqueezed,
    "aten.squeeze.dim": _squeezed,
    "aten.squeeze.dims": _squeezed,
    "aten.squeeze.default": _squeezed,
    "aten.expand.default": _expanded,
    "aten.clone.default": _alike,
    "steelyard.copy_laid_out": _alike,
    "aten.slice.Tensor": _but_one(1),
    "aten.select.int": _but_one(1, removed=True),
    "aten.unbind.int": _but_one(1, removed=True),
    "aten.split.Tensor": _but_one(2),
    "aten.split_with_sizes.default": _but_one(2),
    "aten.cat.default": _but_one(1),
    "aten.stack.default": _stacked,
    "aten.slice_backward.default": _put_back(2, added=False),
    "aten.select_backward.default": _put_back(2, added=True),
    "aten._softmax.default": _apart(1),
    "aten._safe_softmax.default": _apart(1),
    "aten._softmax_backward_data.default": _apart(2),
    "aten._log_softmax.default": _log_softmax,
    "aten._log_softmax_backward_data.default": _log_softmax,
    "aten.cumsum.default": _apart(1),
    "aten.topk.default": _apart(2),
    "aten.triu.default": _first(-2),
    "aten.tril.default": _first(-2),
    "aten.max_pool2d_with_indices.default": _first(2),
    "aten.max_pool2d_with_indices_backward.default": _first(2),
    "aten.avg_pool2d.default": _first(2),
    "aten.avg_pool2d_backward.default": _first(2),
    "aten._adaptive_avg_pool2d.default": _first(2),
    "aten._adaptive_avg_pool2d_backward.default": _first(2),
    "aten.sum.dim_IntList": _reduced,
    "aten.sum.default": _reduced,
    "aten.mean.dim": _reduced,
    "aten.mean.default": _reduced,
    "aten.amax.default": _reduced,
    "aten.amin.default": _reduced,
    "aten.all.dim": _reduced,
    "aten.any.dim": _reduced,
    "aten.convolution.default": _convolved,
    "aten.convolution_backward.default": _convolved_back,
    "aten._scaled_dot_product_flash_attention_for_cpu.default": _attention,
    "aten._scaled_dot_product_flash_attention_for_cpu_backward.default": _attention,
    "steelyard.masked_scale.default": _masked,
    "aten.embedding.default": _looked_up,
    "aten.embedding_dense_backward.default": _looked_up_back,
    "aten.nll_loss_forward.default": _lost,
    "aten.nll_loss_backward.default": _lost_back,
}  # fmt: skip

# What reads no values, and what says the same of a whole, of which only a part is at hand.
VALUELESS = {
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
