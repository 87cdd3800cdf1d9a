"""Decisions to export, one for each thing that settings of other tools can say. Not tests."""

from __future__ import annotations

from dataclasses import replace

from steelyard.hardware.cluster import OffloadMemory
from steelyard.ir.rule import Rule
from steelyard.plans.plan import BatchEntry, Decisions, Target
from steelyard.trades.accumulate import AccumulateRule
from steelyard.trades.chunk import ChunkRule
from steelyard.trades.gradient_compression import QuantizedGradientsRule
from steelyard.trades.offload import OffloadRule
from steelyard.trades.offload_state import OffloadStateRule
from steelyard.trades.overlap import OverlapRule
from steelyard.trades.recompute import RecomputeRule
from steelyard.trades.shard_batch import ShardBatchRule
from steelyard.trades.shard_pipeline import ShardPipelineRule
from steelyard.trades.shard_states import ShardStatesRule
from steelyard.trades.shard_tensor import ShardTensorRule
from tests.support.sample import DECISIONS

MIB = 2**20
RECOMPUTE = (
    RecomputeRule(module="blocks.*.attn", op="aten.bmm.default", nth=1, count=4),
    RecomputeRule(module="blocks.*.mlp", op="aten.gelu.default", count=4),
)
DATA = ShardBatchRule(ranks=2, bucket=4 * MIB)
STATES = ShardStatesRule(ranks=2, parameter="blocks.*.weight", count=4, gathers=2)
STATE_OFFLOAD = OffloadStateRule(parameter="blocks.*.weight", count=4)


def decided(*rules: Rule, ranks: int = 1, batch: int = 8, runner: str = "python") -> Decisions:
    target: Target = replace(
        DECISIONS.target,
        batch=(BatchEntry(name="", shape=(batch, 256), dtype="int64"),),
        ranks=ranks,
        runner=runner,
    )
    offloads = any(rule.needs_offload_memory for rule in rules)
    memory = OffloadMemory("scratch", rate="1 GB/s", size="1 GiB") if offloads else None
    return replace(DECISIONS, target=target, rules=rules, offload_memory=memory)


PLAIN = decided()
CASES: dict[str, Decisions] = {
    "plain": PLAIN,
    "micro-batches": decided(AccumulateRule(micro_batches=2), *RECOMPUTE),
    "offload": decided(*RECOMPUTE, OffloadRule(module="blocks.*", op="aten.mm.default", count=4)),
    "state in host memory": decided(STATE_OFFLOAD),
    "weights in host memory": decided(
        STATE_OFFLOAD, OffloadStateRule(parameter="blocks.*.weight", count=4, what="weight")
    ),
    "data": decided(DATA, AccumulateRule(micro_batches=2), OverlapRule(window=5), ranks=2),
    "unequal": decided(ShardBatchRule(ranks=2, shares=(2, 1), bucket=MIB), ranks=2),
    "sharded": decided(DATA, STATES, *RECOMPUTE, ranks=2),
    "sharded, offloaded": decided(DATA, STATES, STATE_OFFLOAD, ranks=2),
    "compiled": decided(runner="inductor"),
    "chunked": decided(ChunkRule(module="head", op="aten.mm.default", slices=3)),
    "lossy": decided(DATA, QuantizedGradientsRule(parameter="head.weight", format="int8"), ranks=2),
}
TENSOR = decided(
    DATA, ShardTensorRule(ranks=2, parameter="blocks.*.weight", dim=0, count=4), ranks=4
)
PIPELINE = decided(
    AccumulateRule(micro_batches=4),
    ShardPipelineRule(ranks=2, schedule="1F1B", behind="blocks.1"),
    ranks=2,
)
