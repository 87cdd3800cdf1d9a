"""Products of the backward pass with a value of the forward pass that lies in offload memory: it
comes back slice by slice, for each of them anew, and is never near whole.

Not for which values, nor how many slices: see trades/. Not for computing with them: see offload/.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from steelyard.ir.collective import Collective
from steelyard.ir.graph import Graph, Node, Role, Storage, Tensor
from steelyard.ir.program import Instruction, Program
from steelyard.ir.saved_activations import first_late
from steelyard.passes.offload.sliced_loops import Loop, LoopCall, Product
from steelyard.passes.offload.transfer_nodes import Looks, slices_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Read:
    """The ``call`` that goes through the slices of a value, at this line; the line that made
    ``result`` as a whole stood there. Before it they begin to be fetched, over the ``link`` and
    into ``room`` for two of them."""

    line: int
    result: str
    call: Node
    matrix: Tensor
    count: int
    room: Tensor
    link: Collective


@dataclass(frozen=True, slots=True, kw_only=True)
class InSlices:
    """The lines of a program in which products read some values in slices, without what only
    looked at these; ``reads`` are of each such value."""

    graph: Graph
    lines: tuple[Instruction, ...]
    reads: Mapping[str, tuple[Read, ...]]


def sliceable_inputs(program: Program, values: Iterable[str]) -> dict[str, tuple[Product, ...]]:
    """Of these values: what the backward pass reads nothing but as a side of products that are sums
    over its rows, and those products."""
    looks = Looks(program, values)
    lines = _lines(program, looks)
    late = range(first_late(lines), len(lines))
    reads = looks.reads(lines)
    found: dict[str, tuple[Product, ...]] = {}
    for value in looks.reads([lines[number] for number in late]):
        products = [_product(program.graph, lines[k], looks) for k in reads[value] if k in late]
        sums = tuple(product for product in products if product is not None)
        if len(sums) == len(products):
            found[value] = sums
    return found


def with_inputs_in_slices(
    program: Program, slices: Mapping[str, int], slots: Mapping[str, int]
) -> InSlices:
    """``slots`` are the places of these values in offload memory."""
    looks = Looks(program, slices)
    lines = _lines(program, looks)
    late = first_late(lines)
    nodes: list[Node] = []
    storages = list(program.graph.storages)
    placed: list[Instruction] = []
    reads: dict[str, list[Read]] = {value: [] for value in slices}
    for number, line in enumerate(lines):
        product = _product(program.graph, line, looks) if number >= late else None
        if product is None:
            placed.append(line)
            continue
        count = slices[product.far]
        loop = Loop.alone(number, product, count)
        own = LoopCall(loop, program.graph, lines, slots)
        room, link = slices_of(product.matrix, count, storage=len(storages))
        storages.append(Storage(nbytes=room.nbytes, role=Role.ACTIVATION))
        nodes += [own.node, *(node for node, _ in own.results())]
        reads[product.far].append(
            Read(
                line=len(placed),
                result=line.value,
                call=own.node,
                matrix=product.matrix,
                count=count,
                room=room,
                link=link,
            )
        )
        placed += own.lines()
    graph = program.graph
    if nodes:
        graph = replace(graph, nodes=(*graph.nodes, *nodes), storages=tuple(storages))
    return InSlices(
        graph=graph,
        lines=tuple(placed),
        reads={value: tuple(own) for value, own in reads.items()},
    )


def _lines(program: Program, looks: Looks) -> Sequence[Instruction]:
    """Without what looks at these values in the backward pass: there they are not."""
    lines = [i for i in program.instructions if i.sink is None]
    late = first_late(lines)
    return [line for k, line in enumerate(lines) if k < late or line.value not in looks.of]


def _product(graph: Graph, line: Instruction, looks: Looks) -> Product | None:
    """What this line computes, if that is a sum over the rows of one of these values."""
    product = Product.of(graph.by_name[line.node], graph, looks)
    return None if product is None or product.by_columns else product
