"""Notes on the effects of batch sharding on training: batch size, learning rate, rounding.

Not for deciding how the batch is sharded: the plan does that.
"""

from collections.abc import Iterator, Sequence
from math import prod

from steelyard.capture.batch.splitting import computes_in_half
from steelyard.ir.graph import Graph
from steelyard.ir.parallel_layout import ParallelLayout, spelled
from steelyard.ir.rule import Rule, of_kind
from steelyard.ir.rule_kinds import BatchSharding, MicroBatches

# Scaling of the learning rate for a larger batch: Goyal et al. (2017), Malladi et al. (2022).
GROWN = (
    "a larger batch changes training: the learning rate is usually scaled linearly with the batch "
    "for SGD (Goyal et al., 2017), and with its square root for Adam (Malladi et al., 2022)"
)


def half_precision_note(rules: Sequence[Rule], graph: Graph) -> Iterator[str]:
    """Yield a note if the step computes in half precision and splits its batch."""
    parts = prod(
        [
            *(rule.micro_batches for rule in of_kind(rules, MicroBatches)),
            *(rule.ranks for rule in of_kind(rules, BatchSharding)),
        ]
    )
    if parts > 1 and computes_in_half(graph):
        yield (
            f"the step computes in half precision, and the gradients of each of {parts} parts of "
            "the batch are rounded to it: training differs from that on the whole batch by "
            "rounding, and is as accurate (docs/models.md)"
        )


def batch_size_note(layout: ParallelLayout, samples: int) -> Iterator[str]:
    """Yield a note on the batch size of each rank, if ranks share the batch."""
    if layout.data == 1:
        return
    each = f"{samples * layout.share_of(0) // layout.units} on each"
    if layout.shares:
        each = f"{spelled(layout.shares)} on ranks 0 to {layout.data - 1}"
    groups = " group" if layout.num_ranks > layout.data else ""
    yield (
        f"the global batch stays {samples} samples a step, {each}{groups}; the learning rate stays "
        "the same"
    )
