"""Backward products that read an offloaded activation slice by slice, never as a whole.

Each such product fetches its slices itself. Not for choosing activations or the number of slices:
see trades/. Not for executing the products: see offload/.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from steelyard.ir.collective import Collective
from steelyard.ir.graph import Graph, Node, Role, Storage, Tensor
from steelyard.ir.program import Instruction, Program
from steelyard.ir.saved_activations import first_backward_line
from steelyard.passes.offload.sliced_loops import Loop, LoopCall, Product
from steelyard.passes.offload.transfer_nodes import OffloadedViews, slices_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Read:
    """A sliced read of an activation: the ``call`` that loops over its slices, at this line.

    The call replaces the line that made ``result`` from the whole activation. Slices are fetched
    over ``link`` into ``room``, a buffer for two of them.
    """

    line: int
    result: str
    call: Node
    matrix: Tensor
    count: int
    room: Tensor
    link: Collective


@dataclass(frozen=True, slots=True, kw_only=True)
class InSlices:
    """A program in which products read some values in slices; ``reads`` are given by value.

    ``lines`` no longer contain views of these values in the backward pass.
    """

    graph: Graph
    lines: tuple[Instruction, ...]
    reads: Mapping[str, tuple[Read, ...]]


def sliceable_inputs(program: Program, values: Iterable[str]) -> dict[str, tuple[Product, ...]]:
    """Return the values that the backward pass only reads in products that sum over their rows.

    The result maps each such value to those products.
    """
    looks = OffloadedViews(program, values)
    lines = _lines(program, looks)
    late = range(first_backward_line(lines), len(lines))
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
    """Make backward products read these values in slices, from ``slots`` of offload memory."""
    looks = OffloadedViews(program, slices)
    lines = _lines(program, looks)
    late = first_backward_line(lines)
    nodes: list[Node] = []
    storages = list(program.graph.storages)
    placed: list[Instruction] = []
    reads: dict[str, list[Read]] = {value: [] for value in slices}
    for number, line in enumerate(lines):
        product = _product(program.graph, line, looks) if number >= late else None
        if product is None:
            placed.append(line)
            continue
        count = slices[product.operand]
        loop = Loop.single(number, product, count)
        own = LoopCall(loop, program.graph, lines, slots)
        buffer, link = slices_of(product.matrix, count, storage=len(storages))
        storages.append(Storage(nbytes=buffer.nbytes, role=Role.ACTIVATION))
        nodes += [own.node, *(node for node, _ in own.results())]
        reads[product.operand].append(
            Read(
                line=len(placed),
                result=line.value,
                call=own.node,
                matrix=product.matrix,
                count=count,
                room=buffer,
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


def _lines(program: Program, looks: OffloadedViews) -> Sequence[Instruction]:
    """Return the lines without backward views of these values, because no value is resident as a
    whole.
    """
    lines = [i for i in program.instructions if i.sink is None]
    late = first_backward_line(lines)
    return [line for k, line in enumerate(lines) if k < late or line.value not in looks.of]


def _product(graph: Graph, line: Instruction, looks: OffloadedViews) -> Product | None:
    """Return the matrix product of this line if it sums over the rows of one of ``values``."""
    product = Product.of(graph.by_name[line.node], graph, looks)
    return None if product is None or product.by_columns else product
