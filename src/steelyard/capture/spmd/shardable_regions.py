"""Where a step could be cut by tensors: found from what its operators allow, not from names.

A part of one weight is followed through everything that it makes parts of, and back through
everything that has to be in parts for it, until each branch ends in a sum over the ranks or began
with a value that is whole. Columns followed by rows are such a region (Shoeybi et al., 2019), heads
of an attention, channels between two convolutions, experts, a vocabulary from its table to the
loss. Not for what a region costs in a plan: that is for predict/ to say of the parted graph.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from steelyard.capture.spmd.extra_sharding_rules import VALUELESS, argument_dim
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
    """In the order of the forward pass; two may share a parameter, and then exclude each other."""
    known = _Known.of(graph, num_ranks)
    found: dict[tuple[tuple[str, Placement], ...], Region] = {}
    covered: set[tuple[str, Placement]] = set()
    for name in known.trained:
        tensor = graph.by_name[name].outputs[0]
        for dim in range(len(tensor.shape) if len(tensor.shape) > 1 else 0):
            seed = Shard(dim)
            if fits(tensor, seed, num_ranks) and (name, seed) not in covered:
                region = _grown(known, name, seed)
                if region is not None:
                    covered.update(region.inputs)
                    found.setdefault(region.inputs, region)
    return tuple(found.values())


def _grown(known: "_Known", name: str, seed: Shard) -> Region | None:
    """The region of a part; where a view has no place for it, of one in as many groups as it has.

    Of several (a head can be cut as well as the list of heads) the one that exchanges least.
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
    """What is asked of one graph again and again."""

    graph: Graph
    num_ranks: int
    readers: dict[str, tuple[Node, ...]]
    trained: tuple[str, ...]
    weights: frozenset[str]  # parameters, buffers, and what is made of nothing else
    learning: frozenset[str]  # what has a gradient
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
                is_drawn = node.is_random or node.op in VALUELESS
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

    def ways(self, node: Node, groups: Sequence[int]) -> tuple[Strategy, ...]:
        key = (node.signature, tuple(sorted(set(groups))))
        ways = self.strategies.get(key)
        if ways is None:
            near = [Shard(0, g) for g in key[1]]
            ways = strategies(node, self.takes(node), near=near, num_ranks=self.num_ranks)
            self.strategies[key] = ways
        return ways

    def takes(self, node: Node) -> list[Tensor]:
        return [self.graph.by_name[name].outputs[0] for name in tensors_of(node)]


