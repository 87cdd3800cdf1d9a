"""Stream: carry out the stretch of a step around a huge value a few rows at a time.

For what no recomputation helps: the scores over a vocabulary and all that is made of them stand at
the end of the forward pass, where everything else is held too. Not for what can be sliced: that is
passes/slicing/region.py; nor for how many slices are best: see search/.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from hashlib import sha256
from math import prod
from typing import Annotated, ClassVar

from pydantic import Field

from steelyard.errors import Mismatch
from steelyard.ir.graph import Body, Graph, Node, Phase, Ref, SlicedValue, Symbol, Tensor
from steelyard.ir.program import Program
from steelyard.ir.rule import Rule, matching, to_rules
from steelyard.ir.step_source import StepSource
from steelyard.passes.slicing.region import SlicedRegion, stretch_around
from steelyard.passes.slicing.row_rules import SliceKind, Unsliceable, arguments, leading
from steelyard.plans.rule_table import LARGEST, RuleTable, Whole
from steelyard.plans.trade import Offer, Rejection

# Fewer rows than this make products slow; and what holds less is no trouble.
_FEWEST_ROWS = 128
_LEAST_BYTES = 1 << 20
# A value is huge beside the whole forward pass: at least this share of all that it makes.
_HUGE_SHARE = 0.02
_FEWEST_SLICES = 2
# Rows of one slice: few slices cost least, many hold least.
_SLICES_OF = (1024, 128)


class ChunkTable(RuleTable):
    """``[[chunk]]``: the call whose result is never whole, and the number of slices."""

    most: ClassVar[int] = 100

    module: str
    op: str
    nth: Whole = 0
    degree: Annotated[int, Field(ge=2, le=LARGEST, alias="slices")]


class Chunk:
    """Pays computation (smaller products, sums of parts), buys memory.

    Exact up to the order in which slices are added.
    """

    name: ClassVar[str] = "chunk"
    pays: ClassVar[tuple[str, ...]] = ("computation",)
    buys: ClassVar[tuple[str, ...]] = ("memory",)
    is_exact: ClassVar[bool] = True
    is_bitwise: ClassVar[bool] = False
    table: ClassVar[type[RuleTable]] = ChunkTable

    def offers(
        self,
        program: Program,
        source: StepSource,  # noqa: ARG002 - other trades ask it
    ) -> tuple[tuple[Offer, ...], tuple[Rejection, ...]]:
        graph = program.graph
        offers: list[Offer] = []
        reasons: dict[str, str] = {}
        covered: set[str] = set()
        for node in _huge(graph):
            if node.name in covered:
                continue
            label = f"{node.op.split('.')[1]} in {node.path or 'the loss'}"
            try:
                stretch = _stretch(graph, node)
            except Unsliceable as error:
                reasons.setdefault(label, str(error))
                continue
            inside = {n.name for n in stretch.nodes}
            if not covered.isdisjoint(inside):
                continue
            covered |= inside
            (rule,) = to_rules(graph, (node.name,), trade=self.name)
            offers += [
                Offer(
                    trade=self.name,
                    label=f"{label}, {parts} slices",
                    rules=(replace(rule, degree=parts),),
                )
                for parts in _parts(node, stretch)
            ]
        if offers:
            return tuple(offers), ()
        # Why not the largest; the reasons of all others would bury it.
        label, reason = next(iter(reasons.items()), (_NONE, _WHY_NONE))
        return (), (Rejection(trade=self.name, label=label, reason=reason),)

    def rewrite(self, program: Program, rules: Sequence[Rule], source: StepSource) -> Program:
        if not rules:
            return program
        assert not program.again, "stream changes the graph, so it is applied before recompute"
        graph = program.graph
        for rule in rules:
            for name in sorted(matching(graph, (rule,))):
                graph = _streamed(graph, graph.by_name[name], parts=rule.degree)
        graph = source.rewritten(graph)
        return program.with_graph(graph)


_NONE = "a large value in slices"
_WHY_NONE = "no value of the forward pass is large beside the others"


def _stretch(graph: Graph, maker: Node) -> SlicedRegion:
    from steelyard.operators import is_pointwise

    if graph.decomposition.startswith("inductor"):
        raise Unsliceable("Inductor, which compiles a stretch as one, would merge slices again")
    return stretch_around(graph, maker, is_pointwise=is_pointwise)


def _huge(graph: Graph) -> list[Node]:
    """What makes the largest values of the forward pass, largest first."""
    makers = [n for n in graph.forward() if not n.is_free and len(n.outputs) == 1]
    least = max(_LEAST_BYTES, _HUGE_SHARE * sum(n.outputs[0].nbytes for n in makers))
    huge = [n for n in makers if n.outputs[0].nbytes >= least]
    return sorted(huge, key=lambda n: (-n.outputs[0].nbytes, graph.position[n.name]))


def _parts(maker: Node, stretch: SlicedRegion) -> list[int]:
    """Of matrices with so many rows; where those cannot be parted, of as few as can be."""
    rows = prod(maker.outputs[0].shape[:-1])
    if rows < 2 * _FEWEST_ROWS:
        return []
    return sorted({min(-(-rows // each), stretch.rows) for each in _SLICES_OF} - {1})


def _streamed(graph: Graph, maker: Node, *, parts: int) -> Graph:
    """The graph with one node in place of the stretch around what ``maker`` makes."""
    if prod(maker.outputs[0].shape[:-1]) < _FEWEST_SLICES:
        return graph  # a later batch may have one row, which is one slice
    try:
        stretch = _stretch(graph, maker)
    except Unsliceable as error:
        raise _cannot(maker, f"cannot be sliced here: {error}") from error
    # A batch of another shape may have fewer rows than the one that was planned has slices.
    return _Replacing(graph, maker, stretch, min(parts, stretch.rows)).graph()


def _cannot(maker: Node, why: str) -> Mismatch:
    return Mismatch(
        f"stream rule: {maker.op} in {maker.path or 'the loss'} {why}",
        expected="a value that is made and read row by row, and a number of slices of its rows",
        remedy="take the rule out of the plan, or plan again",
    )


class _Replacing:
    """Writes the graph in which one node stands for a stretch."""

    def __init__(self, graph: Graph, maker: Node, stretch: SlicedRegion, parts: int) -> None:
        self._graph = graph
        self._maker = maker
        self._stretch = stretch
        self._parts = parts
        self._storages = list(graph.storages)
        self._inside = {n.name for n in stretch.nodes}

    def graph(self) -> Graph:
        graph, stretch = self._graph, self._stretch
        replaced = self._instead()
        gone = self._inside | {n.name for n in replaced}
        early = self._needed_early()
        late = {n.name for n in graph.nodes if n.name not in early} - gone
        ahead = [
            replace(n, phase=Phase.FORWARD, nth=self._next_nth(n) + number)
            if n.phase is Phase.BACKWARD
            else n
            for number, n in enumerate(graph.nodes)
            if n.name in early and n.name not in gone
        ]
        nodes = (*ahead, *replaced, *(n for n in graph.nodes if n.name in late))
        result = replace(graph, nodes=nodes, storages=tuple(self._storages))
        assert not result.problems(), result.problems()
        assert len(stretch.nodes) > 1
        return result

    def _next_nth(self, node: Node) -> int:
        """Calls of the backward pass have numbers of their own; these must differ from all."""
        same = (n.nth for n in self._graph.nodes if (n.path, n.op) == (node.path, node.op))
        return 1 + max(same, default=-1)

    def _needed_early(self) -> set[str]:
        """All of the forward pass that does not wait for the stretch, and what that takes."""
        saved_for_backward = set(self._inside)
        forward = set()
        for node in self._graph.nodes:
            if not saved_for_backward.isdisjoint(node.inputs):
                saved_for_backward.add(node.name)
            elif node.phase is Phase.FORWARD and node.name not in saved_for_backward:
                forward.add(node.name)
        needed = set(self._stretch.takes)
        for node in reversed(self._graph.nodes):
            if node.name in needed:
                needed.update(node.inputs)
        return forward | needed

    def _instead(self) -> list[Node]:
        """What the rows of each mean count, the stretch, its results, and those sums divided."""
        counts, means = [], []
        gives = {name: self._give(name, kind) for name, kind in self._stretch.gives.items()}
        for mean in self._stretch.means:
            count, loss = self._taken_apart(mean)
            weighed = _weight(mean, count)
            counts.append(weighed)
            if mean.args[3] == _SUM:
                gives[loss.name] = SlicedValue(name=mean.name, tensor=loss.outputs[0], along=None)
            else:
                gives[mean.name] = self._sum_of(mean)
                means.append(self._divided(mean, loss, weighed))
        whole = self._whole(tuple(gives.values()))
        results = [self._result(whole, name, place) for place, name in enumerate(gives)]
        return [*counts, whole, *results, *means]

    def _give(self, name: str, kind: SliceKind) -> SlicedValue:
        return self._sliced(name, self._graph.by_name[name].outputs[0], kind)

    def _sum_of(self, mean: Node) -> SlicedValue:
        self._storages.append(self._storages[mean.outputs[0].storage])
        tensor = replace(mean.outputs[0], storage=len(self._storages) - 1)
        return SlicedValue(name=mean.name, tensor=tensor, along=None)

    def _sliced(self, name: str, tensor: Tensor, kind: SliceKind) -> SlicedValue:
        if kind is SliceKind.COLUMNS:
            unit = tensor.shape[-1] // self._stretch.rows
            return SlicedValue(name=name, tensor=tensor, along=-1, unit=unit)
        if kind is not SliceKind.ROWS:
            return SlicedValue(name=name, tensor=tensor, along=None)
        dims = leading(tensor.shape, self._stretch.rows)
        unit = prod(tensor.shape[:dims]) // self._stretch.rows
        return SlicedValue(name=name, tensor=tensor, along=0, dims=dims, unit=unit)

    def _taken_apart(self, mean: Node) -> tuple[Node, Node]:
        """The nodes that take the count and the loss of a mean."""
        users = [self._graph.by_name[u] for u in self._graph.users[mean.name]]
        by_place = {u.args[1]: u for u in users if u.is_getitem}
        return by_place[1], by_place[0]

    def _divided(self, mean: Node, loss: Node, weighed: Node) -> Node:
        """The sum over what it counts."""
        tensor = loss.outputs[0]
        divided = replace(
            loss,
            op="aten.div.Tensor",
            args=(Ref(mean.name), Ref(weighed.name)),
            inputs=(mean.name, weighed.name),
            signature=f"aten.div.Tensor({tensor.dtype}[];{tensor.dtype}[])",
            is_view=False,
            moved_bytes=3 * tensor.nbytes,
        )
        return replace(divided, nth=self._next_nth(divided))

    def _whole(self, gives: Sequence[SlicedValue]) -> Node:
        stretch, maker = self._stretch, self._maker
        takes = tuple(
            self._sliced(name, self._graph.by_name[name].outputs[0], kind)
            for name, kind in stretch.takes.items()
        )
        body = Body(
            rows=stretch.rows,
            parts=self._parts,
            takes=takes,
            calls=tuple(
                (count, tuple(self._calls(count)))
                for count in sorted({-(-stretch.rows // self._parts), stretch.rows // self._parts})
            ),
            gives=tuple(gives),
        )
        return Node(
            name=f"{maker.name}.stream",
            op="steelyard.stream",
            args=tuple(Ref(take.name) for take in takes),
            inputs=tuple(take.name for take in takes),
            outputs=tuple(given.tensor for given in gives),
            phase=Phase.FORWARD,
            path=maker.path,
            line=maker.line,
            nth=maker.nth,
            signature=f"steelyard.stream({sha256(body.told.encode()).hexdigest()[:24]})",
            flops=sum(n.flops for n in stretch.nodes),
            moved_bytes=sum(n.moved_bytes for n in stretch.nodes),
            body=body,
        )

    def _calls(self, count: int) -> Iterator[Node]:
        stretch, graph = self._stretch, self._graph
        for node in stretch.nodes:
            found = stretch.acts[node.name]
            args = arguments(graph, node, found, rows=stretch.rows, count=count)
            yield replace(node, args=args)

    def _result(self, whole: Node, name: str, place: int) -> Node:
        node = self._graph.by_name[name]
        return Node(
            name=name,
            op="getitem",
            args=(Ref(whole.name), place),
            inputs=(whole.name,),
            outputs=(whole.outputs[place],),
            phase=Phase.FORWARD,
            path=node.path,
            line=node.line,
            is_view=True,
        )


# As torch numbers the reductions of a loss.
_SUM = 2


def _weight(mean: Node, count: Node) -> Node:
    """What all rows of a mean weigh together, which the kernel would tell with the loss."""
    target, weight = mean.args[1], mean.args[2]
    assert isinstance(target, Ref)
    inputs = (target.name, *((weight.name,) if isinstance(weight, Ref) else ()))
    tensor = count.outputs[0]
    return replace(
        count,
        op="steelyard.nll_loss_weight",
        args=(None, target, weight, mean.args[3], mean.args[4], Symbol(f"torch.{tensor.dtype}")),
        inputs=inputs,
        phase=Phase.FORWARD,
        path=mean.path,
        line=mean.line,
        signature=f"steelyard.nll_loss_weight({mean.signature};{tensor.dtype})",
        is_view=False,
    )
