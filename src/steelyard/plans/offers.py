"""Offers to apply a trade to forward values, grouped under names that people would use.

The groups are: everything, a module, all blocks of a run, one operator throughout a run. Not for
finding the values to which a trade can be applied: each trade does this itself.
"""

from collections.abc import Iterable

from steelyard.ir.graph import Graph, Node
from steelyard.ir.rule import CallRule, starred, to_rules
from steelyard.plans.trade import Offer

# The label of an offer of all values.
EVERYTHING = "everything"


def offers_of(rule: type[CallRule], graph: Graph, values: Iterable[str]) -> tuple[Offer, ...]:
    """Return one offer for each distinct set of values, under the first label that names it."""
    sets: dict[str, dict[str, None]] = {}
    for name in sorted(values, key=graph.position.__getitem__):
        for label in _labels(graph, graph.by_name[name]):
            sets.setdefault(label, {})[name] = None
    chosen: dict[frozenset[str], str] = {}
    for label, members in sorted(sets.items()):
        chosen.setdefault(frozenset(members), label)
    return tuple(
        Offer(
            trade=rule.trade,
            label=f"{label} ({len(members)})",
            rules=to_rules(graph, members, rule),
        )
        for members, label in chosen.items()
    )


def _labels(graph: Graph, node: Node) -> list[str]:
    maker = graph.by_name[node.inputs[0]] if node.is_getitem else node
    parts = node.path.split(".") if node.path else []
    paths = [".".join(parts[: i + 1]) for i in range(len(parts))] or ["top level"]
    labels = [EVERYTHING, *paths]
    for run in graph.runs:
        patterns = [p for p in (starred(path, run) for path in paths) if p is not None]
        labels += patterns
        if patterns:
            labels.append(f"{patterns[0]}: {maker.op}")
    return labels
