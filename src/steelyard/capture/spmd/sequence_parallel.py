"""Sequence parallelism: values between tensor-parallel regions lie in parts along the sequence.

Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models", 2022, section
4.2.2; Megatron-LM's --sequence-parallel and torchtitan's SequenceParallel. The sum that leaves a
region is reduce-scattered and what the next region reads whole is all-gathered. Together that is as
many bytes as an all-reduce, and each rank has its part of norms and residuals. For pricing steps
that run elsewhere: ranks of this machine all-reduce these sums (trades/shard_tensor.py).
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
    """Placements for ``Parting.values``; empty where no residual has a sequence that can be cut.

    ``holds_samples`` tells by its size that a dim is that of the batch, which is not cut here.
    """
    found: dict[str, Placement] = {}
    for region in regions:
        for name in region.sums:
            cut = {
                node.name: lies
                for node in _residual_sums(graph, name)
                if (lies := _along_the_sequence(node, num_ranks, holds_samples)) is not None
            }
            if cut:
                found |= cut
                # Gradients of weights and of inputs both read it: gathered once for the two.
                found |= dict.fromkeys(_gradients_read(graph, name), REPLICATE)
    if not found:
        return ()
    for name in [name for region in regions for name in region.wholes]:
        found[name] = REPLICATE
        cut_again = _along_the_sequence(graph.by_name[name], num_ranks, holds_samples)
        if cut_again is not None:
            found |= dict.fromkeys(_gradients_of(graph, name), cut_again)
    return tuple(found.items())


def _along_the_sequence(
    node: Node, num_ranks: int, holds_samples: Callable[[int], bool]
) -> Shard | None:
    """The first dim that holds no samples, of all but the last, which holds features."""
    tensor = node.outputs[0]
    if len(tensor.shape) < 3:
        return None
    dims = range(len(tensor.shape) - 1)
    dim = next((dim for dim in dims if not holds_samples(tensor.shape[dim])), None)
    if dim is None or not fits(tensor, Shard(dim), num_ranks):
        return None
    return Shard(dim)


def _residual_sums(graph: Graph, name: str) -> Iterator[Node]:
    """The first additions of another value of the step to this one, in the forward pass: behind
    views, dropout, and norms that follow it."""
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
    """What comes into the backward pass of the module that made a value: its gradient."""
    made = graph.by_name[name]
    shape = made.outputs[0].shape
    for node in graph.nodes:
        if node.phase is Phase.FORWARD or node.path != made.path:
            continue
        for source in map(graph.by_name.__getitem__, node.inputs):
            comes_in = source.phase is not Phase.FORWARD and source.path != made.path
            if comes_in and not source.is_view and source.outputs[0].shape == shape:
                yield source.name


def _gradients_read(graph: Graph, name: str) -> Iterator[str]:
    """The views of a product's gradient that products of its backward pass share."""
    product = graph.by_name[name]
    numel = product.outputs[0].numel
    for node in graph.nodes:
        if node.phase is Phase.FORWARD or node.path != product.path or not node.is_view:
            continue
        source = graph.by_name[node.inputs[0]]
        comes_in = source.phase is not Phase.FORWARD and source.path != product.path
        if comes_in and node.outputs[0].numel == numel:
            yield node.name
