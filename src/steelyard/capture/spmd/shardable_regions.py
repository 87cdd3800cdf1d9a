"""Candidate regions for tensor parallelism, found from sharding rules rather than module names.

Starting from a shard of one weight, sharding is propagated forward to every value that becomes
sharded, and backward to every value that must be sharded for this. It stops where each branch ends
in a partial sum or starts from a replicated value. Examples are a column-parallel layer followed by
a row-parallel one (Shoeybi et al., 2019), attention heads, channels between two convolutions,
experts, and a vocabulary from its table to the loss. Not for the cost of a region in a plan:
predict/ prices the partitioned graph.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from steelyard.capture.spmd.extra_sharding_rules import SHAPE_ONLY, argument_dim
from steelyard.capture.spmd.sharding_strategies import (
    SPLITS,
    VIEWS,
    results,
    strategies,
    tensors_of,
)
from steelyard.ir.graph import Graph, Node, OutputKind, Phase, Role, Tensor
from steelyard.ir.placement import (
    REPLICATE,
    Partial,
    Placement,
    Shard,
    Strategy,
    fits,
    seen_through,
)
from steelyard.ir.sharding_choice import Region


def regions(graph: Graph, *, num_ranks: int) -> tuple[Region, ...]:
    """Return the regions in forward order. Of two regions that share a parameter, only one can be
    used.
    """
    known = _Known.of(graph, num_ranks)
    found: dict[tuple[tuple[str, Placement], ...], Region] = {}
    covered: set[tuple[str, Placement]] = set()
    for name in known.trained:
        tensor = graph.by_name[name].outputs[0]
        for dim in range(len(tensor.shape) if len(tensor.shape) > 1 else 0):
            seed = Shard(dim)
            if fits(tensor, seed, num_ranks) and (name, seed) not in covered:
                region = _grow(known, name, seed)
                if region is not None:
                    covered.update(region.inputs)
                    found.setdefault(region.inputs, region)
    return tuple(found.values())


def _grow(known: "_Known", name: str, seed: Shard) -> Region | None:
    """Grow the region of one sharded weight, trying shards in groups where a view needs them.

    Return the region that exchanges least. Attention, for example, can be sharded by heads or
    within each head.
    """
    pending, tried = [seed], {seed}
    found: list[Region] = []
    while pending:
        growth = _Growth(known)
        try:
            growth.start(name, pending.pop(0))
        except _NoRegion as stopped:
            hints = {Shard(seed.dim, groups) for groups in stopped.groups} - tried
            tried |= hints
            pending += sorted(hints, key=lambda s: s.groups)
        else:
            region = growth.region()
            found += [region] if region is not None else []
    return min(found, key=lambda r: r.exchanged_bytes, default=None)


class _NoRegion(Exception):
    def __init__(self, *groups: int) -> None:
        super().__init__()
        self.groups = groups


@dataclass(frozen=True, slots=True, kw_only=True)
class _Known:
    """Facts about one graph that every region search needs, computed once."""

    graph: Graph
    num_ranks: int
    readers: dict[str, tuple[Node, ...]]
    trained: tuple[str, ...]
    weights: frozenset[str]  # parameters, buffers, and values computed from them alone
    learning: frozenset[str]  # values that have a gradient
    strategies: dict[tuple[str, tuple[int, ...]], tuple[Strategy, ...]] = field(
        default_factory=dict
    )

    @classmethod
    def of(cls, graph: Graph, num_ranks: int) -> "_Known":
        trained = {o.target for o in graph.outputs if o.kind is OutputKind.GRADIENT}
        weights: set[str] = set()
        learning: set[str] = set()
        for node in graph.nodes:
            if node.is_input:
                role = graph.storages[node.outputs[0].storage].role
                if role in (Role.PARAMETER, Role.BUFFER):
                    weights.add(node.name)
                if node.name in trained:
                    learning.add(node.name)
            elif node.phase is Phase.FORWARD and node.inputs:
                if weights.issuperset(node.inputs):
                    weights.add(node.name)
                is_float = all("float" in t.dtype for t in node.outputs)
                is_drawn = node.is_random or node.op in SHAPE_ONLY
                if is_float and not is_drawn and not learning.isdisjoint(node.inputs):
                    learning.add(node.name)
        forward = {n.name for n in graph.forward()}
        readers = {
            name: tuple(graph.by_name[u] for u in users if u in forward)
            for name, users in graph.users.items()
        }
        return cls(
            graph=graph,
            num_ranks=num_ranks,
            readers=readers,
            trained=tuple(n.name for n in graph.inputs() if n.name in trained),
            weights=frozenset(weights),
            learning=frozenset(learning),
        )

    def strategies_of(self, node: Node, groups: Sequence[int]) -> tuple[Strategy, ...]:
        key = (node.signature, tuple(sorted(set(groups))))
        found = self.strategies.get(key)
        if found is None:
            known = [Shard(0, g) for g in key[1]]
            found = strategies(node, self.takes(node), known=known, num_ranks=self.num_ranks)
            self.strategies[key] = found
        return found

    def takes(self, node: Node) -> list[Tensor]:
        return [self.graph.by_name[name].outputs[0] for name in tensors_of(node)]


class _Growth:
    def __init__(self, known: _Known) -> None:
        self._known = known
        self._placements: dict[str, Placement] = {}
        # For calls with several results; None where a placement is not decided yet.
        self._result_placements: dict[str, tuple[Placement | None, ...]] = {}
        self._chosen: dict[str, Strategy] = {}
        self._pending: list[Node] = []

    def start(self, name: str, placement: Placement) -> None:
        self._assign(name, placement)
        while self._pending:
            self._match(self._pending.pop())

    def region(self) -> Region | None:
        """Return the region; None if it shards only values that do not depend on the batch."""
        graph = self._known.graph
        inputs = [n for n in graph.inputs() if isinstance(self._placements.get(n.name), Shard)]
        sums = [name for name, p in self._placements.items() if isinstance(p, Partial)]
        wholes = [*dict.fromkeys(self._wholes())]
        exchanged = [*sums, *wholes]
        flops = sum(graph.by_name[name].flops for name in self._chosen)
        if self._known.weights.issuperset(self._chosen):
            return None
        return Region(
            path=_common_path([graph.by_name[name].path for name in self._chosen]),
            inputs=tuple((n.name, self._placements[n.name]) for n in inputs),
            sums=tuple(sums),
            wholes=tuple(wholes),
            parameter_bytes=sum(n.outputs[0].nbytes for n in inputs),
            exchanged_bytes=sum(graph.by_name[name].outputs[0].nbytes for name in exchanged),
            flops=flops,
        )

    def _wholes(self) -> Iterator[str]:
        """Yield the replicated inputs of sharded calls whose gradients are partial sums."""
        for name, strategy in self._chosen.items():
            node = self._known.graph.by_name[name]
            if any(isinstance(p, Shard) for p in (*strategy.takes, *strategy.gives)):
                for value, placement in zip(tensors_of(node), strategy.takes, strict=True):
                    if placement == REPLICATE and value in self._known.learning:
                        yield self._base_of_view(value)

    def _base_of_view(self, value: str) -> str:
        """Return the base of a view: all readers of its views count as readers of one value."""
        node = self._known.graph.by_name[value]
        while node.is_view and not node.is_getitem:
            node = self._known.graph.by_name[node.inputs[0]]
        return node.name

    # --- one value, one call

    def _assign(self, name: str, placement: Placement) -> None:
        """Set the placement of a value, and queue its producer and readers for matching."""
        old = self._placements.get(name)
        if old == placement:
            return
        if old is not None:
            raise _NoRegion
        self._placements[name] = placement
        node = self._known.graph.by_name[name]
        if not node.is_input:
            self._pending.append(node)
        if isinstance(placement, Shard):
            self._pending += self._known.readers[name]

    def _match(self, node: Node) -> None:
        if node.op in SHAPE_ONLY:
            return
        if node.is_getitem:
            self._match_getitem(node)
            return
        names = tensors_of(node)
        count = results(node)
        input_placements = [p for p in map(self._placements.get, names) if p is not None]
        result_placements = self._result_placements.get(
            node.name, (self._placements.get(node.name),)
        )
        groups = [p.groups for p in (*input_placements, *result_placements) if isinstance(p, Shard)]
        groups += self._input_groups(node, result_placements)
        fitting = [
            w
            for w in self._known.strategies_of(node, groups)
            if self._fits(node, w, names, result_placements)
        ]
        if not fitting:
            raise _NoRegion(*self._helpful_groups(node, names))
        strategy = min(fitting, key=lambda w: self._num_newly_sharded(w, names))
        if self._chosen.get(node.name, strategy) != strategy:
            raise _NoRegion
        self._chosen[node.name] = strategy
        for name, placement in zip(names, strategy.takes, strict=True):
            # A value without gradient can be sliced anywhere at no cost.
            if isinstance(placement, Shard) and self._is_propagated(name):
                self._assign(name, placement)
        if count == 1 and len(node.outputs) == 1 and not self._has_getitems(node):
            if strategy.gives[0] != REPLICATE:
                self._assign(node.name, strategy.gives[0])
        else:
            self._assign_results(node, strategy.gives)

    def _match_getitem(self, node: Node) -> None:
        source, index = node.inputs[0], node.args[1]
        assert isinstance(index, int)
        placements = self._result_placements.get(source)
        placement = self._placements.get(node.name)
        if placements is None:
            maker = self._known.graph.by_name[source]
            count = max(results(maker), len(maker.outputs))
            self._result_placements[source] = tuple(
                placement if i == index else None for i in range(count)
            )
            self._pending.append(maker)
        elif placements[index] not in (None, placement):
            raise _NoRegion

    def _assign_results(self, node: Node, placements: tuple[Placement, ...]) -> None:
        self._result_placements[node.name] = placements
        for reader in self._known.readers[node.name]:
            index = reader.args[1]
            assert isinstance(index, int)
            placement = placements[index]
            if placement != REPLICATE:
                self._assign(reader.name, placement)

    # --- choosing a strategy

    def _fits(
        self,
        node: Node,
        strategy: Strategy,
        names: Sequence[str],
        result_placements: Sequence[Placement | None],
    ) -> bool:
        for name, placement in zip(names, strategy.takes, strict=True):
            old = self._placements.get(name)
            if isinstance(old, Shard) and placement != old:
                return False
            if isinstance(placement, Partial) and name not in self._known.weights:
                return False
        strategy_results = (
            strategy.gives
            if len(result_placements) == len(strategy.gives)
            else strategy.gives[: len(result_placements)]
        )
        return all(
            m is None or m == g for m, g in zip(result_placements, strategy_results, strict=True)
        ) and (strategy.takes != (REPLICATE,) * len(names) or node.op.startswith("aten.embedding"))

    def _num_newly_sharded(self, strategy: Strategy, names: Sequence[str]) -> int:
        """Return the number of further values, other than weights, that would become sharded."""
        return sum(
            isinstance(p, Shard)
            and name not in self._placements
            and name not in self._known.weights
            for name, p in zip(names, strategy.takes, strict=True)
        )

    def _is_propagated(self, name: str) -> bool:
        return name in self._known.learning or name in self._known.weights

    def _has_getitems(self, node: Node) -> bool:
        return any(reader.is_getitem for reader in self._known.readers[node.name])

    def _input_groups(self, node: Node, result_placements: Sequence[Placement | None]) -> list[int]:
        """Return the groups that an input shard needs so that a view or split gives these
        results.
        """
        shape = self._known.takes(node)[0].shape
        shards = [p for p in result_placements if isinstance(p, Shard)]
        if node.op in VIEWS:
            sources = (
                seen_through(node.outputs[0].shape, shape, p, self._known.num_ranks) for p in shards
            )
            return [b.groups for b in sources if b is not None]
        return [p.groups * len(node.outputs) for p in shards] if node.op in SPLITS else []

    def _helpful_groups(self, node: Node, names: Sequence[str]) -> list[int]:
        """Return the numbers of groups with which a shard could pass through this view or split."""
        placement = self._placements.get(names[0]) if names else None
        if not isinstance(placement, Shard):
            return []
        shape = self._known.graph.by_name[names[0]].outputs[0].shape
        if node.op in SPLITS:
            dim = argument_dim(node, 2, len(shape))
            return [placement.groups * len(node.outputs)] if dim == placement.dim else []
        if node.op not in VIEWS:
            return []
        viewed = node.outputs[0].shape
        ranks = self._known.num_ranks
        sources = (
            seen_through(viewed, shape, Shard(dim), ranks)
            for dim in range(len(viewed))
            if viewed[dim] % ranks == 0
        )
        return [b.groups for b in sources if b is not None and b.dim == placement.dim]


def _common_path(paths: Sequence[str]) -> str:
    parts = [path.split(".") for path in paths if path]
    if not parts:
        return ""
    shared = []
    for names in zip(*parts):
        if len(set(names)) > 1:
            break
        shared.append(names[0])
    return ".".join(shared)
