"""Optimizer updates on a few rows of a parameter at a time, with the optimizer state of those rows.

Not for choosing the number of slices: see trades/. Not for calling the optimizer: see offload/.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

from steelyard.ir.graph import Graph, Node
from steelyard.ir.optimizer_update import (
    GRADIENT,
    WEIGHT,
    offloaded_name,
    owners,
    parameter_of,
    states,
)
from steelyard.ir.program import Instruction, Program
from steelyard.passes.offload.transfer_nodes import Calls, rows_in_slice


def update_in_slices(
    calls: Calls, graph: Graph, own: Sequence[Instruction], names: Sequence[str], count: int
) -> list[Instruction]:
    """Return the lines of one parameter's update in slices; ``own`` are the lines of the whole
    update.

    Each line represents all slices and takes as long as before, but buffers and temporaries have
    the size of a slice.
    """
    (tensor,) = graph.by_name[names[0]].outputs
    rows = rows_in_slice(tensor, count)
    transfers = calls.updated_in_slices(names, count, rows)
    given = {t.storage for node in graph.inputs() for t in node.outputs}
    for line in own:
        for output in graph.by_name[line.node].outputs:
            if output.storage not in given and output.shape == tensor.shape:
                nbytes = graph.storages[output.storage].nbytes
                calls.shrink(output.storage, rows * nbytes // tensor.shape[0])
    # Gradients are only read, and stay resident until the optimizer returns.
    read = [name for name in names if name.startswith(GRADIENT)]
    last = replace(own[-1], inputs=(*own[-1].inputs, *read))
    return [*transfers.before, *own[:-1], last, *transfers.after]


def counts_of(update: Program) -> dict[str, int]:
    """Return the number of slices of each parameter that this program updates in slices."""
    begins = (n for n in update.graph.nodes if n.is_transfer and len(n.args) > 1)
    return {
        parameter_of(offloaded_name(n)): n.args[1] for n in begins if isinstance(n.args[1], int)
    }


def why_whole(update: Program, *, is_pointwise: Callable[[str], bool]) -> dict[str, str]:
    """Return, for each parameter that cannot be updated in slices, the reason.

    Either an operator of the update is not elementwise, or an optimizer state has another shape.
    """
    graph, found = update.graph, dict[str, str]()
    owner, states_of = owners(graph), states(graph)
    if owner is None:
        return found  # no parameter is updated separately
    calls: dict[str, list[Node]] = {}
    for node in graph.nodes:
        if not node.is_input:
            calls.setdefault(owner[node.name], []).append(node)
    for name in (n.name.removeprefix(GRADIENT) for n in graph.inputs() if GRADIENT in n.name):
        own = (WEIGHT + name, GRADIENT + name, *states_of.get(name, ()))
        reason = _why_shapes_differ(graph, own) or next(
            (
                f"{node.op} in its update is not elementwise"
                for node in calls.get(name, ())
                if not _is_elementwise(graph, node, own[0], is_pointwise)
            ),
            "",
        )
        if reason:
            found[name] = reason
    return found


def _why_shapes_differ(graph: Graph, names: Sequence[str]) -> str:
    """Return why weight, gradient and states are not all row-major matrices of the same dtype.

    States of one element are allowed. Empty if there is no reason.
    """
    (weight, *_) = (graph.by_name[name].outputs[0] for name in names)
    if len(weight.shape) != 2 or not weight.is_contiguous:
        return "it is not a row-major matrix"
    for name in names:
        (x,) = graph.by_name[name].outputs
        is_equal = (x.shape, x.stride, x.dtype) == (weight.shape, weight.stride, weight.dtype)
        if x.numel > 1 and not is_equal:
            return f"its optimizer state has another shape or dtype ({name.rpartition(':')[2]})"
    return ""


def _is_elementwise(
    graph: Graph, node: Node, weight: str, is_pointwise: Callable[[str], bool]
) -> bool:
    shape = graph.by_name[weight].outputs[0].shape
    given = [t for name in node.inputs for t in graph.by_name[name].outputs]
    outputs = list(node.outputs)
    if all(t.numel == 1 for t in (*given, *outputs)):
        return True
    if not is_pointwise(node.op):
        return False
    return all(t.shape == shape or t.numel == 1 for t in given) and all(
        t.shape == shape for t in outputs
    )
