"""Updates of one parameter some of its rows at a time, with what the optimizer keeps for them.

Not for how many slices: see trades/. Not for calling the optimizer: see offload/.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

from steelyard.ir.graph import Graph, Node
from steelyard.ir.optimizer_update import GRADIENT, WEIGHT, far_name, owners, parameter_of, states
from steelyard.ir.program import Instruction, Program
from steelyard.passes.offload.transfer_nodes import Calls, rows_in_slice


def in_slices(
    calls: Calls, graph: Graph, own: Sequence[Instruction], names: Sequence[str], count: int
) -> list[Instruction]:
    """The lines of one parameter's update: what is near of it, and what they make, are slices. They
    take as long as for the whole, as all slices together do."""
    (tensor,) = graph.by_name[names[0]].outputs
    rows = rows_in_slice(tensor, count)
    moving = calls.updated_in_slices(names, count, rows)
    given = {t.storage for node in graph.inputs() for t in node.outputs}
    for line in own:
        for made in graph.by_name[line.node].outputs:
            if made.storage not in given and made.shape == tensor.shape:
                nbytes = graph.storages[made.storage].nbytes
                calls.shrink(made.storage, rows * nbytes // tensor.shape[0])
    # What is only read is there until the optimizer returns.
    read = [name for name in names if name.startswith(GRADIENT)]
    last = replace(own[-1], inputs=(*own[-1].inputs, *read))
    return [*moving.before, *own[:-1], last, *moving.behind]


def counts_of(update: Program) -> dict[str, int]:
    """The parameters that this program updates in slices, and how many."""
    begins = (n for n in update.graph.nodes if n.is_far and len(n.args) > 1)
    return {parameter_of(far_name(n)): n.args[1] for n in begins if isinstance(n.args[1], int)}


def why_whole(update: Program, *, is_pointwise: Callable[[str], bool]) -> dict[str, str]:
    """Why some parameters are updated whole, by parameter: an operator reads more of them than the
    element in its place, or the optimizer keeps something of another form."""
    graph, found = update.graph, dict[str, str]()
    owner, kept = owners(graph), states(graph)
    if owner is None:
        return found  # none is updated alone
    calls: dict[str, list[Node]] = {}
    for node in graph.nodes:
        if not node.is_input:
            calls.setdefault(owner[node.name], []).append(node)
    for name in (n.name.removeprefix(GRADIENT) for n in graph.inputs() if GRADIENT in n.name):
        of_it = (WEIGHT + name, GRADIENT + name, *kept.get(name, ()))
        reason = _why_of_another_form(graph, of_it) or next(
            (
                f"{node.op} of its update reads more than an element in its place"
                for node in calls.get(name, ())
                if not _goes_by_elements(graph, node, of_it[0], is_pointwise)
            ),
            "",
        )
        if reason:
            found[name] = reason
    return found


def _why_of_another_form(graph: Graph, names: Sequence[str]) -> str:
    """All of it is one matrix, row by row, in one dtype; numbers apart."""
    (weight, *_) = (graph.by_name[name].outputs[0] for name in names)
    if len(weight.shape) != 2 or not weight.is_contiguous:
        return "it is no matrix that lies row by row"
    for name in names:
        (x,) = graph.by_name[name].outputs
        is_alike = (x.shape, x.stride, x.dtype) == (weight.shape, weight.stride, weight.dtype)
        if x.numel > 1 and not is_alike:
            return f"the optimizer keeps something of another form ({name.rpartition(':')[2]})"
    return ""


def _goes_by_elements(
    graph: Graph, node: Node, weight: str, is_pointwise: Callable[[str], bool]
) -> bool:
    shape = graph.by_name[weight].outputs[0].shape
    given = [t for name in node.inputs for t in graph.by_name[name].outputs]
    made = list(node.outputs)
    if all(t.numel == 1 for t in (*given, *made)):
        return True
    if not is_pointwise(node.op):
        return False
    return all(t.shape == shape or t.numel == 1 for t in given) and all(
        t.shape == shape for t in made
    )
