"""The slowdown of one program relative to another for the same step, with its uncertainty.

A ratio is known more precisely than either time, because the errors of operators that run in both
programs cancel. Not for the times themselves: see step.py.
"""

from collections import Counter

from steelyard.ir.metrics import Estimate
from steelyard.ir.program import Program
from steelyard.predict.cost_table import CostTable

# Measured ratios of plans that only recompute are up to this much faster than predicted from their
# operators (benchmarks/truth.py, one thread): a smaller heap has fewer page faults.
_OTHER_HEAP_SHARE = 0.06


def slowdown(program: Program, base: Program, costs: CostTable) -> Estimate:
    """Return the seconds of ``program`` divided by those of ``base``, without the optimizer's
    update.

    The ratio is a product of two: that of ``program`` to the plain step of its own graph, and that
    of this plain step to ``base``. If the plain step is in micro-batches, the second ratio was
    measured in interleaved runs of both.
    """
    plain = program.with_graph(program.graph)
    before = _seconds(base, costs)
    if not before:
        return Estimate.exactly(1.0)
    cut = costs.whole_step_in(program.parts).over(costs.whole_step_in(base.parts))
    return _added(program, plain, costs).times(cut.scaled(_seconds(plain, costs) / before))


def _added(program: Program, plain: Program, costs: CostTable) -> Estimate:
    """Return the ratio of two programs over one graph, from the difference of their operators."""
    ours, theirs = _calls(program), _calls(plain)
    nodes = {n.signature: n for n in plain.graph.nodes if not n.is_free}
    added = doubt = 0.0
    # In a fixed order, because the last digits of a sum depend on it.
    for signature in dict.fromkeys((*ours, *theirs)):
        more = ours[signature] - theirs[signature]
        cost = costs.seconds(nodes[signature])
        added += more * cost.value
        doubt += abs(more) * max(cost.high - cost.value, cost.value - cost.low)
    before = _seconds(plain, costs)
    ratio = 1 + added / before
    # Errors of many operators do not all have the same sign.
    width = _OTHER_HEAP_SHARE * ratio + doubt / before / 2
    return Estimate(value=ratio, low=max(0.0, ratio - width), high=ratio + width)


def _seconds(program: Program, costs: CostTable) -> float:
    nodes = {n.signature: n for n in program.graph.nodes if not n.is_free}
    return sum(n * costs.seconds(nodes[s]).value for s, n in _calls(program).items())


def _calls(program: Program) -> Counter[str]:
    nodes = program.graph.by_name
    calls: Counter[str] = Counter()
    for instruction in program.instructions:
        node = nodes[instruction.node]
        if instruction.sink is None and not node.is_free:
            calls[node.signature] += program.repeats
    return calls
