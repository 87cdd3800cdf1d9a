"""SPMD partitioning: derives the graph that one rank runs of a step with sharded tensors.

The placements of parameters are given, and optionally those of some results. Each call uses the
strategy of its operator that exchanges the fewest bytes. The result is that of one device, except
that sums are computed in another order. Random numbers are drawn in full on every rank from the
same seed, so that each rank has its shard of what one device would draw. Not for choosing
placements: see search/.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from steelyard.capture.spmd.extra_sharding_rules import SHAPE_ONLY, argument_dim
from steelyard.capture.spmd.local_graph import LocalGraphBuilder, number_calls
from steelyard.capture.spmd.redistribute import received_bytes, redistribute, to_contiguous
from steelyard.capture.spmd.sharding_strategies import SPLITS, strategies, tensors_of
from steelyard.capture.spmd.vocab_parallel import split_by_rows
from steelyard.comm.devices import CPU
from steelyard.errors import BadInput
from steelyard.ir.analysis.counted_means import counted_means
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
    """Return the graph of ``rank``. All ranks issue the same collectives in the same order."""
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
                f"the captured step has no input or node {name}",
                expected="names of inputs and nodes of the captured step",
                remedy="plan again for this model",
            )
        if not fits(node.outputs[0], placement, choice.num_ranks):
            raise BadInput(
                f"{name.replace(':', ' ', 1)} of shape {list(node.outputs[0].shape)} cannot be "
                f"sharded as {placement} over {choice.num_ranks} ranks",
                expected="a dim that the number of ranks divides",
                remedy="shard another dim, or replicate it",
            )


@dataclass(slots=True)
class _LocalValue:
    """The copies of one global value on this rank, by placement, in the order they were made."""

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
        self._values: dict[str, _LocalValue] = {}
        # For calls with several results: the placement of each result, and its local name if it
        # already exists.
        self._result_placements: dict[str, tuple[Placement, ...]] = {}
        self._split_results: dict[str, tuple[str, ...]] = {}
        self._wanted = self._wanted_placements()

    def place(self, node: Node) -> None:
        if self._is_overwritten(node):
            return
        if self._overwrites(node):
            node = _as_copy(node)
        if node.is_input:
            self._place_input(node)
        elif node.is_getitem:
            self._place_getitem(node)
        elif node.op in SHAPE_ONLY and node.inputs:
            self._place_shaped_like(node)
        else:
            self._place_call(node)
        chosen = self._chosen.get(node.name)
        if chosen is not None and node.name in self._values:
            self._redistribute_to(node, chosen)

    def result(self) -> Graph:
        outputs = self._own_gradients(tuple(self._place_output(o) for o in self._graph.outputs))
        # A mean over sharded classes is computed from sums; the number of counted targets is
        # replicated.
        counts = tuple(
            replace(
                mean,
                targets=self._in_placement(
                    mean.targets, REPLICATE, at=self._graph.by_name[mean.targets]
                ),
            )
            for mean in counted_means(self._graph)
        )
        nodes = tuple(number_calls(self._local.nodes))
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
        """True if ``node`` overwrites all of a tensor with another one of the same shape and
        dtype.
        """
        if node.op != "aten.copy.default":
            return False
        target, source = (self._graph.by_name[name].outputs[0] for name in tensors_of(node))
        return (target.shape, target.dtype) == (source.shape, source.dtype)

    def _is_overwritten(self, node: Node) -> bool:
        """True if the result is only a buffer that is overwritten with other values."""
        users = [self._graph.by_name[user] for user in self._graph.users[node.name]]
        return (
            node.op in SHAPE_ONLY
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
        self._values[node.name] = _LocalValue({placement: node.name}, is_weight=is_weight)

    def _place_getitem(self, node: Node) -> None:
        source, index = node.inputs[0], node.args[1]
        assert isinstance(index, int)
        placement = self._result_placements[source][index]
        parts = self._split_results.get(source)
        made = (
            parts[index] if parts else self._local.getitem(source, index, at=node, name=node.name)
        )
        self._values[node.name] = _LocalValue({placement: made})

    def _place_shaped_like(self, node: Node) -> None:
        """Make a tensor with the global shape of another value; the result is always replicated."""
        copies = self._values[node.inputs[0]].copies
        placement, value = next(iter(copies.items()))
        args = (Ref(value), *node.args[1:])
        shape, stride = node.outputs[0].shape, node.outputs[0].stride
        op = SHAPE_ONLY[node.op]
        if isinstance(placement, Shard) and op:
            sizes = (shape, stride) if op.endswith("empty_strided.default") else (shape,)
            made = replace(node, op=op, nth=-1)
            dropped = [(k, a) for k, a in node.kwargs if k != "memory_format"]
            self._local.like(made, (args[0], *sizes, *args[1:]), kwargs=tuple(dropped))
        else:
            self._local.like(node, args)
        self._values[node.name] = _LocalValue({REPLICATE: node.name})

    def _place_call(self, node: Node) -> None:
        names = tensors_of(node)
        values = [self._values[name] for name in names]
        takes = [self._graph.by_name[name].outputs[0] for name in names]
        known = [p for h in values for p in h.copies]
        wanted = self._wanted.get(node.name)
        known += [wanted] if wanted is not None else []
        candidates = strategies(node, takes, known=known, num_ranks=self._num_ranks)
        best = min(candidates, key=lambda s: self._cost(node, s, values, takes))
        local_names = [
            self._in_placement(n, p, at=node) for n, p in zip(names, best.takes, strict=True)
        ]
        remaining = iter(self._match_contiguity(node, local_names, takes))
        args = tuple(_substitute(a, remaining) for a in node.args)
        kwargs = tuple((key, _substitute(a, remaining)) for key, a in node.kwargs)
        split = split_by_rows(node, best)
        if split is not None:
            made = split(self._local, node, args)
        else:
            args = self._localize_sizes(node, args, best)
            if node.op in ("aten.view.default", "aten._unsafe_view.default"):
                args = self._make_viewable(node, args)
            made = (self._local.like(node, args, kwargs=kwargs),)
        if len(best.gives) > 1:
            self._result_placements[node.name] = best.gives
            if split is not None:
                self._split_results[node.name] = made
        elif best.gives:
            is_weight = bool(values) and all(h.is_weight for h in values)
            self._values[node.name] = _LocalValue({best.gives[0]: made[0]}, is_weight=is_weight)

    def _redistribute_to(self, node: Node, placement: Placement) -> None:
        value = self._in_placement(node.name, placement, at=node)
        self._values[node.name] = _LocalValue({placement: value})

    def _in_placement(self, name: str, placement: Placement, *, at: Node) -> str:
        """Return the value in ``placement``, redistributing it at the first request."""
        copies = self._values[name].copies
        value = copies.get(placement)
        if value is None:
            old = _cheapest_source(copies, placement, self._num_ranks)
            if not isinstance(old, Replicate) and isinstance(placement, Partial):
                copies[REPLICATE] = redistribute(self._local, copies[old], old, REPLICATE, at=at)
                old = REPLICATE
            value = redistribute(self._local, copies[old], old, placement, at=at)
            copies[placement] = value
        return value

    # --- which strategy

    def _cost(
        self, node: Node, strategy: Strategy, values: Sequence[_LocalValue], takes: Sequence[Tensor]
    ) -> tuple[float, float, int, int]:
        """Return (weight bytes gathered, bytes exchanged, placement changes, partial results).

        Strategies are compared by this tuple. The cost of reducing a partial sum is charged where
        the sum arises, so that deferring the reduction does not look like a gain.
        """
        weights = exchanged = 0.0
        changes = 0
        wanted = self._wanted.get(node.name)
        is_cut = isinstance(wanted, Shard)
        for name, value, tensor, placement in zip(
            tensors_of(node), values, takes, strategy.takes, strict=True
        ):
            if isinstance(placement, Partial) and self._num_readers(name) > 1:
                # One of several readers usually needs the full sum, and then all can use it.
                exchanged += received_bytes(tensor.nbytes, PARTIAL, REPLICATE, self._num_ranks)
            if placement not in value.copies:
                old = _cheapest_source(value.copies, placement, self._num_ranks)
                # A reduce-scattered value is usually gathered soon: charge an all-reduce, unless a
                # shard is wanted.
                through = REPLICATE if isinstance(old, Partial) and not is_cut else placement
                received = received_bytes(tensor.nbytes, old, through, self._num_ranks)
                weights += received if value.is_weight else 0.0
                exchanged += received
                changes += 1
        for placement, tensor in zip(strategy.gives, node.outputs):
            if isinstance(placement, Partial):
                exchanged += received_bytes(tensor.nbytes, PARTIAL, REPLICATE, self._num_ranks)
        if wanted is not None and len(node.outputs) == 1 and strategy.gives[0] != wanted:
            made = strategy.gives[0]
            if not isinstance(made, Partial):
                nbytes = node.outputs[0].nbytes
                exchanged += received_bytes(nbytes, made, wanted, self._num_ranks)
            changes += 1
        terms = sum(isinstance(p, Partial) for p in strategy.gives)
        return weights, exchanged, changes, terms

    def _num_readers(self, name: str) -> int:
        """Return how many users read the values, not only the shape."""
        by_name = self._graph.by_name
        return sum(by_name[user].op not in SHAPE_ONLY for user in self._graph.users[name])

    def _wanted_placements(self) -> dict[str, Placement]:
        """Return the wanted placements: gradients, and their terms, follow their parameters."""
        # A value that should be replicated is computed in shards where possible, and gathered
        # afterwards.
        wanted = {
            name: placement for name, placement in self._chosen.items() if placement != REPLICATE
        }
        for output in self._graph.outputs:
            if output.target:
                wanted.setdefault(output.node, self._inputs.get(output.target, REPLICATE))
        for node in reversed(self._graph.nodes):
            if node.name in wanted and node.op in _PASS_PLACEMENT:
                for name in node.inputs:
                    if self._graph.by_name[name].outputs[0].shape == node.outputs[0].shape:
                        wanted.setdefault(name, wanted[node.name])
        return wanted

    # --- arguments and outputs

    def _match_contiguity(
        self, node: Node, local_names: list[str], takes: Sequence[Tensor]
    ) -> list[str]:
        """Make inputs contiguous if they were so at capture: the kernel may rely on it."""
        if is_pointwise(node.op) or node.is_view:
            return local_names
        return [
            to_contiguous(self._local, value, at=node) if tensor.is_contiguous else value
            for value, tensor in zip(local_names, takes, strict=True)
        ]

    def _localize_sizes(
        self, node: Node, args: tuple[Argument, ...], strategy: Strategy
    ) -> tuple[Argument, ...]:
        """Replace global sizes among the arguments by the sizes of this rank's shard."""
        positions = _SIZE_ARGUMENTS.get(node.op)
        if positions is None:
            return args
        local_args = list(args)
        if node.op in SPLITS:
            dim = argument_dim(node, 2, len(node.outputs[0].shape))
            size = local_shape(node.outputs[0].shape, strategy.gives[0], self._num_ranks)[dim]
            if isinstance(args[1], int):
                local_args[1] = size
            elif isinstance(strategy.gives[0], Shard) and strategy.gives[0].dim == dim:
                local_args[1] = (size,) * len(node.outputs)
            return tuple(local_args)
        if node.op == "aten.convolution_backward.default":
            sizes = args[positions[0]]
            if isinstance(sizes, tuple):
                whole = tuple(int(s) for s in sizes if isinstance(s, int))
                local_args[positions[0]] = local_shape(whole, strategy.gives[2], self._num_ranks)
            return tuple(local_args)
        part = local_tensor(node.outputs[0], strategy.gives[0], self._num_ranks)
        for position, value in zip(positions, (part.shape, part.stride)):
            local_args[position] = value
        return tuple(local_args)

    def _make_viewable(self, node: Node, args: tuple[Argument, ...]) -> tuple[Argument, ...]:
        """Make the source contiguous if its strides after a collective do not allow the view."""
        source, shape = args
        assert isinstance(source, Ref)
        assert isinstance(shape, tuple)
        if self._local.can_be_viewed(source.name, shape):
            return args
        return Ref(to_contiguous(self._local, source.name, at=node)), shape

    def _place_output(self, output: Output) -> Output:
        placement = self._inputs.get(output.target, REPLICATE)
        at = self._graph.by_name[output.node]
        return replace(output, node=self._in_placement(output.node, placement, at=at))

    def _own_gradients(self, outputs: tuple[Output, ...]) -> tuple[Output, ...]:
        """Give each gradient its own storage and the strides of its parameter, as captured."""
        by_name = self._local.by_name
        taken = {t.storage for n in self._local.nodes if n.op == "input" for t in n.outputs}
        owned = []
        for output in outputs:
            if output.kind is OutputKind.GRADIENT:
                gradient, parameter = (
                    by_name[output.node].outputs[0],
                    by_name[output.target].outputs[0],
                )
                if gradient.stride != parameter.stride or gradient.storage in taken:
                    at = replace(by_name[output.node], phase=Phase.BACKWARD)
                    copy = self._local.call(
                        "steelyard.copy_strided",
                        Ref(output.node),
                        parameter.shape,
                        parameter.stride,
                        at=at,
                    )
                    output = replace(output, node=copy)
                taken.add(by_name[output.node].outputs[0].storage)
            owned.append(output)
        return tuple(owned)


