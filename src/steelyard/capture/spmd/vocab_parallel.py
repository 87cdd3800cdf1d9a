"""A table of which each rank holds some rows: looked up, scored against, and their gradients.

What Megatron-LM does by hand for embedding and cross entropy (Shoeybi et al., 2019, section 3), as
nodes of one rank's graph. Where it reduces the maximum and then the sum of exponentials, one gather
of each rank's logarithm of its own sum says as much.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

from steelyard.capture.spmd.local_graph import LocalGraphBuilder
from steelyard.capture.spmd.redistribute import redistributed, viewed
from steelyard.ir.graph import Argument, Node, Ref, Symbol
from steelyard.ir.placement import PARTIAL, REPLICATE, Placement, Shard, Strategy

# Takes the arguments of the call on this rank's parts; gives the values of its results.
Split = Callable[[LocalGraphBuilder, Node, tuple[Argument, ...]], tuple[str, ...]]


def split_by_rows(node: Node, strategy: Strategy) -> Split | None:
    """How a call on a part of the rows is carried out; None where the operator can do it itself."""
    takes, gives = strategy.takes, strategy.gives
    match node.op:
        case "aten.embedding.default" if takes[0] == Shard(0):
            return _looked_up
        case "aten.embedding_dense_backward.default" if _is_rows(takes, gives):
            return _looked_up_back
        case "aten._log_softmax.default" if takes[0] == Shard(_dim(node, 1)):
            return _log_softmax
        case "aten._log_softmax_backward_data.default" if takes[0] == Shard(_dim(node, 2)):
            return _log_softmax_back
        case "aten.nll_loss_forward.default" if takes[0] == Shard(1):
            return _lost
        case "aten.nll_loss_backward.default" if takes[1] == Shard(1):
            return _lost_back
    return None


def _is_rows(takes: Sequence[Placement], gives: Sequence[Placement]) -> bool:
    return gives[0] == Shard(0) and takes == (REPLICATE, REPLICATE)


def _dim(node: Node, place: int) -> int:
    dim = node.args[place]
    assert isinstance(dim, int)
    return dim % len(node.outputs[0].shape)


def _looked_up(local: LocalGraphBuilder, node: Node, args: tuple[Argument, ...]) -> tuple[str, ...]:
    table, indices, *_ = args
    assert isinstance(table, Ref)
    rows = local.shape(table.name)[0]
    own, others = _own_rows(local, node, indices, rows)
    found = local.call("aten.embedding.default", table, Ref(own), at=node)
    mask = local.call("aten.unsqueeze.default", Ref(others), -1, at=node)
    return (local.like(_as(node, "aten.masked_fill.Scalar"), (Ref(found), Ref(mask), 0)),)


def _looked_up_back(
    local: LocalGraphBuilder, node: Node, args: tuple[Argument, ...]
) -> tuple[str, ...]:
    gradient, indices, rows, padding, by_frequency = args
    assert isinstance(rows, int)
    rows //= local.num_ranks
    own, others = _own_rows(local, node, indices, rows)
    mask = local.call("aten.unsqueeze.default", Ref(others), -1, at=node)
    kept = local.call("aten.masked_fill.Scalar", gradient, Ref(mask), 0, at=node)
    return (local.like(node, (Ref(kept), Ref(own), rows, padding, by_frequency)),)


def _own_rows(
    local: LocalGraphBuilder, node: Node, indices: Argument, rows: int
) -> tuple[str, str]:
    """Indices from the first of this rank's rows on, 0 for those of others; and which these are."""
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
    each = local.call("aten.unsqueeze.default", Ref(part), 0, at=node)
    every = redistributed(local, each, Shard(0), REPLICATE, at=node)
    total = local.call("aten.logsumexp.default", Ref(every), (0,), at=node)
    total = viewed(local, total, shape, at=node)
    return (local.like(_as(node, "aten.sub.Tensor"), (scores, Ref(total))),)


def _log_softmax_back(
    local: LocalGraphBuilder, node: Node, args: tuple[Argument, ...]
) -> tuple[str, ...]:
    gradient, result, dim, _ = args
    assert isinstance(dim, int)
    part = local.call("aten.sum.dim_IntList", gradient, (dim,), True, at=node)
    total = redistributed(local, part, PARTIAL, REPLICATE, at=node)
    shares = local.call("aten.exp.default", result, at=node)
    taken = local.call("aten.mul.Tensor", Ref(shares), Ref(total), at=node)
    return (local.like(_as(node, "aten.sub.Tensor"), (gradient, Ref(taken))),)


_MEAN, _SUM = 1, 2  # as ATen numbers its reductions


def _lost(local: LocalGraphBuilder, node: Node, args: tuple[Argument, ...]) -> tuple[str, ...]:
    scores, targets, _, reduction, ignored = args
    own = _own_targets(local, node, scores, targets, ignored)
    summed = (scores, Ref(own), None, _SUM, ignored)
    part = local.call("aten.nll_loss_forward.default", *summed, at=node)
    lost = local.getitem(part, 0, at=node)
    loss = redistributed(local, lost, PARTIAL, REPLICATE, at=node)
    assert isinstance(scores, Ref)
    kept = local.call("aten.ne.Scalar", targets, ignored, at=node)
    dtype = f"torch.{local.tensor(scores.name).dtype}"
    weight = local.call("aten.sum.default", Ref(kept), at=node, dtype=Symbol(dtype))
    if reduction == _MEAN:
        loss = local.call("aten.div.Tensor", Ref(loss), Ref(weight), at=node)
    return loss, weight


def _lost_back(local: LocalGraphBuilder, node: Node, args: tuple[Argument, ...]) -> tuple[str, ...]:
    gradient, scores, targets, weights, reduction, ignored, total = args
    own = _own_targets(local, node, scores, targets, ignored)
    given = (gradient, scores, Ref(own), weights, reduction, ignored, total)
    return (local.like(node, given),)


def _own_targets(
    local: LocalGraphBuilder, node: Node, scores: Argument, targets: Argument, ignored: Argument
) -> str:
    """Targets from the first of this rank's classes on; those of others count as ignored."""
    assert isinstance(scores, Ref)
    own, others = _own_rows(local, node, targets, local.shape(scores.name)[1])
    return local.call("aten.masked_fill.Scalar", Ref(own), Ref(others), ignored, at=node)


def _as(node: Node, op: str) -> Node:
    """The call whose result takes the place of the node's."""
    return replace(node, op=op, kwargs=(), nth=-1)
