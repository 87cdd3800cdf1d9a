"""One rank's graph of a step whose tensors lie in parts on the ranks: its calls and its exchanges.

From a chosen placement of parameters (and of results, where somebody wants one) every call follows:
of the strategies that its operator has, the one is taken for which the least is exchanged. Exact: a
strategy computes the same sums, in another order. What is drawn at random is drawn whole on every
rank, from the same seed, so that each has its part of what one device would draw. Not for choosing
placements: see search/.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from steelyard.capture.spmd.extra_sharding_rules import VALUELESS, argument_dim
from steelyard.capture.spmd.local_graph import LocalGraphBuilder, numbered
from steelyard.capture.spmd.redistribute import contiguous, received_bytes, redistributed
from steelyard.capture.spmd.sharding_strategies import SPLITS, strategies, tensors_of
from steelyard.capture.spmd.vocab_parallel import split_by_rows
from steelyard.comm.devices import CPU
from steelyard.errors import BadInput
from steelyard.ir.collective import Transport
from steelyard.ir.graph import (
    Argument,
    BlockRun,
    Graph,
    Node,
    Output,
    OutputKind,
    Phase,
    Ref,
    Role,
    Tensor,
)
from steelyard.ir.placement import (
    PARTIAL,
    REPLICATE,
    Partial,
    Placement,
    Replicate,
    Shard,
    Strategy,
    fits,
    local_shape,
    local_tensor,
)
from steelyard.ir.sharding_choice import ShardingChoice
from steelyard.operators import is_pointwise


def partition(
    graph: Graph,
    choice: ShardingChoice,
    *,
    rank: int,
    transport: Transport,
    device: torch.device = CPU,
) -> Graph:
    """The graph that rank ``rank`` runs; those of all ranks exchange the same in the same order."""
    _check(graph, choice)
    work = _Partitioner(graph, choice, rank, transport, device)
    for node in graph.nodes:
        work.place(node)
    return work.result()


def _check(graph: Graph, choice: ShardingChoice) -> None:
    for name, placement in (*choice.inputs, *choice.values):
        node = graph.by_name.get(name)
        if node is None:
            raise BadInput(
                f"nothing in the step is called {name}",
                expected="names of inputs and nodes of the captured step",
                remedy="plan again for this model",
            )
        if not fits(node.outputs[0], placement, choice.num_ranks):
            raise BadInput(
                f"{name.replace(':', ' ', 1)} of shape {list(node.outputs[0].shape)} cannot lie "
                f"as {placement} on {choice.num_ranks} ranks",
                expected="a dim that the number of ranks divides",
                remedy="cut it along another dim, or leave it whole",
            )


@dataclass(slots=True)
class _LocalValue:
    """A value of the whole step: the placements in which this rank has it, the first made first."""

    copies: dict[Placement, str]
    is_weight: bool = False


class _Partitioner:
    def __init__(
        self,
        graph: Graph,
        choice: ShardingChoice,
        rank: int,
        transport: Transport,
        device: torch.device,
    ) -> None:
        self._graph = graph
        self._inputs = dict(choice.inputs)
        self._chosen = dict(choice.values)
        self._num_ranks = choice.num_ranks
        self._local = LocalGraphBuilder(
            axis=choice.axis,
            num_ranks=choice.num_ranks,
            rank=rank,
            transport=transport,
            device=device,
        )
        self._held: dict[str, _LocalValue] = {}
        # Of calls with several results, what each lies as, and its value where it has one already.
        self._gives: dict[str, tuple[Placement, ...]] = {}
        self._parts: dict[str, tuple[str, ...]] = {}
        self._wanted = self._wanted_placements()

    def place(self, node: Node) -> None:
        if self._is_overwritten(node):
            return
        if self._overwrites(node):
            node = _copying(node)
        if node.is_input:
            self._place_input(node)
        elif node.is_getitem:
            self._place_getitem(node)
        elif node.op in VALUELESS and node.inputs:
            self._place_shaped_like(node)
        else:
            self._place_call(node)
        chosen = self._chosen.get(node.name)
        if chosen is not None and node.name in self._held:
            self._lay_out(node, chosen)

    def result(self) -> Graph:
        outputs = self._own_gradients(tuple(self._left(o) for o in self._graph.outputs))
        # A mean over classes in parts is spelled as sums; what it counts are targets of all ranks.
        counts = tuple(
            replace(
                mean,
                targets=self._as(mean.targets, REPLICATE, at=self._graph.by_name[mean.targets]),
            )
            for mean in self._graph.counted
        )
        nodes = tuple(numbered(self._local.nodes))
        graph = replace(
            self._graph,
            nodes=nodes,
            storages=tuple(self._local.storages),
            outputs=outputs,
            counts=counts,
            runs=tuple(run for run in self._graph.runs if _still_equal(nodes, run)),
        )
        assert not graph.problems(), graph.problems()
        return graph

    def _overwrites(self, node: Node) -> bool:
        """A copy over all of another value is one of what is copied, laid out as that was."""
        if node.op != "aten.copy.default":
            return False
        over, copied = (self._graph.by_name[name].outputs[0] for name in tensors_of(node))
        return (over.shape, over.dtype) == (copied.shape, copied.dtype)

    def _is_overwritten(self, node: Node) -> bool:
        """Made for nothing but that others are copied over all of it."""
        users = [self._graph.by_name[user] for user in self._graph.users[node.name]]
        return (
            node.op in VALUELESS
            and bool(users)
            and all(self._overwrites(user) and user.args[0] == Ref(node.name) for user in users)
        )

    # --- one node

    def _place_input(self, node: Node) -> None:
        placement = self._inputs.get(node.name, REPLICATE)
        tensor = local_tensor(node.outputs[0], placement, self._num_ranks)
        storage = self._graph.storages[tensor.storage]
        if isinstance(placement, Shard):
            storage = replace(storage, nbytes=tensor.nbytes)
        self._local.input(node, tensor, storage)
        is_weight = storage.role in (Role.PARAMETER, Role.BUFFER)
        self._held[node.name] = _LocalValue({placement: node.name}, is_weight=is_weight)

    def _place_getitem(self, node: Node) -> None:
        source, index = node.inputs[0], node.args[1]
        assert isinstance(index, int)
        placement = self._gives[source][index]
        parts = self._parts.get(source)
        made = (
            parts[index] if parts else self._local.getitem(source, index, at=node, name=node.name)
        )
        self._held[node.name] = _LocalValue({placement: made})

    def _place_shaped_like(self, node: Node) -> None:
        """What is made like another value in form alone: whole on every rank, whatever that is."""
        copies = self._held[node.inputs[0]].copies
        placement, value = next(iter(copies.items()))
        args = (Ref(value), *node.args[1:])
        shape, stride = node.outputs[0].shape, node.outputs[0].stride
        op = VALUELESS[node.op]
        if isinstance(placement, Shard) and op:
            sizes = (shape, stride) if op.endswith("empty_strided.default") else (shape,)
            made = replace(node, op=op, nth=-1)
            dropped = [(k, a) for k, a in node.kwargs if k != "memory_format"]
            self._local.like(made, (args[0], *sizes, *args[1:]), kwargs=tuple(dropped))
        else:
            self._local.like(node, args)
        self._held[node.name] = _LocalValue({REPLICATE: node.name})

    def _place_call(self, node: Node) -> None:
        names = tensors_of(node)
        held = [self._held[name] for name in names]
        takes = [self._graph.by_name[name].outputs[0] for name in names]
        near = [p for h in held for p in h.copies]
        wanted = self._wanted.get(node.name)
        near += [wanted] if wanted is not None else []
        known = strategies(node, takes, near=near, num_ranks=self._num_ranks)
        best = min(known, key=lambda s: self._cost(node, s, held, takes))
        given = [self._as(n, p, at=node) for n, p in zip(names, best.takes, strict=True)]
        values = iter(self._laid_out(node, given, takes))
        args = tuple(_renamed(a, values) for a in node.args)
        kwargs = tuple((key, _renamed(a, values)) for key, a in node.kwargs)
        split = split_by_rows(node, best)
        if split is not None:
            made = split(self._local, node, args)
        else:
            args = self._sized(node, args, best)
            if node.op in ("aten.view.default", "aten._unsafe_view.default"):
                args = self._viewable(node, args)
            made = (self._local.like(node, args, kwargs=kwargs),)
        if len(best.gives) > 1:
            self._gives[node.name] = best.gives
            if split is not None:
                self._parts[node.name] = made
        elif best.gives:
            is_weight = bool(held) and all(h.is_weight for h in held)
            self._held[node.name] = _LocalValue({best.gives[0]: made[0]}, is_weight=is_weight)

    def _lay_out(self, node: Node, placement: Placement) -> None:
        value = self._as(node.name, placement, at=node)
        self._held[node.name] = _LocalValue({placement: value})

    def _as(self, name: str, placement: Placement, *, at: Node) -> str:
        """The value in this placement, exchanged for it once if need be."""
        copies = self._held[name].copies
        value = copies.get(placement)
        if value is None:
            old = _nearest(copies, placement, self._num_ranks)
            if not isinstance(old, Replicate) and isinstance(placement, Partial):
                copies[REPLICATE] = redistributed(self._local, copies[old], old, REPLICATE, at=at)
                old = REPLICATE
            value = redistributed(self._local, copies[old], old, placement, at=at)
            copies[placement] = value
        return value

    # --- which strategy

    def _cost(
        self, node: Node, strategy: Strategy, held: Sequence[_LocalValue], takes: Sequence[Tensor]
    ) -> tuple[float, float, int, int]:
        """Bytes of weights gathered, bytes exchanged sooner or later, and smaller things.

        A sum in terms has its exchange before it; it is charged where it comes into being, so that
        putting it off is worth nothing in itself.
        """
        weights = exchanged = 0.0
        changes = 0
        wanted = self._wanted.get(node.name)
        is_cut = isinstance(wanted, Shard)
        for name, value, tensor, placement in zip(
            tensors_of(node), held, takes, strategy.takes, strict=True
        ):
            if isinstance(placement, Partial) and self._readers(name) > 1:
                # One of several readers mostly needs the sum, and then all have it.
                exchanged += received_bytes(tensor.nbytes, PARTIAL, REPLICATE, self._num_ranks)
            if placement not in value.copies:
                old = _nearest(value.copies, placement, self._num_ranks)
                # What is summed and cut is soon gathered again, unless it was to be cut.
                through = REPLICATE if isinstance(old, Partial) and not is_cut else placement
                received = received_bytes(tensor.nbytes, old, through, self._num_ranks)
                weights += received if value.is_weight else 0.0
                exchanged += received
                changes += 1
        for placement, tensor in zip(strategy.gives, node.outputs):
            if isinstance(placement, Partial):
                exchanged += received_bytes(tensor.nbytes, PARTIAL, REPLICATE, self._num_ranks)
        if wanted is not None and len(node.outputs) == 1 and strategy.gives[0] != wanted:
            given = strategy.gives[0]
            if not isinstance(given, Partial):
                nbytes = node.outputs[0].nbytes
                exchanged += received_bytes(nbytes, given, wanted, self._num_ranks)
            changes += 1
        terms = sum(isinstance(p, Partial) for p in strategy.gives)
        return weights, exchanged, changes, terms

    def _readers(self, name: str) -> int:
        """Of its values, and not only of its form."""
        by_name = self._graph.by_name
        return sum(by_name[user].op not in VALUELESS for user in self._graph.users[name])

    def _wanted_placements(self) -> dict[str, Placement]:
        """Gradients are to lie as their parameters; what is only added up to one, as well."""
        # What is to be whole is computed in parts where it can be, and gathered then.
        wanted = {name: lies for name, lies in self._chosen.items() if lies != REPLICATE}
        for output in self._graph.outputs:
            if output.target:
                wanted.setdefault(output.node, self._inputs.get(output.target, REPLICATE))
        for node in reversed(self._graph.nodes):
            if node.name in wanted and node.op in _PASSING:
                for name in node.inputs:
                    if self._graph.by_name[name].outputs[0].shape == node.outputs[0].shape:
                        wanted.setdefault(name, wanted[node.name])
        return wanted

    # --- arguments and outputs

    def _laid_out(self, node: Node, given: list[str], takes: Sequence[Tensor]) -> list[str]:
        """A kernel was captured on what lies in order, and may count on it."""
        if is_pointwise(node.op) or node.is_view:
            return given
        return [
            contiguous(self._local, value, at=node) if tensor.is_contiguous else value
            for value, tensor in zip(given, takes, strict=True)
        ]

    def _sized(
        self, node: Node, args: tuple[Argument, ...], strategy: Strategy
    ) -> tuple[Argument, ...]:
        """Sizes among the arguments are those of this rank's part."""
        places = _SIZES.get(node.op)
        if places is None:
            return args
        changed = list(args)
        if node.op in SPLITS:
            dim = argument_dim(node, 2, len(node.outputs[0].shape))
            size = local_shape(node.outputs[0].shape, strategy.gives[0], self._num_ranks)[dim]
            if isinstance(args[1], int):
                changed[1] = size
            elif isinstance(strategy.gives[0], Shard) and strategy.gives[0].dim == dim:
                changed[1] = (size,) * len(node.outputs)
            return tuple(changed)
        if node.op == "aten.convolution_backward.default":
            sizes = args[places[0]]
            if isinstance(sizes, tuple):
                whole = tuple(int(s) for s in sizes if isinstance(s, int))
                changed[places[0]] = local_shape(whole, strategy.gives[2], self._num_ranks)
            return tuple(changed)
        part = local_tensor(node.outputs[0], strategy.gives[0], self._num_ranks)
        for place, value in zip(places, (part.shape, part.stride)):
            changed[place] = value
        return tuple(changed)

    def _viewable(self, node: Node, args: tuple[Argument, ...]) -> tuple[Argument, ...]:
        """What came out of an exchange may lie in another order than what was captured."""
        source, shape = args
        assert isinstance(source, Ref)
        assert isinstance(shape, tuple)
        if self._local.can_be_viewed(source.name, shape):
            return args
        return Ref(contiguous(self._local, source.name, at=node)), shape

    def _left(self, output: Output) -> Output:
        placement = self._inputs.get(output.target, REPLICATE)
        at = self._graph.by_name[output.node]
        return replace(output, node=self._as(output.node, placement, at=at))

    def _own_gradients(self, outputs: tuple[Output, ...]) -> tuple[Output, ...]:
        """As captured: each gradient on memory of its own, laid out as its parameter."""
        by_name = self._local.by_name
        taken = {t.storage for n in self._local.nodes if n.op == "input" for t in n.outputs}
        owned = []
        for output in outputs:
            if output.kind is OutputKind.GRADIENT:
                gradient, like = by_name[output.node].outputs[0], by_name[output.target].outputs[0]
                if gradient.stride != like.stride or gradient.storage in taken:
                    at = replace(by_name[output.node], phase=Phase.BACKWARD)
                    copy = self._local.call(
                        "steelyard.copy_laid_out", Ref(output.node), like.shape, like.stride, at=at
                    )
                    output = replace(output, node=copy)
                taken.add(by_name[output.node].outputs[0].storage)
            owned.append(output)
        return tuple(owned)


