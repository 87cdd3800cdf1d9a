"""Lines that are carried out slice by slice: products with what lies in offload memory (a weight,
or a value of the forward pass), and the pointwise work behind them.

A product that reads slices of rows of ``W`` in ``x @ W.T`` makes columns of its result, and what is
pointwise behind it is made of those columns while they are at hand. Products that meet in such work
are carried out together. Not for fetching: see sliced_weight_matmuls.py and
sliced_activation_matmuls.py.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from types import MappingProxyType

from steelyard.ir.graph import (
    FAR_PRODUCTS,
    Body,
    Graph,
    Node,
    Phase,
    Ref,
    SlicedValue,
    Tensor,
)
from steelyard.ir.program import Instruction
from steelyard.passes.offload.transfer_nodes import Looks, rows_in_slice
from steelyard.passes.slicing.column_rules import IsPointwise, in_columns, on_columns


@dataclass(frozen=True, slots=True, kw_only=True)
class Product:
    """``mm`` or ``addmm`` of which one side lies far: ``matrix`` is how its rows lie there. It is
    the right side (the product is a sum over its rows), or that turned (its rows are the columns of
    the result), or the left side turned (a sum again)."""

    node: Node
    far: str
    place: int
    matrix: Tensor
    is_turned: bool

    @classmethod
    def of(cls, node: Node, graph: Graph, looks: Looks) -> "Product | None":
        places = [place for place, name in enumerate(node.inputs) if looks.far_of(name)]
        if node.kwargs or len(set(node.inputs)) != len(node.args) or len(places) != 1:
            return None
        (place,) = places
        if place not in _PLACES.get(node.op, ()):
            return None
        far = looks.far_of(node.inputs[place])
        (own,), (seen,) = (
            graph.by_name[far].outputs,
            graph.by_name[node.inputs[place]].outputs,
        )
        turned = replace(seen, shape=seen.shape[::-1], stride=seen.stride[::-1])
        is_turned = not _is_matrix(seen, own)
        if is_turned and not _is_matrix(turned, own):
            return None
        matrix = turned if is_turned else seen
        found = cls(node=node, far=far, place=place, matrix=matrix, is_turned=is_turned)
        return found if found.is_right or is_turned else None

    @property
    def by_columns(self) -> bool:
        return self.is_turned and self.is_right

    @property
    def is_right(self) -> bool:
        return self.place == len(self.node.inputs) - 1


# Of the sides of a product; what is added to one is none.
_PLACES = {"aten.mm.default": (0, 1), "aten.addmm.default": (2,)}


def _is_matrix(seen: Tensor, own: Tensor) -> bool:
    """Whether these are all the numbers that lie there, row by row."""
    return (
        own.is_contiguous
        and seen.is_contiguous
        and len(seen.shape) == 2
        and (seen.dtype, seen.numel, seen.offset, seen.pending)
        == (own.dtype, own.numel, own.offset, own.pending)
        and (len(own.shape) != 2 or seen.shape == own.shape)
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Loop:
    """``lines`` by number, the first of them a product; ``products`` are those among them. The loop
    stands where its last line did, and ``behind`` it what read something of it before that."""

    lines: tuple[int, ...]
    products: Mapping[int, Product]
    behind: tuple[int, ...]
    rows: int
    each: int

    @classmethod
    def alone(cls, number: int, product: Product, slices: int) -> "Loop":
        return cls(
            lines=(number,),
            products={number: product},
            behind=(),
            rows=product.matrix.shape[0],
            each=rows_in_slice(product.matrix, slices),
        )


class Loops:
    """Finds the loops among ``lines``; ``slices`` is how many each weight is read in."""

    def __init__(
        self,
        graph: Graph,
        lines: Sequence[Instruction],
        looks: Looks,
        slices: Mapping[str, int],
        *,
        is_pointwise: IsPointwise,
    ) -> None:
        self._graph = graph
        self._lines = lines
        self._slices = slices
        self._is_pointwise = is_pointwise
        self._made = {line.value: number for number, line in enumerate(lines)}
        # Of each line in a loop, the loop's first line.
        self._of: dict[int, int] = {}
        self._found: dict[int, Loop] = {}
        for number, line in enumerate(lines):
            product = Product.of(graph.by_name[line.node], graph, looks)
            if product is not None and product.far in slices:
                self._begin(number, product)
            else:
                self._extend(number)

    def found(self) -> tuple[Loop, ...]:
        return tuple(self._found[first] for first in sorted(self._found))

    def _begin(self, number: int, product: Product) -> None:
        self._of[number] = number
        self._found[number] = Loop.alone(number, product, self._slices[product.far])

    def _extend(self, number: int) -> None:
        """Take this line into the loop, or the loops, of which it reads columns."""
        line = self._lines[number]
        read = [self._made[name] for name in line.inputs if name in self._made]
        met = [self._found[first] for first in sorted({self._of[k] for k in read if k in self._of})]
        if not met or not _is_alike(met):
            return
        node = self._graph.by_name[line.node]
        found = in_columns(self._graph, node, columns=met[0].rows, is_pointwise=self._is_pointwise)
        inside = {k for loop in met for k in loop.lines}
        if found is None or any(
            not found[name]
            for name, value in zip(node.inputs, line.inputs, strict=True)
            if self._made.get(value) in inside
        ):
            return
        members = tuple(sorted((*inside, number)))
        behind = self._behind(members)
        if behind is None or not self._is_told_apart(members):
            return
        for loop in met:
            del self._found[loop.lines[0]]
        self._of.update(dict.fromkeys(members, members[0]))
        self._found[members[0]] = Loop(
            lines=members,
            products={k: p for loop in met for k, p in loop.products.items()},
            behind=behind,
            rows=met[0].rows,
            each=met[0].each,
        )

    def _behind(self, members: Sequence[int]) -> tuple[int, ...] | None:
        """The lines between the first and the last of these that depend on one of them and so move
        behind the last; None where some member does, or order would change that matters."""
        inside, late = set(members), {self._lines[k].value for k in members}
        behind: list[int] = []
        has_random_behind = False
        for number in range(members[0], members[-1] + 1):
            line, node = self._lines[number], self._graph.by_name[self._lines[number].node]
            if line.phase is not self._lines[members[0]].phase or node.mutates:
                return None
            is_late = any(name in late for name in line.inputs)
            if number in inside:
                outside = (name for name in line.inputs if self._made.get(name) not in inside)
                if any(name in late for name in outside):
                    return None
            elif is_late:
                late.add(line.value)
                behind.append(number)
                has_random_behind |= node.is_random
            elif node.is_random and has_random_behind:
                return None
        others = {k for loop in self._found.values() for k in loop.lines} - inside
        # Another loop is one call too: it may not be torn apart.
        return None if others.intersection(behind) else tuple(behind)

    def _is_told_apart(self, members: Sequence[int]) -> bool:
        """Whether what is read from outside is another node for each value."""
        inside = set(members)
        nodes: dict[str, str] = {}
        for line in (self._lines[k] for k in members):
            read = zip(self._graph.by_name[line.node].inputs, line.inputs, strict=True)
            for name, value in read:
                if self._made.get(value) not in inside and nodes.setdefault(name, value) != value:
                    return False
        own = {self._lines[k].node for k in members}
        return len(own) == len(members) and own.isdisjoint(nodes)


def _is_alike(loops: Sequence[Loop]) -> bool:
    """Whether their slices are the same columns."""
    products = [p for loop in loops for p in loop.products.values()]
    return (
        all(p.by_columns for p in products)
        and len({(loop.rows, loop.each) for loop in loops}) == 1
        and len({p.far for p in products}) == len(products)
    )


class LoopCall:
    """A loop as one call of the program: the node, its line, and the lines of what it gives. What
    lies far is named as it is there: by its place, where ``slots`` has one."""

    def __init__(
        self,
        loop: Loop,
        graph: Graph,
        lines: Sequence[Instruction],
        slots: Mapping[str, int] = MappingProxyType({}),
    ) -> None:
        self._loop = loop
        self._slots = slots
        self._graph = graph
        self._lines = {number: lines[number] for number in loop.lines}
        inside = {line.value for line in self._lines.values()}
        leaving = {output.node for output in graph.outputs}
        read = {
            name for number, line in enumerate(lines) if number not in loop.lines
            for name in line.inputs if name in inside
        }  # fmt: skip
        self._views: list[Instruction] = []
        self._given: list[Instruction] = []
        for line in reversed(self._lines.values()):
            if line.value not in read | leaving:
                continue
            if graph.by_name[line.node].is_view:
                self._views.insert(0, line)
                read.update(line.inputs)
            else:
                self._given.insert(0, line)
        self._takes: dict[tuple[str, int | None], tuple[str, SlicedValue]] = {}
        self.body = self._body()
        self.node = self._whole()

    @property
    def far(self) -> tuple[str, ...]:
        return tuple(product.far for product in self._loop.products.values())

    def results(self) -> list[tuple[Node, Instruction]]:
        """What takes its results apart; they keep the names that others read."""
        found = []
        for place, line in enumerate(self._given):
            node = Node(
                name=f"{line.value}.far",
                op="getitem",
                args=(Ref(self.node.name), place),
                inputs=(self.node.name,),
                outputs=(self.node.outputs[place],),
                phase=Phase.BACKWARD,
                path=self.node.path,
                line=self.node.line,
                is_view=True,
            )
            found.append((node, _line_of(node, line.value, node.inputs, line.phase)))
        return found

    def lines(self) -> list[Instruction]:
        """The call, its results, and what only looks at them."""
        inputs = tuple(value for value, _ in self._takes.values())
        phase = next(iter(self._lines.values())).phase
        call = _line_of(self.node, self.node.name, tuple(dict.fromkeys(inputs)), phase)
        return [call, *(line for _, line in self.results()), *self._views]

    def _body(self) -> Body:
        loop, graph = self._loop, self._graph
        counts = sorted({loop.each, loop.rows % loop.each or loop.each}, reverse=True)
        calls = {count: tuple(self._calls(count)) for count in counts}
        far = tuple(
            SlicedValue(name=product.far, tensor=product.matrix, along=0)
            for product in loop.products.values()
        )
        is_sum = not next(iter(loop.products.values())).by_columns
        return Body(
            rows=loop.rows,
            parts=-(-loop.rows // loop.each),
            each=loop.each,
            takes=(*far, *(take for _, take in self._takes.values())),
            calls=tuple((count, calls[count]) for count in sorted(counts)),
            gives=tuple(
                SlicedValue(
                    name=line.node,
                    tensor=graph.by_name[line.node].outputs[0],
                    along=None if is_sum else -1,
                )
                for line in self._given
            ),
        )

    def _calls(self, count: int) -> list[Node]:
        calls = []
        for number, line in self._lines.items():
            product = self._loop.products.get(number)
            if product is None:
                calls.append(self._pointwise(line, count))
            else:
                calls += self._product(product, line)
        return calls

    def _product(self, product: Product, line: Instruction) -> list[Node]:
        """Of the slice of what lies far, turned where it was turned as a whole."""
        node, read = product.node, dict(zip(product.node.inputs, line.inputs, strict=True))
        seen, slice_, turn = node.inputs[product.place], product.far, []
        if product.is_turned:
            slice_ = f"{product.far}.t"
            (tensor,) = self._graph.by_name[seen].outputs
            turn = [
                Node(
                    name=slice_,
                    op="aten.t.default",
                    args=(Ref(product.far),),
                    inputs=(product.far,),
                    outputs=(replace(tensor, storage=product.matrix.storage),),
                    signature="aten.t.default",
                    is_view=True,
                )
            ]
        renamed = {seen: slice_}
        for place, name in enumerate(node.inputs):
            if place != product.place:
                along = self._cut(product, place, name)
                renamed[name] = self._taken(name, read[name], along=along)
        return [*turn, node.reading(renamed)]

    def _cut(self, product: Product, place: int, name: str) -> int | None:
        """Along which dim a slice takes some of another argument; None for all of it."""
        if not product.is_right:
            return 0
        is_added = place < product.place - 1
        # Columns of what is added for columns of the result; of the left side for rows of a sum.
        is_cut = product.by_columns == is_added and self._is_in_columns(name)
        return -1 if is_cut else None

    def _is_in_columns(self, name: str) -> bool:
        return self._graph.by_name[name].outputs[0].shape[-1:] == (self._loop.rows,)

    def _pointwise(self, line: Instruction, count: int) -> Node:
        node = on_columns(self._graph.by_name[line.node], count)
        inside = {own.value for own in self._lines.values()}
        return node.reading(
            {
                name: self._taken(name, value, along=-1 if self._is_in_columns(name) else None)
                for name, value in zip(node.inputs, line.inputs, strict=True)
                if value not in inside
            }
        )

    def _taken(self, name: str, value: str, *, along: int | None) -> str:
        """What the calls name it; the same value may be read whole and in columns."""
        called = {None: name, -1: f"{name}.columns", 0: f"{name}.rows"}[along]
        tensor = self._graph.by_name[name].outputs[0]
        take = SlicedValue(name=called, tensor=tensor, along=along)
        self._takes.setdefault((name, along), (value, take))
        return called

    def _whole(self) -> Node:
        first = next(iter(self._lines.values()))
        nodes = [self._graph.by_name[line.node] for line in self._lines.values()]
        told = sha256(self.body.told.encode()).hexdigest()[:24]
        return Node(
            name=f"{first.value}.slices",
            op=FAR_PRODUCTS,
            args=(
                tuple(self._slots.get(far, far) for far in self.far),
                *(Ref(name) for name, _ in self._takes),
            ),
            inputs=tuple(dict.fromkeys(name for name, _ in self._takes)),
            outputs=tuple(given.tensor for given in self.body.gives),
            # Not of the forward pass: whatever names or counts that sees the step as captured.
            phase=Phase.BACKWARD,
            path=nodes[0].path,
            line=nodes[0].line,
            signature=f"{FAR_PRODUCTS}({told})",
            flops=sum(node.flops for node in nodes),
            moved_bytes=sum(node.moved_bytes for node in nodes),
            body=self.body,
        )


def _line_of(node: Node, value: str, inputs: tuple[str, ...], phase: Phase) -> Instruction:
    return Instruction(node=node.name, value=value, inputs=inputs, phase=phase)
