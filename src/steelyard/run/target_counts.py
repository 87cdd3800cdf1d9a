"""How many targets of each micro-batch a loss counts, and what share of the whole that makes it.

A mean over targets that are not ignored is not the mean of the means of its parts, unless all
parts count alike. Not for finding such losses: see ir/graph.py.
"""

from collections.abc import Sequence
from typing import Any

from steelyard.errors import Mismatch
from steelyard.ir.graph import CountedMean, Graph, same_shares
from steelyard.ir.program import Program, as_captured
from steelyard.run.codegen import emit


class TargetCounter:
    """Computes the targets of a micro-batch from its inputs, before anything else runs."""

    def __init__(self, graph: Graph, counted: CountedMean) -> None:
        made = [as_captured(graph, name) for name in graph.ancestors(counted.targets)]
        program = Program(graph=graph, instructions=tuple(made), loss=counted.targets)
        self._run = emit(program).run
        self._ignored = counted.ignored

    def count(self, inputs: Sequence[Any], *, units: int) -> list[int]:
        """In each of as many equal units of the micro-batch."""
        counts = self._run(inputs, ()) != self._ignored
        found: list[int] = counts.reshape(units, -1).sum(1).tolist()
        return found


def shares(
    counts: Sequence[Sequence[int]], sizes: Sequence[int], *, are_weighed: bool
) -> list[float]:
    """The weight of each micro-batch's loss in the loss of all; they sum to one.

    ``counts`` holds, for each mean in the loss, what it counts in each micro-batch, ``sizes`` how
    large that is beside the others.
    """
    first, total = counts[0], sum(counts[0])
    for others in counts[1:]:
        if not same_shares(first, others):
            raise _weighed_apart(first, others)
    if are_weighed and total:
        return [n / total for n in first]
    for each in counts:
        if not same_shares(each, sizes):
            raise Mismatch(
                f"the micro-batches count {min(each)} to {max(each)} targets each, so that the "
                "mean of their losses is not the loss of the batch",
                expected="equally many targets that are not ignored in each micro-batch",
                remedy="take the accumulate rule out of the plan, or pad the batches alike",
            )
    return [size / sum(sizes) for size in sizes]


def _weighed_apart(counts: Sequence[int], others: Sequence[int]) -> Mismatch:
    """No one weight of a micro-batch's loss is right for both of two means."""
    index = next(
        i for i, (n, m) in enumerate(zip(counts, others)) if n * sum(others) != m * sum(counts)
    )
    return Mismatch(
        f"micro-batch {index + 1} of {len(counts)} holds {counts[index]} of the {sum(counts)} "
        f"targets that one mean in the loss counts and {others[index]} of {sum(others)} of another",
        expected="the same share of the targets of every mean, in each micro-batch",
        remedy="plan again with this batch, which is then left whole, or take the accumulate rule "
        "out of the plan",
    )
