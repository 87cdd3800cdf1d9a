"""Refuses programs whose order of collectives triggers a known backend bug.

Reads the program line by line. Not for repairing the program.
"""

from collections.abc import Mapping

from steelyard.errors import Mismatch
from steelyard.ir.graph import Axis, Node
from steelyard.ir.program import Program

# On gloo these run as AsyncAllgatherCoalescedWork. Two of them in flight corrupt the heap
# ("malloc(): unaligned tcache chunk"; torch 2.13, the faulty line is not known). The out variant
# takes another code path, and steelyard.all_gather on a CPU uses point-to-point messages. Remove
# this check when the plain operator survives six in flight.
_COALESCED = frozenset(
    f"_c10d_functional.all_gather_into_tensor{suffix}.default" for suffix in ("", "_coalesced")
)
_GATHERS = _COALESCED | {
    "_c10d_functional.all_gather_into_tensor_out.default",
    "steelyard.all_gather",
}
_WAIT = "_c10d_functional.wait_tensor.default"


def refuse_hazards(program: Program, *, backends: Mapping[str, str]) -> None:
    """Raise Mismatch if gathers overlap in the program that gloo cannot overlap. ``backends`` maps
    each mesh axis to its backend; a missing axis is assumed to use gloo.
    """
    nodes = program.graph.by_name
    in_flight: dict[str, Node] = {}
    source_of_item: dict[str, str] = {}
    for instruction in program.instructions:
        node = nodes[instruction.node]
        if instruction.sink is not None:
            continue
        if node.is_getitem and instruction.inputs[0] in in_flight:
            source_of_item[instruction.value] = instruction.inputs[0]
        if node.op == _WAIT:
            value = instruction.inputs[0]
            in_flight.pop(source_of_item.get(value, value), None)
        if node.op in _GATHERS and _backend(node, backends) == "gloo":
            _check(node, in_flight)
            in_flight[instruction.value] = node


def _check(node: Node, in_flight: Mapping[str, Node]) -> None:
    clashing = [other for other in in_flight.values() if {node.op, other.op} & _COALESCED]
    if clashing:
        raise Mismatch(
            f"the step gathers {node.name} while {clashing[0].name} is in flight, which corrupts "
            "memory on gloo",
            expected="each all_gather_into_tensor to end before the next gather, or "
            "all_gather_into_tensor_out instead",
            remedy="wait for the first, or use another backend than gloo (torch 2.13)",
        )


def _backend(node: Node, backends: Mapping[str, str]) -> str:
    axes = [argument.name for argument in node.args if isinstance(argument, Axis)]
    return backends.get(axes[0], "gloo") if axes else "gloo"


__all__ = ["refuse_hazards"]
