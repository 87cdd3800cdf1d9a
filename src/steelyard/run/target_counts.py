"""Counts the targets of each micro-batch in a loss, and derives the weight of each micro-batch.

A mean over the targets that are not ignored differs from the mean of the micro-batch means, unless
all micro-batches count equally many targets. Not for finding such losses: see
ir/analysis/counted_means.py.
"""

from collections.abc import Sequence
from typing import Any

from steelyard.errors import Mismatch
from steelyard.ir.analysis.counted_means import same_shares
from steelyard.ir.graph import CountedMean, Graph
from steelyard.ir.program import Program, as_captured
from steelyard.run.codegen import emit


class TargetCounter:
    """Counts the targets of a micro-batch from its inputs, before anything else runs."""

    def __init__(self, graph: Graph, counted: CountedMean) -> None:
        made = [as_captured(graph, name) for name in graph.ancestors(counted.targets)]
        program = Program(graph=graph, instructions=tuple(made), loss=counted.targets)
        self._run = emit(program).run
        self._ignored = counted.ignored

    def count(self, inputs: Sequence[Any], *, units: int) -> list[int]:
        """Return the counts for each of ``units`` equal parts of the micro-batch."""
        counts = self._run(inputs, ()) != self._ignored
        found: list[int] = counts.reshape(units, -1).sum(1).tolist()
        return found


def shares(
    counts: Sequence[Sequence[int]], sizes: Sequence[int], *, are_weighted: bool
) -> list[float]:
    """Return the weight of each micro-batch's loss in the loss of the batch; they sum to one.

    ``counts`` contains the targets per micro-batch for each mean in the loss, and ``sizes`` the
    relative size of each micro-batch.
    """
    first, total = counts[0], sum(counts[0])
    for others in counts[1:]:
        if not same_shares(first, others):
            raise _conflicting_means(first, others)
    if are_weighted and total:
        return [n / total for n in first]
    for part in counts:
        if not same_shares(part, sizes):
            raise Mismatch(
                f"the micro-batches count {min(part)} to {max(part)} targets each, so that the "
                "mean of their losses is not the loss of the batch",
                expected="the same number of counted targets in each micro-batch",
                remedy="remove the accumulate rule from the plan, or pad all batches to the same "
                "number of targets",
            )
    return [size / sum(sizes) for size in sizes]


def _conflicting_means(counts: Sequence[int], others: Sequence[int]) -> Mismatch:
    """Return the error for two means for which no single weight per micro-batch is right."""
    index = next(
        i for i, (n, m) in enumerate(zip(counts, others)) if n * sum(others) != m * sum(counts)
    )
    return Mismatch(
        f"micro-batch {index + 1} of {len(counts)} holds {counts[index]} of the {sum(counts)} "
        f"targets of one mean in the loss, but {others[index]} of the {sum(others)} of another",
        expected="the same share of the targets of every mean, in each micro-batch",
        remedy="plan again with this batch, which is then not split, or remove the accumulate "
        "rule from the plan",
    )
