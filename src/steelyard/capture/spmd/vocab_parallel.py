"""Vocabulary parallelism: embedding and cross entropy on a table that is sharded by rows.

It does what Megatron-LM does by hand (Shoeybi et al., 2019, section 3), as nodes in the graph of
one rank. Megatron-LM all-reduces the maximum and then the sum of exponentials; here a single
all-gather of each rank's logsumexp is enough. Not for the placements that allow this: see
extra_sharding_rules.py.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

from steelyard.capture.spmd.local_graph import LocalGraphBuilder
from steelyard.capture.spmd.redistribute import redistribute, view_as
from steelyard.ir.graph import Argument, Node, Ref, Symbol
from steelyard.ir.placement import PARTIAL, REPLICATE, Placement, Shard, Strategy

# Takes the arguments of the call as this rank's shards; returns the names of its results.
Split = Callable[[LocalGraphBuilder, Node, tuple[Argument, ...]], tuple[str, ...]]


def split_by_rows(node: Node, strategy: Strategy) -> Split | None:
    """Return the function that records a row-sharded call; None if the operator needs no change."""
    takes, gives = strategy.takes, strategy.gives
    match node.op:
        case "aten.embedding.default" if takes[0] == Shard(0):
            return _embedding
        case "aten.embedding_dense_backward.default" if _is_row_sharded(takes, gives):
            return _embedding_backward
        case "aten._log_softmax.default" if takes[0] == Shard(_dim(node, 1)):
            return _log_softmax
        case "aten._log_softmax_backward_data.default" if takes[0] == Shard(_dim(node, 2)):
            return _log_softmax_backward
        case "aten.nll_loss_forward.default" if takes[0] == Shard(1):
            return _nll_loss
        case "aten.nll_loss_backward.default" if takes[1] == Shard(1):
            return _nll_loss_backward
    return None


def _is_row_sharded(takes: Sequence[Placement], gives: Sequence[Placement]) -> bool:
    return gives[0] == Shard(0) and takes == (REPLICATE, REPLICATE)


def _dim(node: Node, place: int) -> int:
    dim = node.args[place]
    assert isinstance(dim, int)
    return dim % len(node.outputs[0].shape)


def _embedding(local: LocalGraphBuilder, node: Node, args: tuple[Argument, ...]) -> tuple[str, ...]:
    table, indices, *_ = args
    assert isinstance(table, Ref)
    rows = local.shape(table.name)[0]
    own, others = _own_rows(local, node, indices, rows)
    embedded = local.call("aten.embedding.default", table, Ref(own), at=node)
    mask = local.call("aten.unsqueeze.default", Ref(others), -1, at=node)
    return (local.like(_with_op(node, "aten.masked_fill.Scalar"), (Ref(embedded), Ref(mask), 0)),)


def _embedding_backward(
    local: LocalGraphBuilder, node: Node, args: tuple[Argument, ...]
) -> tuple[str, ...]:
    gradient, indices, rows, padding, by_frequency = args
    assert isinstance(rows, int)
    rows //= local.num_ranks
    own, others = _own_rows(local, node, indices, rows)
    mask = local.call("aten.unsqueeze.default", Ref(others), -1, at=node)
    own_gradient = local.call("aten.masked_fill.Scalar", gradient, Ref(mask), 0, at=node)
    return (local.like(node, (Ref(own_gradient), Ref(own), rows, padding, by_frequency)),)


def _own_rows(
    local: LocalGraphBuilder, node: Node, indices: Argument, rows: int
) -> tuple[str, str]:
    """Return indices relative to this rank's first row (0 for rows of other ranks), and their
    mask.
    """
    shifted = local.call("aten.sub.Scalar", indices, local.rank * rows, at=node)
    below = local.call("aten.lt.Scalar", Ref(shifted), 0, at=node)
    above = local.call("aten.ge.Scalar", Ref(shifted), rows, at=node)
    others = local.call("aten.logical_or.default", Ref(below), Ref(above), at=node)
    own = local.call("aten.masked_fill.Scalar", Ref(shifted), Ref(others), 0, at=node)
    return own, others


def _log_softmax(
    local: LocalGraphBuilder, node: Node, args: tuple[Argument, ...]
) -> tuple[str, ...]:
    scores, dim, _ = args
    assert isinstance(dim, int)
    part = local.call("aten.logsumexp.default", scores, (dim,), True, at=node)
    shape = local.shape(part)
    stacked = local.call("aten.unsqueeze.default", Ref(part), 0, at=node)
    gathered = redistribute(local, stacked, Shard(0), REPLICATE, at=node)
    total = local.call("aten.logsumexp.default", Ref(gathered), (0,), at=node)
    total = view_as(local, total, shape, at=node)
    return (local.like(_with_op(node, "aten.sub.Tensor"), (scores, Ref(total))),)


def _log_softmax_backward(
    local: LocalGraphBuilder, node: Node, args: tuple[Argument, ...]
) -> tuple[str, ...]:
    gradient, result, dim, _ = args
    assert isinstance(dim, int)
    part = local.call("aten.sum.dim_IntList", gradient, (dim,), True, at=node)
    total = redistribute(local, part, PARTIAL, REPLICATE, at=node)
    probabilities = local.call("aten.exp.default", result, at=node)
    correction = local.call("aten.mul.Tensor", Ref(probabilities), Ref(total), at=node)
    return (local.like(_with_op(node, "aten.sub.Tensor"), (gradient, Ref(correction))),)


_MEAN, _SUM = 1, 2  # the number of this reduction in ATen


def _nll_loss(local: LocalGraphBuilder, node: Node, args: tuple[Argument, ...]) -> tuple[str, ...]:
    scores, targets, _, reduction, ignored = args
    own = _own_targets(local, node, scores, targets, ignored)
    arguments = (scores, Ref(own), None, _SUM, ignored)
    part = local.call("aten.nll_loss_forward.default", *arguments, at=node)
    local_loss = local.getitem(part, 0, at=node)
    loss = redistribute(local, local_loss, PARTIAL, REPLICATE, at=node)
    assert isinstance(scores, Ref)
    counted = local.call("aten.ne.Scalar", targets, ignored, at=node)
    dtype = f"torch.{local.tensor(scores.name).dtype}"
    weight = local.call("aten.sum.default", Ref(counted), at=node, dtype=Symbol(dtype))
    if reduction == _MEAN:
        loss = local.call("aten.div.Tensor", Ref(loss), Ref(weight), at=node)
    return loss, weight


def _nll_loss_backward(
    local: LocalGraphBuilder, node: Node, args: tuple[Argument, ...]
) -> tuple[str, ...]:
    gradient, scores, targets, weights, reduction, ignored, total = args
    own = _own_targets(local, node, scores, targets, ignored)
    arguments = (gradient, scores, Ref(own), weights, reduction, ignored, total)
    return (local.like(node, arguments),)


def _own_targets(
    local: LocalGraphBuilder, node: Node, scores: Argument, targets: Argument, ignored: Argument
) -> str:
    """Return targets relative to this rank's first class; other ranks' targets become ignored."""
    assert isinstance(scores, Ref)
    own, others = _own_rows(local, node, targets, local.shape(scores.name)[1])
    return local.call("aten.masked_fill.Scalar", Ref(own), Ref(others), ignored, at=node)


def _with_op(node: Node, op: str) -> Node:
    """Return ``node`` with another operator, whose result replaces the original one."""
    return replace(node, op=op, kwargs=(), nth=-1)
