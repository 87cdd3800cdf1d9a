"""How much longer a program takes than another of the same step, with what can be said of it.

A ratio is known better than either time: operators that both run cancel, and so does their error.
Not for the times themselves: see predict.py.
"""

from collections import Counter

from steelyard.core.costs import Costs
from steelyard.core.graph import Node
from steelyard.core.program import Program
from steelyard.core.quad import Estimate

# One program against itself, CPU seconds of interleaved pairs on shared machines: 0.98 to 1.02.
_SAME_STEP_SHARE = 0.02


def slowdown(program: Program, base: Program, costs: Costs) -> Estimate:
    """Seconds of ``program`` over those of ``base``: forward and backward pass, no update."""
    ours, theirs = _calls(program), _calls(base)
    nodes = {**_nodes(base), **_nodes(program)}
    before = sum(n * costs.seconds(nodes[s]).value for s, n in theirs.items())
    if not before:
        return Estimate.exactly(1.0)
    added = doubt = 0.0
    for signature in ours.keys() | theirs.keys():
        more = ours[signature] - theirs[signature]
        cost = costs.seconds(nodes[signature])
        added += more * cost.value
        doubt += abs(more) * max(cost.high - cost.value, cost.value - cost.low)
    ratio = 1 + added / before
    # Doubts of many operators are not all on one side.
    width = _SAME_STEP_SHARE * ratio + doubt / before / 2
    by_operators = Estimate(value=ratio, low=max(0.0, ratio - width), high=ratio + width)
    return by_operators.times(
        costs.whole_step_of(program.graph).over(costs.whole_step_of(base.graph))
    )


def _calls(program: Program) -> Counter[str]:
    nodes = program.graph.by_name
    calls: Counter[str] = Counter()
    for instruction in program.instructions:
        node = nodes[instruction.node]
        if instruction.sink is None and not node.is_free:
            calls[node.signature] += program.repeats
    return calls


def _nodes(program: Program) -> dict[str, Node]:
    return {n.signature: n for n in program.graph.nodes if not n.is_free}
