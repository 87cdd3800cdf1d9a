"""The coarse settings that are nearest to the rules of a plan."""

from __future__ import annotations

from dataclasses import replace

import pytest

from steelyard.errors import BadInput
from steelyard.export.settings import NumberFormats, settings_of
from steelyard.plans.plan import BatchEntry
from steelyard.trades.accumulate import AccumulateRule
from steelyard.trades.chunk import ChunkRule
from steelyard.trades.shard_states import ShardStatesRule
from tests.unit.export.plans import CASES, DATA, PIPELINE, PLAIN, STATES, TENSOR, decided


def test_a_plan_without_trades_is_the_plain_step() -> None:
    settings = settings_of(PLAIN)
    assert (settings.per_device_batch, settings.micro_batches, settings.sequence) == (8, 1, 256)
    assert not settings.recomputes_blocks
    assert not settings.shards_state
    assert settings.formats.mixed_precision == "no"


def test_micro_batches_and_ranks_divide_the_batch() -> None:
    settings = settings_of(CASES["data"])
    assert (settings.per_device_batch, settings.micro_batches, settings.layout.data) == (2, 2, 2)
    assert settings.bucket_bytes == DATA.bucket
    with pytest.raises(BadInput, match="the batch of 6 does not divide into 4 micro-batches"):
        settings_of(decided(AccumulateRule(micro_batches=4), batch=6))


@pytest.mark.parametrize(
    ("rule", "stage"),
    [
        (STATES, 3),
        (replace(STATES, what="gradient"), 2),
        (replace(STATES, what="optimizer"), 1),
    ],
)
def test_the_zero_stage_follows_from_what_is_sharded(rule: ShardStatesRule, stage: int) -> None:
    settings = settings_of(decided(DATA, rule, ranks=2))
    assert settings.zero_stage == stage
    assert settings.regathers
    assert not settings_of(decided(DATA, replace(rule, gathers=1), ranks=2)).regathers


def test_other_rules_become_settings() -> None:
    assert settings_of(CASES["micro-batches"]).recomputes_blocks
    assert settings_of(CASES["offload"]).offloads_activations
    assert settings_of(CASES["state in host memory"]).offloaded_state == {"optimizer"}
    assert settings_of(CASES["compiled"]).compiles
    assert settings_of(CASES["chunked"]).chunks == 3
    assert settings_of(TENSOR).layout.tensor == 2
    assert settings_of(PIPELINE).schedule == "1F1B"
    # Slices inside a block are not those of a chunked loss.
    inside = decided(ChunkRule(module="blocks.*.mlp", op="aten.mm.default", slices=3, count=4))
    assert settings_of(inside).chunks == 0


@pytest.mark.parametrize(
    ("weights", "products", "mixed"),
    [
        ("float32", "float32", "no"),
        ("float32", "bfloat16", "bf16"),
        ("float32", "float16", "fp16"),
        ("bfloat16", "bfloat16", "no"),
        ("", "", "no"),
    ],
)
def test_mixed_precision_is_a_wide_weight_and_a_narrow_product(
    weights: str, products: str, mixed: str
) -> None:
    assert NumberFormats(weights=weights, products=products).mixed_precision == mixed


def test_a_batch_without_a_size_is_refused() -> None:
    entries = (
        BatchEntry(name="a", shape=(8, 2), dtype="float32"),
        BatchEntry(name="b", shape=(4,), dtype="int64"),
    )
    decisions = replace(PLAIN, target=replace(PLAIN.target, batch=entries))
    with pytest.raises(BadInput, match=r"has no size: its tensors have the shapes \[8, 2\], \[4\]"):
        settings_of(decisions)
