"""Chunked computation: run the region around a huge value slice by slice.

Recomputation does not help here: the logits over a vocabulary, and the values derived from them,
are alive at the end of the forward pass, when all saved activations are alive too. Not for finding
sliceable regions (see passes/slicing/region.py) or for choosing the number of slices (see search/).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from hashlib import sha256
from math import prod
from typing import ClassVar

from steelyard.errors import Mismatch
from steelyard.ir.analysis.sliced_body import body_cost_key
from steelyard.ir.graph import Body, Graph, Node, Phase, Ref, SlicedValue, Symbol, Tensor
from steelyard.ir.program import Program
from steelyard.ir.rule import Rule, matching, to_rules
from steelyard.ir.rule_kinds import SlicedComputation
from steelyard.ir.step_source import StepSource
from steelyard.passes.slicing.region import SlicedRegion, region_around
from steelyard.passes.slicing.row_rules import SliceKind, Unsliceable, arguments, leading
from steelyard.plans.trade import Offer, Rejection

# Fewer rows make matrix products slow, and smaller values do not matter.
_FEWEST_ROWS = 128
_LEAST_BYTES = 1 << 20
# Minimum size of a huge value, as a share of the bytes that the forward pass produces.
_HUGE_SHARE = 0.02
_FEWEST_SLICES = 2
# The number of rows in a slice: large slices are fastest, small ones need least memory.
_ROWS_OF_SLICES = (1024, 128)


@dataclass(frozen=True, kw_only=True)
class ChunkRule(SlicedComputation):
    """``[[chunk]]``: the call whose result is never whole, and the number of slices."""

    trade: str = field(init=False, default="chunk")


class Chunk:
    """Pays computation (smaller products, sums of parts), buys memory.

    Exact up to the order in which slices are added.
    """

    name: ClassVar[str] = ChunkRule.trade
    pays: ClassVar[tuple[str, ...]] = ("computation",)
    buys: ClassVar[tuple[str, ...]] = ("memory",)
    is_exact: ClassVar[bool] = True
    is_bitwise: ClassVar[bool] = False
    rule: ClassVar[type[Rule]] = ChunkRule

    def offers(
        self,
        program: Program,
        source: StepSource,  # noqa: ARG002 - other trades ask it
    ) -> tuple[tuple[Offer, ...], tuple[Rejection, ...]]:
        graph = program.graph
        offers: list[Offer] = []
        reasons: dict[str, str] = {}
        covered: set[str] = set()
        for node in _huge_producers(graph):
            if node.name in covered:
                continue
            label = f"{node.op.split('.')[1]} in {node.path or 'the loss'}"
            try:
                region = _region(graph, node)
            except Unsliceable as error:
                reasons.setdefault(label, str(error))
                continue
            inside = {n.name for n in region.nodes}
            if not covered.isdisjoint(inside):
                continue
            covered |= inside
            (rule,) = to_rules(graph, (node.name,), ChunkRule, slices=_FEWEST_SLICES)
            offers += [
                Offer(
                    trade=self.name,
                    label=f"{label}, {num_slices} slices",
                    rules=(replace(rule, slices=num_slices),),
                )
                for num_slices in _slice_counts(node, region)
            ]
        if offers:
            return tuple(offers), ()
        # Report only the reason for the largest value, because it would be lost among the reasons
        # for all others.
        label, reason = next(iter(reasons.items()), (_NONE, _WHY_NOTHING_LARGE))
        return (), (Rejection(trade=self.name, label=label, reason=reason),)

    def rewrite(self, program: Program, rules: Sequence[ChunkRule], source: StepSource) -> Program:
        if not rules:
            return program
        assert not program.recomputed, "chunk changes the graph, so it is applied before recompute"
        graph = program.graph
        for rule in rules:
            for name in sorted(matching(graph, (rule,))):
                graph = _with_sliced_region(graph, graph.by_name[name], num_slices=rule.slices)
        graph = source.rewritten(graph)
        return program.with_graph(graph)


_NONE = "a large value in slices"
_WHY_NOTHING_LARGE = "no value of the forward pass is much larger than the others"


def _region(graph: Graph, maker: Node) -> SlicedRegion:
    from steelyard.operators import is_pointwise

    if graph.decomposition.startswith("inductor"):
        raise Unsliceable("Inductor, which compiles a region as a whole, would merge slices again")
    return region_around(graph, maker, is_pointwise=is_pointwise)


def _huge_producers(graph: Graph) -> list[Node]:
    """Return the nodes that produce the largest forward values, largest first."""
    producers = [n for n in graph.forward() if not n.is_free and len(n.outputs) == 1]
    least = max(_LEAST_BYTES, _HUGE_SHARE * sum(n.outputs[0].nbytes for n in producers))
    huge = [n for n in producers if n.outputs[0].nbytes >= least]
    return sorted(huge, key=lambda n: (-n.outputs[0].nbytes, graph.position[n.name]))


def _slice_counts(maker: Node, region: SlicedRegion) -> list[int]:
    """Return the slice counts to offer, for slices of about ``_ROWS_OF_SLICES`` rows."""
    rows = prod(maker.outputs[0].shape[:-1])
    if rows < 2 * _FEWEST_ROWS:
        return []
    return sorted(
        {min(-(-rows // slice_rows), region.rows) for slice_rows in _ROWS_OF_SLICES} - {1}
    )


def _with_sliced_region(graph: Graph, maker: Node, *, num_slices: int) -> Graph:
    """Return the graph with one node in place of the sliceable region around ``maker``."""
    if prod(maker.outputs[0].shape[:-1]) < _FEWEST_SLICES:
        return graph  # a later batch may have a single row, which makes one slice
    try:
        region = _region(graph, maker)
    except Unsliceable as error:
        raise _mismatch(maker, f"cannot be sliced here: {error}") from error
    # A batch of another shape may have fewer rows than the plan has slices.
    return _SlicedGraph(graph, maker, region, min(num_slices, region.rows)).graph()


def _mismatch(maker: Node, why: str) -> Mismatch:
    return Mismatch(
        f"chunk rule: {maker.op} in {maker.path or 'the loss'} {why}",
        expected="a value that is computed and read row by row, and a number of slices of its rows",
        remedy="remove the rule from the plan, or plan again",
    )


class _SlicedGraph:
    """Builds the graph in which one node replaces a sliceable region."""

    def __init__(self, graph: Graph, maker: Node, region: SlicedRegion, num_slices: int) -> None:
        self._graph = graph
        self._maker = maker
        self._region = region
        self._num_slices = num_slices
        self._storages = list(graph.storages)
        self._inside = {n.name for n in region.nodes}

    def graph(self) -> Graph:
        graph, region = self._graph, self._region
        replaced = self._replacement_nodes()
        removed = self._inside | {n.name for n in replaced}
        needed = self._needed_early()
        last = {n.name for n in graph.nodes if n.name not in needed} - removed
        first = [
            replace(n, phase=Phase.FORWARD, nth=self._next_nth(n) + number)
            if n.phase is Phase.BACKWARD
            else n
            for number, n in enumerate(graph.nodes)
            if n.name in needed and n.name not in removed
        ]
        nodes = (*first, *replaced, *(n for n in graph.nodes if n.name in last))
        result = replace(graph, nodes=nodes, storages=tuple(self._storages))
        assert not result.problems(), result.problems()
        assert len(region.nodes) > 1
        return result

    def _next_nth(self, node: Node) -> int:
        """Return an unused call number, so that moved backward nodes do not collide with forward
        nodes.
        """
        same = (n.nth for n in self._graph.nodes if (n.path, n.op) == (node.path, node.op))
        return 1 + max(same, default=-1)

    def _needed_early(self) -> set[str]:
        """Return the forward nodes independent of the region, and the nodes on which it depends."""
        dependents = set(self._inside)
        forward = set()
        for node in self._graph.nodes:
            if not dependents.isdisjoint(node.inputs):
                dependents.add(node.name)
            elif node.phase is Phase.FORWARD and node.name not in dependents:
                forward.add(node.name)
        needed = set(self._region.takes)
        for node in reversed(self._graph.nodes):
            if node.name in needed:
                needed.update(node.inputs)
        return forward | needed

    def _replacement_nodes(self) -> list[Node]:
        """Return the replacement: row weights, the sliced node, its results, and the divided
        means.
        """
        weights, mean_nodes = [], []
        values = {name: self._result_value(name, kind) for name, kind in self._region.gives.items()}
        for mean in self._region.means:
            count, loss = self._weight_and_loss_nodes(mean)
            weight = _weight_node(mean, count)
            weights.append(weight)
            if mean.args[3] == _SUM:
                values[loss.name] = SlicedValue(name=mean.name, tensor=loss.outputs[0], along=None)
            else:
                values[mean.name] = self._sum_of(mean)
                mean_nodes.append(self._mean_node(mean, loss, weight))
        sliced = self._sliced_node(tuple(values.values()))
        results = [self._result(sliced, name, index) for index, name in enumerate(values)]
        return [*weights, sliced, *results, *mean_nodes]

    def _result_value(self, name: str, kind: SliceKind) -> SlicedValue:
        return self._sliced_value(name, self._graph.by_name[name].outputs[0], kind)

    def _sum_of(self, mean: Node) -> SlicedValue:
        self._storages.append(self._storages[mean.outputs[0].storage])
        tensor = replace(mean.outputs[0], storage=len(self._storages) - 1)
        return SlicedValue(name=mean.name, tensor=tensor, along=None)

    def _sliced_value(self, name: str, tensor: Tensor, kind: SliceKind) -> SlicedValue:
        if kind is SliceKind.COLUMNS:
            unit = tensor.shape[-1] // self._region.rows
            return SlicedValue(name=name, tensor=tensor, along=-1, unit=unit)
        if kind is not SliceKind.ROWS:
            return SlicedValue(name=name, tensor=tensor, along=None)
        dims = leading(tensor.shape, self._region.rows)
        unit = prod(tensor.shape[:dims]) // self._region.rows
        return SlicedValue(name=name, tensor=tensor, along=0, dims=dims, unit=unit)

    def _weight_and_loss_nodes(self, mean: Node) -> tuple[Node, Node]:
        """Return the getitem nodes of the total weight and of the loss of a mean."""
        users = [self._graph.by_name[u] for u in self._graph.users[mean.name]]
        by_index = {u.args[1]: u for u in users if u.is_getitem}
        return by_index[1], by_index[0]

    def _mean_node(self, mean: Node, loss: Node, weight: Node) -> Node:
        """Return the node that divides the sum by the total weight of its rows."""
        tensor = loss.outputs[0]
        divided = replace(
            loss,
            op="aten.div.Tensor",
            args=(Ref(mean.name), Ref(weight.name)),
            inputs=(mean.name, weight.name),
            signature=f"aten.div.Tensor({tensor.dtype}[];{tensor.dtype}[])",
            is_view=False,
            moved_bytes=3 * tensor.nbytes,
        )
        return replace(divided, nth=self._next_nth(divided))

    def _sliced_node(self, gives: Sequence[SlicedValue]) -> Node:
        region, maker = self._region, self._maker
        takes = tuple(
            self._sliced_value(name, self._graph.by_name[name].outputs[0], kind)
            for name, kind in region.takes.items()
        )
        body = Body(
            rows=region.rows,
            parts=self._num_slices,
            takes=takes,
            calls=tuple(
                (count, tuple(self._calls(count)))
                for count in sorted(
                    {-(-region.rows // self._num_slices), region.rows // self._num_slices}
                )
            ),
            gives=tuple(gives),
        )
        return Node(
            name=f"{maker.name}.sliced",
            op="steelyard.sliced",
            args=tuple(Ref(take.name) for take in takes),
            inputs=tuple(take.name for take in takes),
            outputs=tuple(result.tensor for result in gives),
            phase=Phase.FORWARD,
            path=maker.path,
            line=maker.line,
            nth=maker.nth,
            signature=f"steelyard.sliced({sha256(body_cost_key(body).encode()).hexdigest()[:24]})",
            flops=sum(n.flops for n in region.nodes),
            moved_bytes=sum(n.moved_bytes for n in region.nodes),
            body=body,
        )

    def _calls(self, count: int) -> Iterator[Node]:
        region, graph = self._region, self._graph
        for node in region.nodes:
            found = region.acts[node.name]
            args = arguments(graph, node, found, rows=region.rows, count=count)
            yield replace(node, args=args)

    def _result(self, sliced: Node, name: str, index: int) -> Node:
        node = self._graph.by_name[name]
        return Node(
            name=name,
            op="getitem",
            args=(Ref(sliced.name), index),
            inputs=(sliced.name,),
            outputs=(sliced.outputs[index],),
            phase=Phase.FORWARD,
            path=node.path,
            line=node.line,
            is_view=True,
        )


# The enum value of the sum reduction in torch.
_SUM = 2


def _weight_node(mean: Node, count: Node) -> Node:
    """Return a node that computes the total weight of a mean's rows.

    The fused loss kernel would return this weight together with the loss, which is too late here.
    """
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
