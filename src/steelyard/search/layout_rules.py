"""The rules of a layout that need no graph: the shares of the batch and the micro-batches.

Rules that name tensors or stages come from the offers of their trades, on ranks that run the step,
and from a capture of three blocks on declared clusters: see cluster/to_rules.py. The way back is
``ParallelLayout.of``, and cluster/from_rules.py for the schedule.
"""

from steelyard.ir.parallel_layout import ParallelLayout
from steelyard.ir.rule import Rule

# The gradient bucket size of stock DistributedDataParallel.
DDP_BUCKET_BYTES = 25 * 2**20


def batch_rules(
    layout: ParallelLayout, *, bucket_bytes: int = DDP_BUCKET_BYTES
) -> tuple[Rule, ...]:
    """Return the rules that split the batch: over micro-batches, and over data parallel ranks."""
    found: list[Rule] = []
    if layout.micro_batches > 1:
        found.append(Rule(trade="accumulate", degree=layout.micro_batches))
    if layout.data > 1:
        found.append(
            Rule(
                trade="shard_batch",
                degree=layout.data,
                bucket_bytes=bucket_bytes,
                shares=layout.shares,
            )
        )
    return tuple(found)
