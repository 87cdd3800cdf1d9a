"""Operators of a step that may multiply and have no FLOP formula: their names, and their shares.

Predictions for a device that is not present are wrong if the work of these operators is left out.
Not for detecting them: see operators/missing_flops.py.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence

from steelyard.errors import CaptureRefused
from steelyard.ir.graph import Graph, Node
from steelyard.predict.cost_table import CostTable
from steelyard.units import format_share

_REGISTER = "torch.utils.flop_counter.register_flop_formula"
_MOST_NAMED = 3


def refuse_uncounted(graphs: Iterable[Graph]) -> None:
    """Raise CaptureRefused if a step for a declared cluster has such operators.

    Nothing is measured on a declared cluster, so the FLOPs of every operator must be known.
    """
    found = [(place, nodes) for graph in graphs for place, nodes in _by_place(graph).items()]
    if not found:
        return
    named = ", ".join(f"{op}{_at(path, nodes)}" for (op, path), nodes in found[:_MOST_NAMED])
    more = f" and {len(found) - _MOST_NAMED} more" if len(found) > _MOST_NAMED else ""
    (op, _), _ = found[0]
    raise CaptureRefused(
        f"no FLOP formula is known for {named}{more}",
        expected="operators whose FLOPs can be counted, because nothing is measured on a "
        "declared cluster",
        remedy=f"register a formula in the script with {_REGISTER}(torch.ops.{op}), or plan on a "
        "machine where this step can be measured",
    )


def notes_on_uncounted(graphs: Iterable[Graph], costs: CostTable) -> Iterator[str]:
    """Yield a note for each such operator and module, with its share of the step's computation."""
    graphs = tuple(graphs)
    whole = sum(_seconds(graph.nodes, costs) for graph in graphs)
    for graph in graphs:
        for (op, path), nodes in _by_place(graph).items():
            share = _seconds(nodes, costs) / whole if whole else 0.0
            calls = f"{len(nodes)} calls" if len(nodes) > 1 else "one call"
            how = "as measured"
            if not all(costs.is_measured(node) for node in nodes):
                how = "estimated from the bytes that it moves, because it could not be measured"
            yield (
                f"{op}{_at(path, nodes)} has no FLOP formula and is counted as 0 FLOPs; its "
                f"{calls} take {format_share(share).lstrip('+')} of the computation time, {how}"
            )


def _by_place(graph: Graph) -> dict[tuple[str, str], list[Node]]:
    """Group nodes by operator and by module path, with block indices replaced by ``*``."""
    found: defaultdict[tuple[str, str], list[Node]] = defaultdict(list)
    for node in graph.nodes:
        if node.is_uncounted and not node.is_free:
            path = ".".join("*" if part.isdigit() else part for part in node.path.split("."))
            found[_packet(node.op), path].append(node)
    return found


def _packet(op: str) -> str:
    """Return the operator's name without its overload, as in ``torch.ops``."""
    return ".".join(op.split(".")[:2])


def _at(pattern: str, nodes: Sequence[Node]) -> str:
    if not pattern:
        return " outside of the model's modules"
    paths = list(dict.fromkeys(node.path for node in nodes))
    if len(paths) == 1:
        return f" in {paths[0]}"
    if pattern.strip("*."):
        return f" in {pattern}"
    # A path that consists only of indices, as in nn.Sequential, is not informative.
    return f" in {paths[0]} and {len(paths) - 1} more modules"


def _seconds(nodes: Iterable[Node], costs: CostTable) -> float:
    return sum(costs.seconds(node).value for node in nodes)
