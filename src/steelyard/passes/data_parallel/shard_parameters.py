"""Shards parameters over ranks: all-gathers them before they are read, reduce-scatters gradients.

This is what ZeRO's third stage does (Rajbhandari et al., SC 2020), but as nodes of the graph. Not
for overlapping the waits: see overlap.py.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

from steelyard.errors import BadInput
from steelyard.ir.collective import Collective, Exchange, Transport
from steelyard.ir.graph import Graph, Node, Output, OutputKind, Phase, Tensor
from steelyard.ir.parallel_layout import DATA
from steelyard.passes.graph_editor import (
    GraphEditor,
    issue,
    pack_rows,
    unpack_rows,
    view,
    wait,
)


def gathered(
    graph: Graph,
    parameters: Sequence[str],
    *,
    num_ranks: int,
    transport: Transport,
    axis: str = DATA,
    stride: int = 1,
    regathered: Collection[str] = (),
    together: Mapping[str, int] = MappingProxyType({}),
) -> Graph:
    """Return the step on one shard of each of these parameters, along the first dimension.

    Each is gathered before its first reader and then stays resident. Parameters in ``regathered``
    are freed after the forward pass and gathered a second time before their first reader in the
    backward pass. ``together`` maps parameters to bucket sizes in bytes: consecutive parameters are
    gathered in one bucket of at most that size, and so are their gradients.
    """
    editor = GraphEditor(graph)

    def collective(kind: Exchange, nbytes: int) -> Collective:
        return transport.collective(
            kind, axis=axis, num_ranks=num_ranks, nbytes=nbytes, stride=stride
        )

    shares: dict[str, Tensor] = {}
    late: dict[str, list[str]] = {}
    for parameter in parameters:
        node = editor[parameter]
        whole = node.outputs[0]
        check_shared(graph, parameter, num_ranks)
        share = replace(whole, shape=(whole.shape[0] // num_ranks, *whole.shape[1:]))
        shares[parameter] = share
        storage = graph.storages[whole.storage]
        editor.storages[whole.storage] = replace(storage, nbytes=share.nbytes)
        editor.set_node(replace(node, outputs=(share,)))
        is_early = graph.by_name[graph.users[parameter][0]].phase is Phase.FORWARD
        if parameter in regathered and is_early and (readers := _read_late(graph, parameter)):
            late[parameter] = readers
    exchanges = _Exchanges(editor, transport, collective, num_ranks, together)
    arrived = exchanges.gathered({p: graph.users[p][0] for p in parameters}, "gathered")
    second = exchanges.gathered({p: readers[0] for p, readers in late.items()}, "regathered")
    for parameter, read in arrived.items():
        editor.reroute(editor[parameter], read)
        if parameter in late:
            _reroute_late(editor, graph, parameter, read, second[parameter], late[parameter])
    return editor.result(exchanges.scattered(graph, shares))


def _forward_views(graph: Graph, parameter: str) -> list[str]:
    """Return the parameter and the views of it that the forward pass makes."""
    storage = graph.by_name[parameter].outputs[0].storage
    return [
        node.name
        for node in graph.nodes
        if node.phase is Phase.FORWARD and any(t.storage == storage for t in node.outputs)
    ]


def _read_late(graph: Graph, parameter: str) -> list[str]:
    """Return the backward nodes that read the parameter or a forward view of it, in order."""
    views = set(_forward_views(graph, parameter))
    late = (n for n in graph.nodes if n.phase is Phase.BACKWARD)
    return [node.name for node in late if not views.isdisjoint(node.inputs)]


def _reroute_late(
    editor: GraphEditor,
    graph: Graph,
    parameter: str,
    arrived: Node,
    second: Node,
    late: Sequence[str],
) -> None:
    """Make the backward readers ``late`` read the second gather, with new views of it."""
    before, after = arrived.outputs[0].storage, second.outputs[0].storage

    def reading_second(node: Node) -> Node:
        outputs = (replace(t, storage=after) if t.storage == before else t for t in node.outputs)
        return replace(node.reading(renamed), outputs=tuple(outputs))

    renamed = {arrived.name: second.name}
    wanted = {i for name in late for i in editor[name].inputs}
    views = _forward_views(graph, parameter)[1:]
    for name in reversed(views):
        wanted |= set(editor[name].inputs) if name in wanted else set()
    for name in views:
        if name in wanted:
            copy = replace(
                reading_second(editor[name]), name=f"{name}_regathered", phase=Phase.BACKWARD
            )
            editor.put_before(late[0], copy)
            renamed[name] = copy.name
    for node in graph.nodes:
        if node.phase is Phase.BACKWARD:
            editor.set_node(reading_second(editor[node.name]))


def why_not_shared(graph: Graph, parameter: str, num_ranks: int) -> str | None:
    """Return why a parameter cannot be sharded into equal shares of rows; None if it can."""
    whole = graph.by_name[parameter].outputs[0]
    if not graph.users[parameter]:
        return "nothing reads it"
    if not whole.shape or whole.shape[0] % num_ranks:
        return f"its rows do not divide among {num_ranks} ranks"
    if not whole.is_contiguous or graph.storages[whole.storage].nbytes != whole.nbytes:
        return "it is not contiguous, or shares its memory"
    return None


def check_shared(graph: Graph, parameter: str, num_ranks: int) -> None:
    if reason := why_not_shared(graph, parameter, num_ranks):
        raise _refusal(parameter, graph.by_name[parameter].outputs[0], num_ranks, reason)


class _Exchanges:
    """Inserts the collectives of parameters and of their gradients into the graph."""

    def __init__(
        self,
        editor: GraphEditor,
        transport: Transport,
        collective: Callable[[Exchange, int], Collective],
        num_ranks: int,
        together: Mapping[str, int],
    ) -> None:
        self._editor, self._transport, self._collective = editor, transport, collective
        self._ranks, self._together = num_ranks, together

    def gathered(self, first: Mapping[str, str], suffix: str) -> dict[str, Node]:
        """Gather each parameter before the ``first`` reader of any parameter in its bucket."""
        graph = self._editor.before
        in_order = sorted(first, key=lambda parameter: graph.position[first[parameter]])
        tensors = {p: graph.by_name[p].outputs[0] for p in in_order}
        arrived: dict[str, Node] = {}
        for bucket in _buckets(tensors, self._together):
            if len(bucket) == 1:
                arrived[bucket[0]] = self._gather(bucket[0], first[bucket[0]], suffix)
            else:
                arrived |= self._gather_bucket([(p, first[p]) for p in bucket], suffix)
        return arrived

    def _gather(self, parameter: str, first: str, suffix: str) -> Node:
        whole = self._editor.before.by_name[parameter].outputs[0]
        sent = issue(
            self._collective(Exchange.ALL_GATHER, whole.nbytes),
            self._placed_like(parameter, first),
            name=f"{parameter}_{suffix}", output=self._editor.tensor(whole.shape, whole.dtype),
            moved_bytes=0,
        )  # fmt: skip
        return self._put_before(first, sent, wait(sent, self._transport))

    def _gather_bucket(self, bucket: Sequence[tuple[str, str]], suffix: str) -> dict[str, Node]:
        """Gather one joined row per rank; each parameter is copied out of it before its first
        reader.
        """
        editor = self._editor
        (name, first), graph = bucket[0], editor.before
        wholes = {p: graph.by_name[p].outputs[0] for p, _ in bucket}
        row, dtype = sum(t.numel for t in wholes.values()) // self._ranks, wholes[name].dtype
        joined = pack_rows(
            [editor[p] for p, _ in bucket], like=self._placed_like(name, first),
            name=f"{name}_{suffix}_joined", output=editor.tensor((1, row), dtype),
        )  # fmt: skip
        nbytes = sum(t.nbytes for t in wholes.values())
        sent = issue(
            self._collective(Exchange.ALL_GATHER, nbytes), joined, name=f"{name}_{suffix}",
            output=editor.tensor((self._ranks, row), dtype), moved_bytes=0,
        )  # fmt: skip
        rows = self._put_before(first, joined, sent, wait(sent, self._transport))
        arrived, start = {}, 0
        for parameter, reader in bucket:
            whole = wholes[parameter]
            arrived[parameter] = self._put_before(
                reader,
                unpack_rows(
                    rows, start, like=self._placed_like(parameter, reader),
                    name=f"{parameter}_{suffix}_whole",
                    output=editor.tensor(whole.shape, whole.dtype),
                ),
            )  # fmt: skip
            start += whole.numel // self._ranks
        return arrived

    def _placed_like(self, parameter: str, reader: str) -> Node:
        """Return the parameter's shard with the phase, path and line of its reader."""
        like = self._editor[reader]
        share = self._editor[parameter]
        return replace(share, phase=like.phase, path=like.path, line=like.line)

    def _put_before(self, anchor: str, *nodes: Node) -> Node:
        for node in nodes:
            self._editor.put_before(anchor, node)
        return nodes[-1]

    def scattered(self, graph: Graph, shares: Mapping[str, Tensor]) -> list[Output]:
        """Reduce-scatter the gradients of the sharded parameters; return the graph's outputs."""
        gradients = {
            output.target: graph.by_name[output.node]
            for output in graph.outputs
            if output.kind is OutputKind.GRADIENT and output.target in shares
        }
        in_order = sorted(gradients, key=lambda target: graph.position[gradients[target].name])
        tensors = {target: gradients[target].outputs[0] for target in in_order}
        # The rows of other gradients are not contiguous, so these cannot be scattered directly.
        able = {
            p: n for p, n in self._together.items() if p in tensors and tensors[p].is_contiguous
        }
        own: dict[str, str] = {}
        for bucket in _buckets(tensors, able):
            if len(bucket) == 1 and tensors[bucket[0]].is_contiguous:
                (target,) = bucket
                own[target] = self._scatter(gradients[target], shares[target])
            else:
                own |= self._scatter_bucket({t: gradients[t] for t in bucket}, shares)
        return [
            replace(output, node=own[output.target]) if output.target in gradients else output
            for output in graph.outputs
        ]

    def _scatter(self, gradient: Node, share: Tensor) -> str:
        name, own = f"{gradient.name}_scattered", self._editor.tensor(share.shape, share.dtype)
        return self._sum(gradient, gradient.name, name=name, own=own)

    def _scatter_bucket(
        self, gradients: Mapping[str, Node], shares: Mapping[str, Tensor]
    ) -> dict[str, str]:
        """Reduce-scatter one joined row per rank; gradients are views of this rank's row."""
        editor, nodes = self._editor, [*gradients.values()]
        after, dtype = nodes[-1].name, nodes[-1].outputs[0].dtype
        row = sum(shares[target].numel for target in gradients)
        name = f"{after}_scattered"
        joined = pack_rows(
            nodes, like=nodes[-1], name=f"{name}_joined",
            output=editor.tensor((self._ranks, row), dtype),
        )  # fmt: skip
        editor.put_after(after, joined)
        arrived = self._sum(joined, after, name=name, own=editor.tensor((1, row), dtype))
        rows, own, start = editor[arrived], {}, 0
        for target in gradients:
            laid_out = replace(shares[target], storage=rows.outputs[0].storage, offset=start)
            gradient = view(rows, laid_out, name=f"{target}_scattered")
            own[target] = editor.put_after(after, gradient).name
            start += laid_out.numel
        return own

    def _sum(self, whole: Node, after: str, *, name: str, own: Tensor) -> str:
        """Issue a reduce-scatter and its wait; return the name of this rank's shard."""
        exchange = self._collective(Exchange.REDUCE_SCATTER, whole.outputs[0].nbytes)
        sent = issue(exchange, whole, name=name, output=own, moved_bytes=0)
        arrived = wait(sent, self._transport)
        self._editor.put_after(after, sent)
        return self._editor.put_after(after, arrived).name


def _buckets(tensors: Mapping[str, Tensor], together: Mapping[str, int]) -> Iterable[list[str]]:
    """Group consecutive tensors of equal dtype and bucket size, up to that size in bytes."""
    bucket: list[str] = []
    filled, kind = 0, (0, "")
    for name, tensor in tensors.items():
        most = together.get(name, 0)
        if bucket and (kind != (most, tensor.dtype) or filled + tensor.nbytes > most):
            yield bucket
            bucket, filled = [], 0
        bucket, filled, kind = [*bucket, name], filled + tensor.nbytes, (most, tensor.dtype)
    if bucket:
        yield bucket


def _refusal(parameter: str, whole: Tensor, num_ranks: int, reason: str) -> BadInput:
    return BadInput(
        f"{parameter.replace(':', ' ', 1)} of shape {list(whole.shape)} cannot be sharded into "
        f"{num_ranks} equal parts: {reason}",
        expected="a contiguous parameter whose first dimension the number of ranks divides",
        remedy="do not shard this parameter",
    )
