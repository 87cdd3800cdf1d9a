"""Products with a weight that is never near whole: they read it from far memory, slice by slice.

Not for how many slices: see trades/. Not for computing them: see exchange/.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from steelyard.core.far_calls import Calls, Looks, Running
from steelyard.core.graph import FAR_PRODUCTS, Graph, Node, Phase
from steelyard.core.program import Instruction, Program
from steelyard.core.updates import WEIGHT


def sliceable(program: Program, parameters: Iterable[str]) -> frozenset[str]:
    """Of these weights: what nothing reads but products of which it is the right side."""
    nodes = program.graph.by_name
    able = [p for p in parameters if _is_row_major(nodes[WEIGHT + p])]
    looks = Looks(program, [WEIGHT + p for p in able])
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


def with_products_far(
    program: Program, slices: Mapping[str, int], leads: Mapping[str, int]
) -> Program:
    """Around each product: begin to fetch slices, let the last two go."""
    graph = program.graph
    calls = Calls(graph, Phase.BACKWARD)
    looks = Looks(program, [WEIGHT + parameter for parameter in slices])
    calls.drop(looks.names)
    lines = [i for i in program.instructions if i.sink is None and i.value not in looks.of]
    running = Running(graph, lines)
    beginning: dict[int, list[Instruction]] = {}
    products: dict[int, tuple[Product, Instruction]] = {}
    for weight, reads in looks.reads(lines).items():
        parameter = weight.removeprefix(WEIGHT)
        for number, read in enumerate(reads):
            product = Product.of(graph.by_name[lines[read].node], graph, looks)
            assert product is not None
            begin, end = calls.slices(
                weight, number, slices[parameter], beside_bytes=product.beside_bytes
            )
            place = running.before(read, leads[parameter])
            beginning.setdefault(place, []).append(replace(begin, phase=lines[place].phase))
            products[read] = product, replace(end, phase=lines[read].phase)
    ordered: list[Instruction] = []
    for number, line in enumerate(lines):
        ordered += beginning.get(number, [])
        if number in products:
            product, end = products[number]
            own = calls.instead(product.far())
            ordered += [replace(own, value=line.value, inputs=product.without(line.inputs)), end]
        else:
            ordered.append(line)
    result = Program.of(calls.graph(), ordered, repeats=program.repeats, update=program.update)
    assert not result.problems(), result.problems()
    return result


@dataclass(frozen=True, slots=True, kw_only=True)
class Product:
    """``mm`` or ``addmm`` whose right side is a weight (a sum over its rows), or that weight
    transposed (its rows are the columns of the result)."""

    node: Node
    weight: str
    place: int
    by_columns: bool

    @classmethod
    def of(cls, node: Node, graph: Graph, looks: Looks) -> "Product | None":
        place = {"aten.mm.default": 1, "aten.addmm.default": 2}.get(node.op)
        if place is None or node.kwargs or len(set(node.inputs)) != len(node.args):
            return None
        *others, right = node.inputs
        weight = looks.weight_of(right)
        if not weight or any(looks.weight_of(name) for name in others):
            return None
        (own,), (seen,) = graph.by_name[weight].outputs, graph.by_name[right].outputs
        by_columns = (seen.shape, seen.stride) == (own.shape[::-1], own.stride[::-1])
        if not by_columns and ((seen.shape, seen.stride) != (own.shape, own.stride) or place == 2):
            return None
        return cls(node=node, weight=weight, place=place, by_columns=by_columns)

    @property
    def beside_bytes(self) -> int:
        """A sum in half precision is kept in single until it is whole."""
        (out,) = self.node.outputs
        is_half = out.dtype in ("float16", "bfloat16")
        return 4 * out.numel if is_half and not self.by_columns else 0

    def far(self) -> Node:
        """The call that reads the weight from far memory."""
        args = [a for place, a in enumerate(self.node.args) if place != self.place]
        return replace(
            self.node,
            op=f"{FAR_PRODUCTS}{'columns' if self.by_columns else 'sum'}",
            args=(self.weight, *args),
            inputs=self.without(self.node.inputs),
        )

    def without(self, inputs: Sequence[str]) -> tuple[str, ...]:
        return tuple(name for place, name in enumerate(inputs) if place != self.place)
