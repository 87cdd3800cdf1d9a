"""Loops over slices: products with an offloaded weight or activation, fused with pointwise work.

A product ``x @ W.T`` that reads the rows of ``W`` in slices makes some columns of its result at a
time. Pointwise operators that follow run on those columns while they are in the cache. Products
whose results meet in such an operator share one loop. Not for fetching: see
sliced_weight_matmuls.py and sliced_activation_matmuls.py.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from types import MappingProxyType

from steelyard.ir.analysis.sliced_body import body_cost_key
from steelyard.ir.graph import (
    FETCH_MATMUL,
    Body,
    Graph,
    Node,
    Phase,
    Ref,
    SlicedValue,
    Tensor,
)
from steelyard.ir.program import Instruction
from steelyard.passes.offload.transfer_nodes import OffloadedViews, rows_in_slice
from steelyard.passes.slicing.column_rules import in_columns, on_columns
from steelyard.passes.slicing.row_rules import IsPointwise


@dataclass(frozen=True, slots=True, kw_only=True)
class Product:
    """An ``mm`` or ``addmm`` whose ``operand`` is offloaded.

    ``matrix`` describes the operand row-major, as it is stored in offload memory. The operand is
    the right side (the product sums over its rows), the transposed right side (its rows become
    columns of the result) or the transposed left side (the product sums over its rows).
    ``is_transposed`` marks the transposed cases.
    """

    node: Node
    operand: str
    place: int
    matrix: Tensor
    is_transposed: bool

    @classmethod
    def of(cls, node: Node, graph: Graph, looks: OffloadedViews) -> "Product | None":
        places = [place for place, name in enumerate(node.inputs) if looks.offloaded_source(name)]
        if node.kwargs or len(set(node.inputs)) != len(node.args) or len(places) != 1:
            return None
        (place,) = places
        if place not in _PLACES.get(node.op, ()):
            return None
        operand = looks.offloaded_source(node.inputs[place])
        (own,), (seen,) = (
            graph.by_name[operand].outputs,
            graph.by_name[node.inputs[place]].outputs,
        )
        turned = replace(seen, shape=seen.shape[::-1], stride=seen.stride[::-1])
        is_transposed = not _is_matrix(seen, own)
        if is_transposed and not _is_matrix(turned, own):
            return None
        matrix = turned if is_transposed else seen
        found = cls(
            node=node, operand=operand, place=place, matrix=matrix, is_transposed=is_transposed
        )
        return found if found.is_right or is_transposed else None

    @property
    def by_columns(self) -> bool:
        return self.is_transposed and self.is_right

    @property
    def is_right(self) -> bool:
        return self.place == len(self.node.inputs) - 1


# Positions of the operands of a product among its inputs. The input that addmm adds is not an
# operand.
_PLACES = {"aten.mm.default": (0, 1), "aten.addmm.default": (2,)}


def _is_matrix(seen: Tensor, own: Tensor) -> bool:
    """True if ``seen`` is a row-major matrix view of all elements of ``own``."""
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
    """Lines of a program that are executed as one loop over slices.

    ``lines`` are line numbers, the first of them a product; ``products`` maps the numbers of all
    products. The loop takes the place of its last line. The lines ``deferred`` read a result of the
    loop before its last line, so they move after it.
    """

    lines: tuple[int, ...]
    products: Mapping[int, Product]
    deferred: tuple[int, ...]
    rows: int
    each: int

    @classmethod
    def single(cls, number: int, product: Product, slices: int) -> "Loop":
        return cls(
            lines=(number,),
            products={number: product},
            deferred=(),
            rows=product.matrix.shape[0],
            each=rows_in_slice(product.matrix, slices),
        )


class Loops:
    """Finds the loops among ``lines``; ``slices`` is the number of slices of each weight."""

    def __init__(
        self,
        graph: Graph,
        lines: Sequence[Instruction],
        looks: OffloadedViews,
        slices: Mapping[str, int],
        *,
        is_pointwise: IsPointwise,
    ) -> None:
        self._graph = graph
        self._lines = lines
        self._slices = slices
        self._is_pointwise = is_pointwise
        self._producer = {line.value: number for number, line in enumerate(lines)}
        # Maps each line in a loop to the loop's first line.
        self._loop_of: dict[int, int] = {}
        self._found: dict[int, Loop] = {}
        for number, line in enumerate(lines):
            product = Product.of(graph.by_name[line.node], graph, looks)
            if product is not None and product.operand in slices:
                self._begin(number, product)
            else:
                self._extend(number)

    def found(self) -> tuple[Loop, ...]:
        return tuple(self._found[first] for first in sorted(self._found))

    def _begin(self, number: int, product: Product) -> None:
        self._loop_of[number] = number
        self._found[number] = Loop.single(number, product, self._slices[product.operand])

    def _extend(self, number: int) -> None:
        """Add this line to the loop whose columns it reads; merge loops if it reads several."""
        line = self._lines[number]
        read = [self._producer[name] for name in line.inputs if name in self._producer]
        met = [
            self._found[first]
            for first in sorted({self._loop_of[k] for k in read if k in self._loop_of})
        ]
        if not met or not _have_equal_slices(met):
            return
        node = self._graph.by_name[line.node]
        found = in_columns(self._graph, node, columns=met[0].rows, is_pointwise=self._is_pointwise)
        inside = {k for loop in met for k in loop.lines}
        if found is None or any(
            not found[name]
            for name, value in zip(node.inputs, line.inputs, strict=True)
            if self._producer.get(value) in inside
        ):
            return
        members = tuple(sorted((*inside, number)))
        deferred = self._deferred(members)
        if deferred is None or not self._has_unique_inputs(members):
            return
        for loop in met:
            del self._found[loop.lines[0]]
        self._loop_of.update(dict.fromkeys(members, members[0]))
        self._found[members[0]] = Loop(
            lines=members,
            products={k: p for loop in met for k, p in loop.products.items()},
            deferred=deferred,
            rows=met[0].rows,
            each=met[0].each,
        )

    def _deferred(self, members: Sequence[int]) -> tuple[int, ...] | None:
        """Return the lines between ``members`` that depend on them, and so must move after the
        last.

        None if a member depends on such a line, or if the move would change the order of random
        draws or writes.
        """
        inside, late = set(members), {self._lines[k].value for k in members}
        deferred: list[int] = []
        has_random_deferred = False
        for number in range(members[0], members[-1] + 1):
            line, node = self._lines[number], self._graph.by_name[self._lines[number].node]
            if line.phase is not self._lines[members[0]].phase or node.mutates:
                return None
            is_late = any(name in late for name in line.inputs)
            if number in inside:
                outside = (name for name in line.inputs if self._producer.get(name) not in inside)
                if any(name in late for name in outside):
                    return None
            elif is_late:
                late.add(line.value)
                deferred.append(number)
                has_random_deferred |= node.is_random
            elif node.is_random and has_random_deferred:
                return None
        others = {k for loop in self._found.values() for k in loop.lines} - inside
        # Another loop is a single call, so its lines cannot be separated.
        return None if others.intersection(deferred) else tuple(deferred)

    def _has_unique_inputs(self, members: Sequence[int]) -> bool:
        """True if each node is only one value, among inputs from outside and the loop's own lines.

        The calls of a loop refer to values by node name, so these names must be unique.
        """
        inside = set(members)
        nodes: dict[str, str] = {}
        for line in (self._lines[k] for k in members):
            read = zip(self._graph.by_name[line.node].inputs, line.inputs, strict=True)
            for name, value in read:
                if (
                    self._producer.get(value) not in inside
                    and nodes.setdefault(name, value) != value
                ):
                    return False
        own = {self._lines[k].node for k in members}
        return len(own) == len(members) and own.isdisjoint(nodes)


def _have_equal_slices(loops: Sequence[Loop]) -> bool:
    """True if all loops make the same columns in each slice."""
    products = [p for loop in loops for p in loop.products.values()]
    return (
        all(p.by_columns for p in products)
        and len({(loop.rows, loop.each) for loop in loops}) == 1
        and len({p.operand for p in products}) == len(products)
    )


class LoopCall:
    """A loop as one call of the program: the node, its line, and the lines of its results.

    Offloaded operands are plain arguments: the slot number from ``slots``, otherwise the name.
    """

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
        self._results: list[Instruction] = []
        for line in reversed(self._lines.values()):
            if line.value not in read | leaving:
                continue
            if graph.by_name[line.node].is_view:
                self._views.insert(0, line)
                read.update(line.inputs)
            else:
                self._results.insert(0, line)
        self._takes: dict[tuple[str, int | None], tuple[str, SlicedValue]] = {}
        self.body = self._body()
        self.node = self._whole()

    @property
    def offloaded(self) -> tuple[str, ...]:
        return tuple(product.operand for product in self._loop.products.values())

    def results(self) -> list[tuple[Node, Instruction]]:
        """Return the getitem nodes and lines for the results, with the names of values in use."""
        found = []
        for place, line in enumerate(self._results):
            node = Node(
                name=f"{line.value}.offloaded",
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
        """Return the lines of the call, of its results, and of the views of its results."""
        inputs = tuple(value for value, _ in self._takes.values())
        phase = next(iter(self._lines.values())).phase
        call = _line_of(self.node, self.node.name, tuple(dict.fromkeys(inputs)), phase)
        return [call, *(line for _, line in self.results()), *self._views]

    def _body(self) -> Body:
        loop, graph = self._loop, self._graph
        counts = sorted({loop.each, loop.rows % loop.each or loop.each}, reverse=True)
        calls = {count: tuple(self._calls(count)) for count in counts}
        offloaded = tuple(
            SlicedValue(name=product.operand, tensor=product.matrix, along=0)
            for product in loop.products.values()
        )
        is_sum = not next(iter(loop.products.values())).by_columns
        return Body(
            rows=loop.rows,
            parts=-(-loop.rows // loop.each),
            each=loop.each,
            takes=(*offloaded, *(take for _, take in self._takes.values())),
            calls=tuple((count, calls[count]) for count in sorted(counts)),
            gives=tuple(
                SlicedValue(
                    name=line.node,
                    tensor=graph.by_name[line.node].outputs[0],
                    along=None if is_sum else -1,
                )
                for line in self._results
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
        """Return the product on one slice, after a transpose of the slice if it needs one."""
        node, read = product.node, dict(zip(product.node.inputs, line.inputs, strict=True))
        seen, slice_, transpose = node.inputs[product.place], product.operand, []
        if product.is_transposed:
            slice_ = f"{product.operand}.t"
            (tensor,) = self._graph.by_name[seen].outputs
            transpose = [
                Node(
                    name=slice_,
                    op="aten.t.default",
                    args=(Ref(product.operand),),
                    inputs=(product.operand,),
                    outputs=(replace(tensor, storage=product.matrix.storage),),
                    signature="aten.t.default",
                    is_view=True,
                )
            ]
        renamed = {seen: slice_}
        for place, name in enumerate(node.inputs):
            if place != product.place:
                along = self._sliced_dim(product, place, name)
                renamed[name] = self._add_input(name, read[name], along=along)
        return [*transpose, node.reading(renamed)]

    def _sliced_dim(self, product: Product, place: int, name: str) -> int | None:
        """Return the dim along which another argument is sliced, or None if it is read as a
        whole.
        """
        if not product.is_right:
            return 0
        is_added = place < product.place - 1
        # A product that makes columns slices the added input; a product that sums slices the left
        # operand.
        is_cut = product.by_columns == is_added and self._is_in_columns(name)
        return -1 if is_cut else None

    def _is_in_columns(self, name: str) -> bool:
        return self._graph.by_name[name].outputs[0].shape[-1:] == (self._loop.rows,)

    def _pointwise(self, line: Instruction, count: int) -> Node:
        node = on_columns(self._graph.by_name[line.node], count)
        inside = {own.value for own in self._lines.values()}
        return node.reading(
            {
                name: self._add_input(name, value, along=-1 if self._is_in_columns(name) else None)
                for name, value in zip(node.inputs, line.inputs, strict=True)
                if value not in inside
            }
        )

    def _add_input(self, name: str, value: str, *, along: int | None) -> str:
        """Register an input of the loop and return its name in the calls of the body.

        The same value may be read as a whole and in columns; it then has two names.
        """
        called = {None: name, -1: f"{name}.columns", 0: f"{name}.rows"}[along]
        tensor = self._graph.by_name[name].outputs[0]
        take = SlicedValue(name=called, tensor=tensor, along=along)
        self._takes.setdefault((name, along), (value, take))
        return called

    def _whole(self) -> Node:
        first = next(iter(self._lines.values()))
        nodes = [self._graph.by_name[line.node] for line in self._lines.values()]
        digest = sha256(body_cost_key(self.body).encode()).hexdigest()[:24]
        return Node(
            name=f"{first.value}.slices",
            op=FETCH_MATMUL,
            args=(
                tuple(self._slots.get(operand, operand) for operand in self.offloaded),
                *(Ref(name) for name, _ in self._takes),
            ),
            inputs=tuple(dict.fromkeys(name for name, _ in self._takes)),
            outputs=tuple(given.tensor for given in self.body.gives),
            # This is not in the forward phase, because names and counts of forward nodes refer to
            # the captured step.
            phase=Phase.BACKWARD,
            path=nodes[0].path,
            line=nodes[0].line,
            signature=f"{FETCH_MATMUL}({digest})",
            flops=sum(node.flops for node in nodes),
            moved_bytes=sum(node.moved_bytes for node in nodes),
            body=self.body,
        )


def _line_of(node: Node, value: str, inputs: tuple[str, ...], phase: Phase) -> Instruction:
    return Instruction(node=node.name, value=value, inputs=inputs, phase=phase)
