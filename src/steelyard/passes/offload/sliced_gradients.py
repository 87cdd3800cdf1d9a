"""Gradients that are never near whole: a product makes some rows at a time, and sends them.

Not for how many slices: see trades/. Not for computing them: see offload/.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from steelyard.ir.graph import SENT_PRODUCTS, Node, OutputKind, Phase
from steelyard.ir.optimizer_update import GRADIENT, WEIGHT
from steelyard.ir.program import Instruction, Program
from steelyard.passes.offload.transfer_nodes import Calls, Running, interleave


def made_by_products(program: Program, parameters: Iterable[str]) -> frozenset[str]:
    """Of these parameters: those whose gradient one product makes, and nothing else reads."""
    return frozenset(_makings(program, parameters))


def gradients_in_slices(program: Program) -> tuple[str, ...]:
    """The parameters whose gradients this program makes in slices."""
    nodes = (program.graph.by_name[i.node] for i in program.instructions)
    return tuple(str(n.args[0]).removeprefix(GRADIENT) for n in nodes if n.op == SENT_PRODUCTS)


def with_gradients_in_slices(
    program: Program, slices: Mapping[str, int], lags: Mapping[str, int]
) -> Program:
    """In place of each product: make some rows, send them. What was sent last is let go ``lag``
    operators later; in micro-batches what was sent before is fetched as early, and added to."""
    calls = Calls(program.graph, Phase.BACKWARD)
    lines = program.instructions
    running = Running(program.graph, lines)
    before: dict[int, list[Instruction]] = {}
    instead: dict[int, list[Instruction]] = {}
    behind: dict[int, list[Instruction]] = {}
    makings = _makings(program, slices)
    for parameter, count in slices.items():
        making, name, lag = makings[parameter], GRADIENT + parameter, lags[parameter]
        is_added = program.repeats > 1
        made = calls.added_in_slices if is_added else calls.made_in_slices
        own = made(name, making.product.name, count)
        line, place = lines[making.place], making.place
        begin = running.before(place, lag) if is_added else place
        before.setdefault(begin, []).append(_at(own.begin, lines[begin]))
        called = replace(calls.instead(making.far(name)), inputs=line.inputs)
        called = replace(called, value=line.value, phase=line.phase)
        instead[place] = [_at(i, line) for i in own.before]
        instead[place] += [called, *(_at(i, line) for i in own.behind)]
        instead |= {number: [] for number in making.gone}
        # Itself is one of those that run. At once is before anything else is fetched.
        end = running.behind(place, lag + 1) if lag else place
        behind.setdefault(end, []).append(_at(own.end, lines[end]))
    placed = interleave(lines, before=before, behind=behind, instead=instead)
    result = replace(program, graph=calls.graph(), instructions=tuple(placed))
    assert not result.problems(), result.problems()
    return result


def _at(line: Instruction, beside: Instruction) -> Instruction:
    return replace(line, phase=beside.phase)


@dataclass(frozen=True, slots=True, kw_only=True)
class _GradientProduct:
    """The product that makes a gradient, where it stands, and the lines that only look at it."""

    product: Node
    place: int
    gone: tuple[int, ...]

    def far(self, name: str) -> Node:
        """The call that sends its result to offload memory, and has none."""
        op, args = SENT_PRODUCTS, (name, *self.product.args)
        return replace(self.product, op=op, args=args, outputs=())


def _makings(program: Program, parameters: Iterable[str]) -> dict[str, _GradientProduct]:
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
        is_alike = (tensor.shape, tensor.stride) == (whole.shape, whole.stride)
        looks = (lines[k] for k in rest)
        are_looks = all(i.sink or graph.is_look(graph.by_name[i.node]) for i in looks)
        own = {first, *rest}
        is_read = any(k not in own for n in own for k in reads.get(lines[n].value, ()))
        if is_alike and whole.is_contiguous and are_looks and not is_read:
            found[parameter] = _GradientProduct(product=product, place=first, gone=tuple(rest))
    return found
