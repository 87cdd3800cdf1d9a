"""Sequence parallelism: the same step by value, sharded norms, and hardly more bytes exchanged."""

from __future__ import annotations

from collections import Counter

import pytest

from steelyard.capture.spmd.partition import partition
from steelyard.capture.spmd.sequence_parallel import sequence_placements
from steelyard.capture.spmd.shardable_regions import regions
from steelyard.ir.collective import GLOO, Exchange
from steelyard.ir.graph import Graph, Phase
from steelyard.ir.placement import REPLICATE, Shard
from steelyard.ir.sharding_choice import ShardingChoice
from tests.support.torch_since import torch_since
from tests.torch.capture.spmd.test_partition import ROUNDING_SINGLE, Whole

pytestmark = torch_since((2, 12), "DTensor has rules without a mesh since torch 2.12")

_RANKS = 2


def _choices(graph: Graph, samples: int) -> tuple[ShardingChoice, ShardingChoice]:
    """Return tensor parallelism without and with sequence parallelism; no tensor is sharded
    twice."""
    found = regions(graph, num_ranks=_RANKS)
    lies = {name: at for region in reversed(found) for name, at in region.inputs}
    values = sequence_placements(
        graph, found, num_ranks=_RANKS, holds_samples=lambda size: size == samples
    )
    assert values
    inputs = tuple(lies.items())
    plain = ShardingChoice(axis="tensor", num_ranks=_RANKS, inputs=inputs)
    return plain, ShardingChoice(axis="tensor", num_ranks=_RANKS, inputs=inputs, values=values)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt", "hf_llama"])
def test_the_step_is_the_same_and_activations_are_not_all_reduced(name: str) -> None:
    whole = Whole.named(name)
    plain, along = _choices(whole.graph, samples=_samples(whole))
    graphs = whole.in_parts(along)
    assert whole.error(along, graphs) < ROUNDING_SINGLE
    before = partition(whole.graph, plain, rank=0, transport=GLOO)
    # An all-reduce becomes a reduce-scatter and an all-gather; there is one more gather at either
    # end.
    assert _sent_bytes(graphs[0]) < 1.15 * _sent_bytes(before)
    counts = _counts(graphs[0])
    assert counts[Phase.FORWARD, Exchange.REDUCE_SCATTER] >= 4  # two in each of two blocks
    assert (
        counts[Phase.FORWARD, Exchange.ALL_REDUCE]
        < _counts(before)[Phase.FORWARD, Exchange.ALL_REDUCE]
    )
    assert _norms(graphs[0]) * _RANKS == _norms(before)


def _samples(whole: Whole) -> int:
    leaves = whole.batch.values() if isinstance(whole.batch, dict) else [whole.batch]
    return int(next(iter(leaves)).shape[0])


def _counts(graph: Graph) -> Counter[tuple[Phase, Exchange]]:
    nodes = [graph.by_name[name] for name in graph.collectives]
    return Counter((n.phase, n.collective.kind) for n in nodes if n.collective)


def _sent_bytes(graph: Graph) -> int:
    nodes = [graph.by_name[name] for name in graph.collectives]
    return sum(n.collective.sent_bytes for n in nodes if n.collective)


def _norms(graph: Graph) -> int:
    """Return the number of elements that the norms of blocks return in the forward pass."""
    ops = ("aten.native_layer_norm.default", "aten.rsqrt.default")
    return sum(
        node.outputs[0].numel
        for node in graph.forward()
        if node.op in ops and ".1." in f"{node.path}."
    )


def test_a_model_without_a_sequence_is_unchanged() -> None:
    """Rows of features have no dim besides samples and features that could be sharded."""
    whole = Whole.named("mlp")
    found = regions(whole.graph, num_ranks=_RANKS)
    values = sequence_placements(
        whole.graph, found, num_ranks=_RANKS, holds_samples=lambda size: size == _samples(whole)
    )
    assert values == ()


def test_sequence_parallelism_does_not_split_the_batch() -> None:
    whole = Whole.named("gpt")
    samples = _samples(whole)
    _, along = _choices(whole.graph, samples)
    cut = [(name, lies) for name, lies in along.values if lies != REPLICATE]
    assert cut
    for name, lies in cut:
        assert isinstance(lies, Shard)
        node = whole.graph.by_name[name]
        assert node.outputs[0].shape[lies.dim] != samples
        assert lies.dim < len(node.outputs[0].shape) - 1