def _copying(node: Node) -> Node:
    made = node.outputs[0]
    return replace(
        node,
        op="steelyard.copy_laid_out",
        args=(node.args[1], made.shape, made.stride),
        kwargs=(),
        inputs=node.inputs[1:],
    )


def _still_equal(nodes: Sequence[Node], run: BlockRun) -> bool:
    """Whether the blocks of a run, once verified equal, are in parts alike."""
    blocks: dict[str, list[object]] = {}
    for node in nodes:
        if node.path.startswith(f"{run.prefix}.") and node.phase is Phase.FORWARD:
            index, _, rest = node.path.removeprefix(f"{run.prefix}.").partition(".")
            shapes = tuple(t.shape for t in node.outputs)
            blocks.setdefault(index, []).append((rest, node.op, node.nth, shapes))
    ours = [blocks.get(str(run.first + place), []) for place in range(run.count)]
    return all(block == ours[0] for block in ours)


def _nearest(copies: dict[Placement, str], wanted: Placement, num_ranks: int) -> Placement:
    """Of the placements there are, the one from which it is least dear to get the wanted one."""
    return min(copies, key=lambda p: received_bytes(1, p, wanted, num_ranks))


def _renamed(argument: Argument, values: Iterator[str]) -> Argument:
    if isinstance(argument, Ref):
        return Ref(next(values))
    if isinstance(argument, tuple):
        return tuple(_renamed(a, values) for a in argument)
    return argument


# Where a call is told the sizes of its result (and its strides, behind them).
_SIZES = {
    "aten.view.default": (1,),
    "aten._unsafe_view.default": (1,),
    "aten.reshape.default": (1,),
    "aten.expand.default": (1,),
    "aten.slice_backward.default": (1,),
    "aten.select_backward.default": (1,),
    "aten.convolution_backward.default": (3,),
    **dict.fromkeys(SPLITS, (1,)),
    "steelyard.copy_laid_out": (1, 2),
}

# What adds up or copies, element by element.
_PASSING = frozenset({
    "aten.add.Tensor", "steelyard.copy_laid_out", "aten.clone.default", "aten._to_copy.default",
})  # fmt: skip
