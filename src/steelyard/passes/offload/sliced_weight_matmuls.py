"""Products that read an offloaded weight slice by slice, so that it is never resident as a whole.

Not for choosing the number of slices (see trades/), for the loops (see sliced_loops.py) or for
executing them (see offload/).
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace

from steelyard.ir.graph import Graph, Node, Phase, Ref, Symbol
from steelyard.ir.optimizer_update import WEIGHT
from steelyard.ir.program import Instruction, Program
from steelyard.passes.offload.sliced_loops import LoopCall, Loops, Product
from steelyard.passes.offload.transfer_nodes import Calls, OffloadedViews, Running, interleave
from steelyard.passes.slicing.row_rules import IsPointwise


def sliceable(program: Program, parameters: Iterable[str]) -> frozenset[str]:
    """Return the parameters whose weights are only read by products that can be sliced.

    The weight must be the right operand or the transposed left operand.
    """
    nodes = program.graph.by_name
    able = [p for p in parameters if _is_row_major(nodes[WEIGHT + p])]
    looks = OffloadedViews(program, [WEIGHT + p for p in able])
    lines = [i for i in program.instructions if i.sink is None and i.value not in looks.of]
    reads = looks.reads(lines)

    def is_read_by_products(parameter: str) -> bool:
        found = (nodes[lines[k].node] for k in reads.get(WEIGHT + parameter, ()))
        products = [Product.of(node, program.graph, looks) for node in found]
        return bool(products) and all(products)

    return frozenset(filter(is_read_by_products, able))


def _is_row_major(node: Node) -> bool:
    (tensor,) = node.outputs
    return len(tensor.shape) == 2 and tensor.stride == (tensor.shape[1], 1)


def with_sliced_weight_products(
    program: Program,
    slices: Mapping[str, int],
    leads: Mapping[str, int],
    *,
    is_pointwise: IsPointwise,
) -> Program:
    """Replace each product with these weights, and the pointwise work after it, with a sliced loop.

    Fetching begins ``lead`` operators before a loop; its buffer is freed right after it.
    """
    looks = OffloadedViews(program, [WEIGHT + parameter for parameter in slices])
    lines = [i for i in program.instructions if i.sink is None and i.value not in looks.of]
    graph, lines = _with_independent_empties(program.graph, lines)
    each = {WEIGHT + parameter: count for parameter, count in slices.items()}
    loops = Loops(graph, lines, looks, each, is_pointwise=is_pointwise).found()
    calls = Calls(graph, Phase.BACKWARD)
    calls.drop(looks.names)
    loop_calls = {loop.lines[-1]: (loop, LoopCall(loop, graph, lines)) for loop in loops}
    moved = {
        k: max(l.lines[-1] for l in loops if k in l.deferred) for l in loops for k in l.deferred
    }
    replaced = {k for loop in loops for k in loop.lines}
    placed: list[Instruction] = []
    at: dict[int, LoopCall] = {}
    for number, line in enumerate(lines):
        if number not in replaced and number not in moved:
            placed.append(line)
        if number in loop_calls:
            _, own = loop_calls[number]
            calls.add(own.node, *(node for node, _ in own.results()))
            at[len(placed)] = own
            placed += own.lines()
            placed += [lines[k] for k, place in sorted(moved.items()) if place == number]
    ordered = _with_slices(calls, placed, at, slices, leads)
    result = program.with_lines(ordered, on=calls.graph())
    assert not result.problems(), result.problems()
    return result


def _with_independent_empties(
    graph: Graph, lines: list[Instruction]
) -> tuple[Graph, list[Instruction]]:
    """Replace ``empty_like`` with ``new_empty``, so that it does not depend on the value.

    A random mask only needs the value's shape, so it can then be allocated before the loop.
    """
    nodes: dict[str, Node] = {}
    found = []
    for line in lines:
        node = graph.by_name[line.node]
        tensor = node.outputs[0] if node.outputs else None
        if node.op == _LIKE and tensor and tensor.is_contiguous and _TANGENT in graph.by_name:
            made = replace(
                node,
                name=f"{node.name}.apart",
                op="aten.new_empty.default",
                args=(Ref(_TANGENT), tensor.shape),
                kwargs=(("dtype", Symbol(f"torch.{tensor.dtype}")),),
                inputs=(_TANGENT,),
                phase=Phase.BACKWARD,
                signature=f"aten.new_empty.default({tensor.dtype}{list(tensor.shape)})",
            )
            nodes[made.name] = made
            line = replace(line, node=made.name, inputs=(_TANGENT,))
        found.append(line)
    return replace(graph, nodes=(*graph.nodes, *nodes.values())), found


# Only the device of the tangent is used.
_LIKE, _TANGENT = "aten.empty_like.default", "tangent"


def _with_slices(
    calls: Calls,
    lines: list[Instruction],
    at: Mapping[int, LoopCall],
    slices: Mapping[str, int],
    leads: Mapping[str, int],
) -> list[Instruction]:
    clock = Running(calls.graph(), lines)
    before: dict[int, list[Instruction]] = {}
    after: dict[int, list[Instruction]] = {}
    numbers: Counter[str] = Counter()
    for place, loop_call in at.items():
        for weight in loop_call.offloaded:
            parameter = weight.removeprefix(WEIGHT)
            begin, end = calls.slices(weight, numbers[weight], slices[parameter])
            numbers[weight] += 1
            early = clock.before(place, leads[parameter])
            before.setdefault(early, []).append(replace(begin, phase=lines[early].phase))
            after.setdefault(place, []).append(replace(end, phase=lines[place].phase))
    return interleave(lines, before=before, after=after)
