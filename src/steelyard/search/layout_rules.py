"""The rules of a layout that need no graph: the shares of the batch and the micro-batches.

Rules that name tensors or stages come from the offers of their trades, on ranks that run the step,
and from a capture of three blocks on declared clusters: see cluster/to_rules.py. The inverse is
``ParallelLayout.of``, and for the schedule cluster/from_rules.py.
"""

from collections.abc import Sequence

from steelyard.ir.parallel_layout import ParallelLayout
from steelyard.ir.rule import Rule
from steelyard.ir.rule_kinds import BatchSharding, MicroBatches
from steelyard.plans.trade import Trade, rule_type

# The default size of a gradient bucket in DistributedDataParallel.
DDP_BUCKET_BYTES = 25 * 2**20


def batch_rules(
    layout: ParallelLayout,
    trades: Sequence[Trade],
    *,
    bucket_bytes: int = DDP_BUCKET_BYTES,
) -> tuple[Rule, ...]:
    """Return the rules that split the batch over micro-batches and over data-parallel ranks."""
    found: list[Rule] = []
    if layout.micro_batches > 1:
        split = rule_type(trades, MicroBatches)
        found.append(split(micro_batches=layout.micro_batches))
    if layout.data > 1:
        batch = rule_type(trades, BatchSharding)
        found.append(batch(ranks=layout.data, bucket=bucket_bytes, shares=layout.shares))
    return tuple(found)
