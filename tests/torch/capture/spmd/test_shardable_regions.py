"""Shardable regions of a step, and the costs of the sharded step compared with the stated ones."""

from __future__ import annotations

import pytest

from steelyard.capture.spmd.shardable_regions import regions
from steelyard.ir.placement import Shard
from steelyard.ir.sharding_choice import ShardingChoice
from tests.support.torch_since import torch_since
from tests.torch.capture.spmd.test_partition import ROUNDING, ROUNDING_SINGLE, Whole

pytestmark = torch_since((2, 12), "DTensor has rules without a mesh since torch 2.12")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt", "moe", "hf_llama", "resnet_bn"])
def test_a_sharded_region_sends_its_stated_bytes_and_computes_the_same(name: str) -> None:
    whole = Whole.named(name)
    bound = ROUNDING_SINGLE if name == "hf_llama" else ROUNDING
    found = regions(whole.graph, num_ranks=2)
    for region in found:
        choice = ShardingChoice(axis="tensor", num_ranks=2, inputs=region.inputs)
        graphs = whole.in_parts(choice)
        assert whole.error(choice, graphs) < bound, region
        exchanges = [graphs[0].by_name[n].collective for n in graphs[0].collectives]
        sent = sum(e.sent_bytes for e in exchanges if e is not None)
        # An all-reduce over two ranks sends as many bytes as it reduces. A sharded vocabulary also
        # exchanges a few numbers for each row; this loss has at most 64 rows.
        assert 0 <= sent - region.exchanged_bytes <= 64 * 3 * 8, region
        # Each product of the forward pass has two in the backward pass, except those with the
        # batch.
        divided = whole.graph.flops - graphs[0].flops
        assert 0.9 * 3 * region.flops / 2 <= divided <= 3 * region.flops / 2, region


def test_attention_and_mlp_are_found_in_every_block() -> None:
    found = {r.path: dict(r.inputs) for r in regions(Whole.named("gpt").graph, num_ranks=2)}
    for layer in range(2):
        at = f"blocks.{layer}"
        assert found[f"{at}.mlp"] == {
            f"parameter:{at}.mlp.up.weight": Shard(0),
            f"parameter:{at}.mlp.up.bias": Shard(0),
            f"parameter:{at}.mlp.down.weight": Shard(1),
        }
        # One weight holds queries, keys and values: three groups of heads.
        assert found[f"{at}.attention"] == {
            f"parameter:{at}.attention.qkv.weight": Shard(0, 3),
            f"parameter:{at}.attention.qkv.bias": Shard(0, 3),
            f"parameter:{at}.attention.out.weight": Shard(1),
        }


def test_a_tied_vocabulary_is_one_region_from_its_table_to_the_loss() -> None:
    (found,) = [
        r
        for r in regions(Whole.named("gpt").graph, num_ranks=2)
        if "token.weight" in r.inputs[0][0]
    ]
    assert found.inputs == (("parameter:token.weight", Shard(0)),)
    assert len(found.sums) == len(found.wholes) == 1


def test_heads_are_not_sharded_over_more_ranks_than_heads() -> None:
    graph = Whole.named("gpt").graph  # the model has two heads
    attention = [r for r in regions(graph, num_ranks=4) if r.path.endswith("attention")]
    two = [r for r in regions(graph, num_ranks=2) if r.path.endswith("attention")]
    assert len(two) == 2
    # The remaining choice is to split each head, which makes the scores a sum.
    assert all(len(r.sums) > len(two[0].sums) for r in attention)
