"""Finds the region of a step that must be sliced together with one large value.

The region grows from the node that makes the value: it includes every node, forward and backward,
that makes or reads large values in the same rows. Not for calls on slices (see row_rules.py) or for
rewriting the step (see trades/).
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from math import prod

from steelyard.ir.graph import Graph, Node, Phase, Ref
from steelyard.passes.slicing.row_rules import Acts, IsPointwise, SliceKind, Unsliceable, acts

# Values smaller than this share of the large value need not be sliced with it.
_LARGE_SHARE = 0.25
_MEAN = "aten.nll_loss_forward.default"


@dataclass(frozen=True, slots=True, kw_only=True)
class SlicedRegion:
    """The nodes of a region in order, their slicing rules, and its inputs and outputs by kind.

    ``means`` are mean losses. Their terms are summed slice by slice and divided by a count that is
    already known, so ``nodes`` contains them as sums, under the same names.
    """

    rows: int
    nodes: tuple[Node, ...]
    acts: Mapping[str, Acts]
    takes: Mapping[str, SliceKind]
    gives: Mapping[str, SliceKind]
    means: tuple[Node, ...]


def region_around(graph: Graph, maker: Node, *, is_pointwise: IsPointwise) -> SlicedRegion:
    """Return the region around ``maker``; raise Unsliceable, with the reason, if there is none."""
    shapes = [maker.outputs[0].shape, *_view_shapes(graph, maker)]
    reasons = {}
    counts = {prod(shape[:dims]) for shape in shapes for dims in range(1, len(shape))}
    for rows in sorted(counts, reverse=True):
        try:
            return _RegionBuilder(graph, maker, rows, is_pointwise).region()
        except Unsliceable as error:
            reasons[rows] = error
    if not reasons:
        raise Unsliceable(f"{maker.op} returns no rows")
    raise reasons[prod(shapes[0][:-1])] if len(shapes[0]) > 1 else next(iter(reasons.values()))


def _view_shapes(graph: Graph, maker: Node) -> Iterator[tuple[int, ...]]:
    """Yield the shapes of views of the value: a dim of tokens may be viewed as samples by
    tokens.
    """
    pending = [maker.name]
    while pending:
        views = [graph.by_name[u] for u in graph.users[pending.pop()] if graph.by_name[u].is_view]
        yield from (view.outputs[0].shape for view in views)
        pending += [view.name for view in views]


class _RegionBuilder:
    def __init__(self, graph: Graph, maker: Node, rows: int, is_pointwise: IsPointwise) -> None:
        if rows < 2:
            raise Unsliceable(f"{maker.op} returns only one row")
        self._graph = graph
        self._rows = rows
        self._is_pointwise = is_pointwise
        self._large = _LARGE_SHARE * maker.outputs[0].nbytes
        self._means: dict[str, Node] = {}
        # For each mean: the value that is the count (total weight) of all rows.
        self._counts: set[str] = set()
        self._inside = {maker.name}
        self._acts: dict[str, Acts] = {}

    def region(self) -> SlicedRegion:
        while True:
            size = len(self._inside)
            self._grow()
            if len(self._inside) != size:
                continue
            takes = self._takes()
            self._pull_between(takes)
            if len(self._inside) == size:
                break
        self._check(takes)
        return SlicedRegion(
            rows=self._rows,
            nodes=tuple(self._node(n) for n in self._ordered()),
            acts=dict(self._acts),
            takes=takes,
            gives=self._gives(),
            means=tuple(self._means.values()),
        )

    def _ordered(self) -> list[str]:
        return [n.name for n in self._graph.nodes if n.name in self._inside]

    def _grow(self) -> None:
        """Infer the kinds from the first node to the last, then add neighbours that share large
        values.
        """
        self._acts.clear()
        for name in self._ordered():
            node = self._node(name)
            known = {i: self._acts[i].output for i in node.inputs if i in self._acts}
            summed = [i for i, kind in known.items() if kind is SliceKind.SUM]
            if summed:
                raise Unsliceable(f"{node.op} reads a sum over all rows")
            self._acts[name] = acts(
                self._graph, node, known, rows=self._rows, is_pointwise=self._is_pointwise
            )
        for name in self._ordered():
            self._pull(name)

    def _pull(self, name: str) -> None:
        graph, found = self._graph, self._acts[name]
        for given, kind in found.inputs.items():
            node = graph.by_name[given]
            if kind is not SliceKind.WHOLE and not node.is_input and self._is_large(node):
                self._inside.add(given)
        node = graph.by_name[name]
        if found.output is SliceKind.COLUMNS or (
            found.output is SliceKind.ROWS and self._is_large(node)
        ):
            self._inside.update(graph.users[name])

    def _is_large(self, node: Node) -> bool:
        return any(t.nbytes >= self._large for t in node.outputs)

    def _node(self, name: str) -> Node:
        """Return the node. A mean loss becomes a sum, because the count to divide by is already
        known.
        """
        node = self._graph.by_name[name]
        if node.op != _MEAN or node.args[3] not in (1, 2):
            return node
        users = [self._graph.by_name[u] for u in self._graph.users[name]]
        places = {u.args[1]: u.name for u in users if u.is_getitem}
        if places.keys() != {0, 1}:
            raise Unsliceable(f"{node.op} has no separate weight output")
        self._means[name] = node
        self._counts.add(places[1])
        return replace(
            node,
            op="steelyard.nll_loss_sum",
            args=(*node.args[:3], 2, node.args[4]),
            outputs=node.outputs[:1],
        )

    def _takes(self) -> dict[str, SliceKind]:
        takes: dict[str, SliceKind] = {}
        for name in self._ordered():
            for given, kind in self._acts[name].inputs.items():
                if given in self._inside:
                    continue
                if takes.setdefault(given, kind) is not kind:
                    raise Unsliceable(f"{given} is read whole and in slices")
        return takes

    def _gives(self) -> dict[str, SliceKind]:
        outputs = {o.node for o in self._graph.outputs}
        gives: dict[str, SliceKind] = {}
        for name in self._ordered():
            node, kind = self._graph.by_name[name], self._acts[name].output
            read = name in outputs or any(u not in self._inside for u in self._graph.users[name])
            if name in self._means or not read:
                continue
            if kind is SliceKind.COLUMNS or (kind is SliceKind.ROWS and self._is_large(node)):
                raise Unsliceable(f"{node.op} returns a large value that is an output of the step")
            if not node.outputs[0].is_contiguous:
                raise Unsliceable(f"{node.op} returns a non-contiguous value")
            gives[name] = kind
        return gives

    def _pull_between(self, takes: Mapping[str, SliceKind]) -> None:
        """Add nodes that lie between outputs and inputs of the region: they must be sliced as
        well.
        """
        graph = self._graph
        later = set(self._inside)
        for node in graph.nodes:
            # The count of a mean loss is known before the region runs.
            if node.name not in self._counts and not later.isdisjoint(node.inputs):
                later.add(node.name)
                if node.is_random and node.phase is Phase.FORWARD:
                    raise Unsliceable(f"{node.op} draws random numbers after it")
        for mean in self._means.values():
            for argument in mean.args[1:3]:
                if isinstance(argument, Ref) and argument.name in later:
                    raise Unsliceable("the targets or weights of a loss depend on its scores")
        needed = {name for name in takes if name in later}
        for node in reversed(graph.nodes):
            if node.name in needed:
                needed.update(i for i in node.inputs if i in later)
        self._inside |= needed

    def _check(self, takes: Mapping[str, SliceKind]) -> None:
        """Raise Unsliceable if the region cannot run at its first call, before the backward
        pass.
        """
        graph = self._graph
        storages = {s for name in takes for s in graph.storages_of(name)}
        needed = set(takes)
        for node in reversed(graph.nodes):
            if any(storages.intersection(graph.storages_of(name)) for name in node.mutates):
                raise Unsliceable(f"{node.op} writes into an input of the slices")
            if node.name in needed:
                needed.update(node.inputs)
                if node.phase is Phase.BACKWARD and node.is_random:
                    raise Unsliceable(f"{node.op} would draw its random numbers earlier")


__all__ = ["SlicedRegion", "region_around"]
