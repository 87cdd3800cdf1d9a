"""Sequence parallelism: shards values between tensor-parallel regions along the sequence.

Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models", 2022, section
4.2.2; Megatron-LM's --sequence-parallel and torchtitan's SequenceParallel. The sum that leaves a
region is reduce-scattered, and the input of the next region is all-gathered. Together these move as
many bytes as one all-reduce, and each rank computes only its shard of norms and residuals. This is
only for pricing steps on declared clusters; steps that run here all-reduce these sums
(trades/shard_tensor.py).
"""

from collections.abc import Callable, Iterator, Sequence

from steelyard.ir.graph import Graph, Node, Phase
from steelyard.ir.placement import REPLICATE, Placement, Shard, fits
from steelyard.ir.sharding_choice import Region

_ADD = "aten.add.Tensor"


def sequence_placements(
    graph: Graph,
    regions: Sequence[Region],
    *,
    num_ranks: int,
    holds_samples: Callable[[int], bool],
) -> tuple[tuple[str, Placement], ...]:
    """Return placements for ``ShardingChoice.values``; empty if no residual can be sharded.

    ``holds_samples`` recognizes the batch dim by its size; that dim is not sharded here.
    """
    found: dict[str, Placement] = {}
    for region in regions:
        for name in region.sums:
            sharded = {
                node.name: shard
                for node in _residual_sums(graph, name)
                if (shard := _sequence_shard(node, num_ranks, holds_samples)) is not None
            }
            if sharded:
                found |= sharded
                # The gradients of weights and of inputs both read it, so it is gathered once for
                # both.
                found |= dict.fromkeys(_gradient_views(graph, name), REPLICATE)
    if not found:
        return ()
    for name in [name for region in regions for name in region.wholes]:
        found[name] = REPLICATE
        shard = _sequence_shard(graph.by_name[name], num_ranks, holds_samples)
        if shard is not None:
            found |= dict.fromkeys(_gradients_of(graph, name), shard)
    return tuple(found.items())


def _sequence_shard(
    node: Node, num_ranks: int, holds_samples: Callable[[int], bool]
) -> Shard | None:
    """Return a shard of the first dim that is neither the batch nor the last one (features)."""
    tensor = node.outputs[0]
    if len(tensor.shape) < 3:
        return None
    dims = range(len(tensor.shape) - 1)
    dim = next((dim for dim in dims if not holds_samples(tensor.shape[dim])), None)
    if dim is None or not fits(tensor, Shard(dim), num_ranks):
        return None
    return Shard(dim)


def _residual_sums(graph: Graph, name: str) -> Iterator[Node]:
    """Yield the first forward additions of another computed value (residual) to this value.

    Views, dropout and norms may lie between the value and the addition.
    """
    numel = graph.by_name[name].outputs[0].numel
    pending, seen = [name], {name}
    while pending:
        for user in graph.users[pending.pop()]:
            node = graph.by_name[user]
            if node.phase is not Phase.FORWARD or user in seen or node.flops:
                continue
            seen.add(user)
            others = [n for n in node.inputs if n not in seen and not graph.by_name[n].is_input]
            if node.op == _ADD and others:
                yield node
            elif node.outputs[0].numel == numel:
                pending.append(user)


def _gradients_of(graph: Graph, name: str) -> Iterator[str]:
    """Yield the gradients of a value: inputs to the backward pass of the module that made it."""
    made = graph.by_name[name]
    shape = made.outputs[0].shape
    for node in graph.nodes:
        if node.phase is Phase.FORWARD or node.path != made.path:
            continue
        for source in map(graph.by_name.__getitem__, node.inputs):
            is_incoming = source.phase is not Phase.FORWARD and source.path != made.path
            if is_incoming and not source.is_view and source.outputs[0].shape == shape:
                yield source.name


def _gradient_views(graph: Graph, name: str) -> Iterator[str]:
    """Yield the views of a matmul's output gradient that the matmuls of its backward pass share."""
    matmul = graph.by_name[name]
    numel = matmul.outputs[0].numel
    for node in graph.nodes:
        if node.phase is Phase.FORWARD or node.path != matmul.path or not node.is_view:
            continue
        source = graph.by_name[node.inputs[0]]
        is_incoming = source.phase is not Phase.FORWARD and source.path != matmul.path
        if is_incoming and node.outputs[0].numel == numel:
            yield node.name