def _as_copy(node: Node) -> Node:
    made = node.outputs[0]
    return replace(
        node,
        op="steelyard.copy_strided",
        args=(node.args[1], made.shape, made.stride),
        kwargs=(),
        inputs=node.inputs[1:],
    )


def _still_equal(nodes: Sequence[Node], run: BlockRun) -> bool:
    """True if the blocks of a run, equal before partitioning, are still equal after it."""
    blocks: dict[str, list[object]] = {}
    for node in nodes:
        if node.path.startswith(f"{run.prefix}.") and node.phase is Phase.FORWARD:
            index, _, rest = node.path.removeprefix(f"{run.prefix}.").partition(".")
            shapes = tuple(t.shape for t in node.outputs)
            blocks.setdefault(index, []).append((rest, node.op, node.nth, shapes))
    blocks_in_run = [blocks.get(str(run.first + offset), []) for offset in range(run.count)]
    return all(block == blocks_in_run[0] for block in blocks_in_run)


def _cheapest_source(copies: dict[Placement, str], wanted: Placement, num_ranks: int) -> Placement:
    """Return the existing placement from which redistributing to ``wanted`` is cheapest."""
    return min(copies, key=lambda p: received_bytes(1, p, wanted, num_ranks))


def _substitute(argument: Argument, values: Iterator[str]) -> Argument:
    if isinstance(argument, Ref):
        return Ref(next(values))
    if isinstance(argument, tuple):
        return tuple(_substitute(a, values) for a in argument)
    return argument


# Positions of the arguments that hold the result's sizes (and, after them, its strides).
_SIZE_ARGUMENTS = {
    "aten.view.default": (1,),
    "aten._unsafe_view.default": (1,),
    "aten.reshape.default": (1,),
    "aten.expand.default": (1,),
    "aten.slice_backward.default": (1,),
    "aten.select_backward.default": (1,),
    "aten.convolution_backward.default": (3,),
    **dict.fromkeys(SPLITS, (1,)),
    "steelyard.copy_strided": (1, 2),
}

# Elementwise operators that add or copy: a wanted placement passes to their inputs.
_PASS_PLACEMENT = frozenset({
    "aten.add.Tensor", "steelyard.copy_strided", "aten.clone.default", "aten._to_copy.default",
})  # fmt: skip
