"""Counted means in the loss of a graph: means over the targets that are not ignored.

Not for counting targets: see run/target_counts.py.
"""

from collections.abc import Sequence

from steelyard.ir.graph import CountedMean, Graph, OutputKind, Ref, Role

# The last one is the divisor of the first if its sum is computed in slices.
_COUNTED_MEANS = (
    "aten.nll_loss_forward.default", "aten.nll_loss2d_forward.default", "steelyard.nll_loss_weight",
)  # fmt: skip


def counted_means(graph: Graph) -> tuple[CountedMean, ...]:
    """Return the counted means in the loss; two that count the same targets are listed once."""
    if graph.counts is not None:
        return graph.counts
    found = []
    for node in map(graph.by_name.__getitem__, _mean_nodes(graph)):
        targets, ignored = node.args[1], node.args[4]
        assert isinstance(targets, Ref)
        assert isinstance(ignored, int)
        found.append(CountedMean(targets=targets.name, ignored=ignored))
    return tuple(dict.fromkeys(found))


def is_counted_alone(graph: Graph) -> bool:
    """True if the batch reaches the loss through counted means only."""
    means = _mean_nodes(graph)
    pending = [o.node for o in graph.outputs if o.kind is OutputKind.LOSS]
    seen = {*means}
    while pending:
        node = graph.by_name[pending.pop()]
        if node.name in seen:
            continue
        if node.is_input and any(
            graph.storages[t.storage].role is Role.BATCH for t in node.outputs
        ):
            return False
        seen.add(node.name)
        pending += node.inputs
    return bool(means)


def _mean_nodes(graph: Graph) -> tuple[str, ...]:
    return tuple(
        n.name
        for n in graph.forward()
        if n.op in _COUNTED_MEANS and n.args[2] is None and n.args[3] == 1
    )


def same_shares(counts: Sequence[int], others: Sequence[int]) -> bool:
    """True if each slice of a batch has the same weight in two counted means."""
    return [n * sum(others) for n in counts] == [n * sum(counts) for n in others]
