"""Gradients that are made and offloaded a few rows at a time, so that they are never resident
whole.

Not for choosing the number of slices: see trades/. Not for computing them: see offload/.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from steelyard.ir.graph import MATMUL_SEND, Node, OutputKind, Phase
from steelyard.ir.optimizer_update import GRADIENT, WEIGHT
from steelyard.ir.program import Instruction, Program
from steelyard.passes.offload.transfer_nodes import Calls, Running, interleave


def made_by_products(program: Program, parameters: Iterable[str]) -> frozenset[str]:
    """Return the parameters whose gradient is made by one product and not read by anything else."""
    return frozenset(_gradient_products(program, parameters))


def gradients_in_slices(program: Program) -> tuple[str, ...]:
    """Return the parameters whose gradients this program makes in slices."""
    nodes = (program.graph.by_name[i.node] for i in program.instructions)
    return tuple(str(n.args[0]).removeprefix(GRADIENT) for n in nodes if n.op == MATMUL_SEND)


def with_gradients_in_slices(
    program: Program, slices: Mapping[str, int], lags: Mapping[str, int]
) -> Program:
    """Replace each gradient product by one that makes and sends slices of rows.

    The last slice is freed ``lag`` operators later. With several micro-batches, the sum so far is
    fetched ``lag`` operators earlier, and the new rows are added to it.
    """
    calls = Calls(program.graph, Phase.BACKWARD)
    lines = program.instructions
    clock = Running(program.graph, lines)
    before: dict[int, list[Instruction]] = {}
    instead: dict[int, list[Instruction]] = {}
    after: dict[int, list[Instruction]] = {}
    products = _gradient_products(program, slices)
    for parameter, count in slices.items():
        found, name, lag = products[parameter], GRADIENT + parameter, lags[parameter]
        is_added = program.repeats > 1
        make_lines = calls.added_in_slices if is_added else calls.made_in_slices
        own = make_lines(name, found.product.name, count)
        line, place = lines[found.place], found.place
        begin = clock.before(place, lag) if is_added else place
        before.setdefault(begin, []).append(_in_phase_of(own.begin, lines[begin]))
        called = replace(calls.instead(found.sending(name)), inputs=line.inputs)
        called = replace(called, value=line.value, phase=line.phase)
        instead[place] = [_in_phase_of(i, line) for i in own.before]
        instead[place] += [called, *(_in_phase_of(i, line) for i in own.after)]
        instead |= {number: [] for number in found.views}
        # The product itself counts as one operator. Without a lag, the buffer is freed before
        # anything else is fetched.
        end = clock.after(place, lag + 1) if lag else place
        after.setdefault(end, []).append(_in_phase_of(own.end, lines[end]))
    placed = interleave(lines, before=before, after=after, instead=instead)
    result = replace(program, graph=calls.graph(), instructions=tuple(placed))
    assert not result.problems(), result.problems()
    return result


def _in_phase_of(line: Instruction, anchor: Instruction) -> Instruction:
    return replace(line, phase=anchor.phase)


@dataclass(frozen=True, slots=True, kw_only=True)
class _GradientProduct:
    """The product that makes a gradient, its line number, and the lines of views of its result."""

    product: Node
    place: int
    views: tuple[int, ...]

    def sending(self, name: str) -> Node:
        """Return the call that sends its result to offload memory instead of returning it."""
        op, args = MATMUL_SEND, (name, *self.product.args)
        return replace(self.product, op=op, args=args, outputs=())


def _gradient_products(program: Program, parameters: Iterable[str]) -> dict[str, _GradientProduct]:
    graph, lines = program.graph, program.instructions
    outputs = {o.target: o.node for o in graph.outputs if o.kind is OutputKind.GRADIENT}
    on: dict[int, list[int]] = {}
    reads: dict[str, list[int]] = {}
    for number, line in enumerate(lines):
        for storage in graph.storages_of(line.node):
            on.setdefault(storage, []).append(number)
        for name in line.inputs:
            reads.setdefault(name, []).append(number)
    found = {}
    for parameter in parameters:
        (tensor, *_) = graph.by_name[outputs[WEIGHT + parameter]].outputs
        first, *rest = on[tensor.storage]
        product = graph.by_name[lines[first].node]
        if product.op != "aten.mm.default" or product.kwargs:
            continue
        (whole,) = product.outputs
        is_equal = (tensor.shape, tensor.stride) == (whole.shape, whole.stride)
        others = (lines[k] for k in rest)
        are_views = all(i.sink or graph.is_alias(graph.by_name[i.node]) for i in others)
        own = {first, *rest}
        is_read = any(k not in own for n in own for k in reads.get(lines[n].value, ()))
        if is_equal and whole.is_contiguous and are_views and not is_read:
            found[parameter] = _GradientProduct(product=product, place=first, views=tuple(rest))
    return found
