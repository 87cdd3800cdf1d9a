"""Estimates the cost of unmeasured operators from similar measured ones.

Not for the roofline itself: see predict/cost_table.py.
"""

from collections import defaultdict
from collections.abc import Iterable
from statistics import median

from steelyard.ir.graph import Node
from steelyard.ir.metrics import Estimate
from steelyard.predict.cost_table import CostTable, OperatorCost

# A kernel may switch algorithms between sizes of one operator; differences between operators are
# larger.
_SAME_OPERATOR_SHARE = 0.5
_OTHER_OPERATORS_SHARE = 0.8


def declared_from(costs: CostTable, nodes: Iterable[Node]) -> dict[str, OperatorCost]:
    """Return a scaled roofline cost for each signature that ``costs`` does not contain.

    The scale is the median ratio of measured to roofline seconds of similar measured operators.
    """
    nodes = list(nodes)
    ratios: dict[str, list[float]] = defaultdict(list)
    workspaces: dict[str, list[float]] = defaultdict(list)
    for node in nodes:
        known = costs.operators.get(node.signature)
        if known is not None:
            ratio = known.seconds.value / costs.declared_seconds(node).value
            for key in (node.op, _kind(node)):
                ratios[key].append(ratio)
            workspaces[node.op].append(known.workspace_bytes / max(1, node.moved_bytes))
    return {
        node.signature: _scaled_cost(node, costs, ratios, workspaces)
        for node in nodes
        if node.signature not in costs.operators
    }


def _scaled_cost(
    node: Node, costs: CostTable, ratios: dict[str, list[float]], workspaces: dict[str, list[float]]
) -> OperatorCost:
    declared = costs.declared_seconds(node)
    seconds = declared
    for key in (node.op, _kind(node)):
        if ratios.get(key):
            share = _SAME_OPERATOR_SHARE if key == node.op else _OTHER_OPERATORS_SHARE
            seconds = Estimate.within(declared.value * median(ratios[key]), share=share)
            break
    # Use the largest share of workspace: an overestimated peak costs speed, while an underestimated
    # one makes the run fail.
    share = max(workspaces.get(node.op, [0.0]))
    return OperatorCost(
        seconds=seconds, workspace_bytes=round(share * node.moved_bytes), is_measured=False
    )


def _kind(node: Node) -> str:
    return "computes" if node.flops else "moves"