class _Growth:
    def __init__(self, known: _Known) -> None:
        self._known = known
        self._lies: dict[str, Placement] = {}
        # Of calls with several results.
        self._gives: dict[str, tuple[Placement | None, ...]] = {}
        self._chosen: dict[str, Strategy] = {}
        self._pending: list[Node] = []

    def start(self, name: str, placement: Placement) -> None:
        self._lay(name, placement)
        while self._pending:
            self._settle(self._pending.pop())

    def region(self) -> Region | None:
        """None where a parameter is in parts, and all that is computed with it is not."""
        graph = self._known.graph
        inputs = [n for n in graph.inputs() if isinstance(self._lies.get(n.name), Shard)]
        sums = [name for name, p in self._lies.items() if isinstance(p, Partial)]
        wholes = [*dict.fromkeys(self._wholes())]
        exchanged = [*sums, *wholes]
        flops = sum(graph.by_name[name].flops for name in self._chosen)
        if self._known.weights.issuperset(self._chosen):
            return None
        return Region(
            path=_common([graph.by_name[name].path for name in self._chosen]),
            inputs=tuple((n.name, self._lies[n.name]) for n in inputs),
            sums=tuple(sums),
            wholes=tuple(wholes),
            parameter_bytes=sum(n.outputs[0].nbytes for n in inputs),
            exchanged_bytes=sum(graph.by_name[name].outputs[0].nbytes for name in exchanged),
            flops=flops,
        )

    def _wholes(self) -> Iterator[str]:
        """Values that have a gradient and are read whole where parts are computed of them."""
        for name, way in self._chosen.items():
            node = self._known.graph.by_name[name]
            if any(isinstance(p, Shard) for p in (*way.takes, *way.gives)):
                for value, placement in zip(tensors_of(node), way.takes, strict=True):
                    if placement == REPLICATE and value in self._known.learning:
                        yield self._looked_at(value)

    def _looked_at(self, value: str) -> str:
        """What a view is a view of: readers of several views of a value read one."""
        node = self._known.graph.by_name[value]
        while node.is_view and not node.is_getitem:
            node = self._known.graph.by_name[node.inputs[0]]
        return node.name

    # --- one value, one call

    def _lay(self, name: str, placement: Placement) -> None:
        """Decide how a value lies; who makes and who reads it has to fit."""
        old = self._lies.get(name)
        if old == placement:
            return
        if old is not None:
            raise _NoRegion
        self._lies[name] = placement
        node = self._known.graph.by_name[name]
        if not node.is_input:
            self._pending.append(node)
        if isinstance(placement, Shard):
            self._pending += self._known.readers[name]

    def _settle(self, node: Node) -> None:
        if node.op in VALUELESS:
            return
        if node.is_getitem:
            self._settle_getitem(node)
            return
        names = tensors_of(node)
        count = results(node)
        given = [p for p in map(self._lies.get, names) if p is not None]
        made = self._gives.get(node.name, (self._lies.get(node.name),))
        groups = [p.groups for p in (*given, *made) if isinstance(p, Shard)]
        groups += self._groups_before(node, made)
        fitting = [w for w in self._known.ways(node, groups) if self._fits(node, w, names, made)]
        if not fitting:
            raise _NoRegion(*self._hints(node, names))
        way = min(fitting, key=lambda w: self._spread(w, names))
        if self._chosen.get(node.name, way) != way:
            raise _NoRegion
        self._chosen[node.name] = way
        for name, placement in zip(names, way.takes, strict=True):
            # What has no gradient may be cut anywhere, for nothing.
            if isinstance(placement, Shard) and self._is_followed(name):
                self._lay(name, placement)
        if count == 1 and len(node.outputs) == 1 and not self._is_taken_apart(node):
            if way.gives[0] != REPLICATE:
                self._lay(node.name, way.gives[0])
        else:
            self._give(node, way.gives)

    def _settle_getitem(self, node: Node) -> None:
        source, index = node.inputs[0], node.args[1]
        assert isinstance(index, int)
        gives = self._gives.get(source)
        placement = self._lies.get(node.name)
        if gives is None:
            maker = self._known.graph.by_name[source]
            count = max(results(maker), len(maker.outputs))
            self._gives[source] = tuple(placement if i == index else None for i in range(count))
            self._pending.append(maker)
        elif gives[index] not in (None, placement):
            raise _NoRegion

    def _give(self, node: Node, gives: tuple[Placement, ...]) -> None:
        self._gives[node.name] = gives
        for reader in self._known.readers[node.name]:
            index = reader.args[1]
            assert isinstance(index, int)
            placement = gives[index]
            if placement != REPLICATE:
                self._lay(reader.name, placement)

    # --- which way

    def _fits(
        self,
        node: Node,
        way: Strategy,
        names: Sequence[str],
        made: Sequence[Placement | None],
    ) -> bool:
        for name, placement in zip(names, way.takes, strict=True):
            old = self._lies.get(name)
            if isinstance(old, Shard) and placement != old:
                return False
            if isinstance(placement, Partial) and name not in self._known.weights:
                return False
        given = way.gives if len(made) == len(way.gives) else way.gives[: len(made)]
        return all(m is None or m == g for m, g in zip(made, given, strict=True)) and (
            way.takes != (REPLICATE,) * len(names) or node.op.startswith("aten.embedding")
        )

    def _spread(self, way: Strategy, names: Sequence[str]) -> int:
        """How many more values would have to be in parts that are no weights."""
        return sum(
            isinstance(p, Shard) and name not in self._lies and name not in self._known.weights
            for name, p in zip(names, way.takes, strict=True)
        )

    def _is_followed(self, name: str) -> bool:
        return name in self._known.learning or name in self._known.weights

    def _is_taken_apart(self, node: Node) -> bool:
        return any(reader.is_getitem for reader in self._known.readers[node.name])

    def _groups_before(self, node: Node, made: Sequence[Placement | None]) -> list[int]:
        """In how many groups the argument lies whose view, or whose stretches, lie as is said."""
        shape = self._known.takes(node)[0].shape
        shards = [p for p in made if isinstance(p, Shard)]
        if node.op in VIEWS:
            back = (
                seen_through(node.outputs[0].shape, shape, p, self._known.num_ranks) for p in shards
            )
            return [b.groups for b in back if b is not None]
        return [p.groups * len(node.outputs) for p in shards] if node.op in SPLITS else []

    def _hints(self, node: Node, names: Sequence[str]) -> list[int]:
        """In how many groups a part would have to be to get through here."""
        lies = self._lies.get(names[0]) if names else None
        if not isinstance(lies, Shard):
            return []
        shape = self._known.graph.by_name[names[0]].outputs[0].shape
        if node.op in SPLITS:
            dim = argument_dim(node, 2, len(shape))
            return [lies.groups * len(node.outputs)] if dim == lies.dim else []
        if node.op not in VIEWS:
            return []
        viewed = node.outputs[0].shape
        ranks = self._known.num_ranks
        back = (
            seen_through(viewed, shape, Shard(dim), ranks)
            for dim in range(len(viewed))
            if viewed[dim] % ranks == 0
        )
        return [b.groups for b in back if b is not None and b.dim == lies.dim]


def _common(paths: Sequence[str]) -> str:
    parts = [path.split(".") for path in paths if path]
    if not parts:
        return ""
    shared = []
    for names in zip(*parts):
        if len(set(names)) > 1:
            break
        shared.append(names[0])
    return ".".join(shared)
