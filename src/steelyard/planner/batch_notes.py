"""Notes on the effect of batch sharding on training: batch size, learning rate, rounding.

Not for how the batch is sharded: the plan decides that.
"""

from collections.abc import Iterable, Iterator
from math import prod

from steelyard.capture.batch.splitting import computes_in_half
from steelyard.ir.graph import Graph
from steelyard.ir.parallel_layout import ParallelLayout, spelled
from steelyard.ir.rule import Rule

# Learning-rate scaling for a larger batch: Goyal et al. (2017), Malladi et al. (2022).
GROWN = (
    "where the batch grows, training is another: the usual learning rate grows as much under SGD "
    "(Goyal et al., 2017), as its square root under Adam (Malladi et al., 2022)"
)


def half_precision_note(rules: Iterable[Rule], graph: Graph) -> Iterator[str]:
    """Yield a note if the step computes in half precision and splits its batch."""
    parts = prod(r.degree or 1 for r in rules if r.trade in ("accumulate", "shard_batch"))
    if parts > 1 and computes_in_half(graph):
        yield (
            f"the step computes in half precision, and the gradients of {parts} parts of the batch "
            "are each rounded to it: training differs from the whole batch's by rounding, and is "
            "as accurate (docs/models.md)"
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
        f"the batch is held: {samples} samples a step as on one device, {each}{groups}, and so is "
        "the learning rate"
    )
