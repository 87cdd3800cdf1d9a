"""A parameter in shares on several ranks: gathered to be read, its gradient reduced and scattered.

As ZeRO's third stage does (Rajbhandari et al., SC 2020), but as nodes of the graph. Not for when
results are waited for: see overlap.py.
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
    joined_rows,
    view,
    wait,
    whole_rows,
)


def gathered(
    graph: Graph,
    parameters: Sequence[str],
    *,
    num_ranks: int,
    transport: Transport,
    axis: str = DATA,
    stride: int = 1,
    again: Collection[str] = (),
    together: Mapping[str, int] = MappingProxyType({}),
) -> Graph:
    """The step on one share of each of the parameters, cut along its first dimension.

    Each is gathered in front of its first reader and kept from there on; those that are gathered
    ``again`` are so in front of the first reader of the backward pass, and not kept until then.
    Those that follow one another are exchanged ``together``, up to so many bytes of each.
    """
    change = GraphEditor(graph)

    def collective(kind: Exchange, nbytes: int) -> Collective:
        return transport.collective(
            kind, axis=axis, num_ranks=num_ranks, nbytes=nbytes, stride=stride
        )

    shares: dict[str, Tensor] = {}
    late: dict[str, list[str]] = {}
    for parameter in parameters:
        held = change[parameter]
        whole = held.outputs[0]
        check_shared(graph, parameter, num_ranks)
        share = replace(whole, shape=(whole.shape[0] // num_ranks, *whole.shape[1:]))
        shares[parameter] = share
        storage = graph.storages[whole.storage]
        change.storages[whole.storage] = replace(storage, nbytes=share.nbytes)
        change.change(replace(held, outputs=(share,)))
        is_early = graph.by_name[graph.users[parameter][0]].phase is Phase.FORWARD
        if parameter in again and is_early and (readers := _read_late(graph, parameter)):
            late[parameter] = readers
    exchanges = _Exchanges(change, transport, collective, num_ranks, together)
    arrived = exchanges.gathered({p: graph.users[p][0] for p in parameters}, "gathered")
    second = exchanges.gathered({p: readers[0] for p, readers in late.items()}, "again")
    for parameter, read in arrived.items():
        change.reroute(change[parameter], read)
        if parameter in late:
            _reroute_late(change, graph, parameter, read, second[parameter], late[parameter])
    return change.result(exchanges.scattered(graph, shares))


def _looks(graph: Graph, parameter: str) -> list[str]:
    """The parameter, and the views of it that the forward pass makes."""
    storage = graph.by_name[parameter].outputs[0].storage
    return [
        node.name
        for node in graph.nodes
        if node.phase is Phase.FORWARD and any(t.storage == storage for t in node.outputs)
    ]


def _read_late(graph: Graph, parameter: str) -> list[str]:
    """What of the backward pass reads the parameter, or a view from before; in order."""
    looks = set(_looks(graph, parameter))
    late = (n for n in graph.nodes if n.phase is Phase.BACKWARD)
    return [node.name for node in late if not looks.isdisjoint(node.inputs)]


def _reroute_late(
    change: GraphEditor,
    graph: Graph,
    parameter: str,
    arrived: Node,
    second: Node,
    late: Sequence[str],
) -> None:
    """They read what is gathered again, and views of that."""
    before, after = arrived.outputs[0].storage, second.outputs[0].storage

    def moved(node: Node) -> Node:
        outputs = (replace(t, storage=after) if t.storage == before else t for t in node.outputs)
        return replace(node.reading(renamed), outputs=tuple(outputs))

    renamed = {arrived.name: second.name}
    wanted = {i for name in late for i in change[name].inputs}
    looks = _looks(graph, parameter)[1:]
    for session in reversed(looks):
        wanted |= set(change[session].inputs) if session in wanted else set()
    for session in looks:
        if session in wanted:
            anew = replace(moved(change[session]), name=f"{session}_again", phase=Phase.BACKWARD)
            change.put_before(late[0], anew)
            renamed[session] = anew.name
    for node in graph.nodes:
        if node.phase is Phase.BACKWARD:
            change.change(moved(change[node.name]))


def why_not_shared(graph: Graph, parameter: str, num_ranks: int) -> str | None:
    """Why a parameter cannot lie in equal shares of its rows; None where it can."""
    whole = graph.by_name[parameter].outputs[0]
    if not graph.users[parameter]:
        return "nothing reads it"
    if not whole.shape or whole.shape[0] % num_ranks:
        return f"its rows do not divide among {num_ranks} ranks"
    if not whole.is_contiguous or graph.storages[whole.storage].nbytes != whole.nbytes:
        return "it does not lie row by row on memory of its own"
    return None


def check_shared(graph: Graph, parameter: str, num_ranks: int) -> None:
    if reason := why_not_shared(graph, parameter, num_ranks):
        raise _refusal(parameter, graph.by_name[parameter].outputs[0], num_ranks, reason)


class _Exchanges:
    """Puts exchanges of parameters, and of their gradients, into the graph."""

    def __init__(
        self,
        change: GraphEditor,
        transport: Transport,
        collective: Callable[[Exchange, int], Collective],
        num_ranks: int,
        together: Mapping[str, int],
    ) -> None:
        self._change, self._transport, self._collective = change, transport, collective
        self._ranks, self._together = num_ranks, together

    def gathered(self, first: Mapping[str, str], how: str) -> dict[str, Node]:
        """Each whole parameter, gathered in front of its ``first`` reader or of that of one that
        is read sooner."""
        graph = self._change.before
        in_order = sorted(first, key=lambda parameter: graph.position[first[parameter]])
        tensors = {p: graph.by_name[p].outputs[0] for p in in_order}
        arrived: dict[str, Node] = {}
        for bucket in _buckets(tensors, self._together):
            if len(bucket) == 1:
                arrived[bucket[0]] = self._gather(bucket[0], first[bucket[0]], how)
            else:
                arrived |= self._gather_together([(p, first[p]) for p in bucket], how)
        return arrived

    def _gather(self, parameter: str, first: str, how: str) -> Node:
        whole = self._change.before.by_name[parameter].outputs[0]
        sent = issue(
            self._collective(Exchange.ALL_GATHER, whole.nbytes), self._standing(parameter, first),
            name=f"{parameter}_{how}", output=self._change.tensor(whole.shape, whole.dtype),
            moved_bytes=0,
        )  # fmt: skip
        return self._put_before(first, sent, wait(sent, self._transport))

    def _gather_together(self, bucket: Sequence[tuple[str, str]], how: str) -> dict[str, Node]:
        """A row of each rank's shares; each parameter is taken out where it is read."""
        change = self._change
        (name, first), graph = bucket[0], change.before
        wholes = {p: graph.by_name[p].outputs[0] for p, _ in bucket}
        row, dtype = sum(t.numel for t in wholes.values()) // self._ranks, wholes[name].dtype
        joined = joined_rows(
            [change[p] for p, _ in bucket], like=self._standing(name, first),
            name=f"{name}_{how}_joined", output=change.tensor((1, row), dtype),
        )  # fmt: skip
        nbytes = sum(t.nbytes for t in wholes.values())
        sent = issue(
            self._collective(Exchange.ALL_GATHER, nbytes), joined, name=f"{name}_{how}",
            output=change.tensor((self._ranks, row), dtype), moved_bytes=0,
        )  # fmt: skip
        rows = self._put_before(first, joined, sent, wait(sent, self._transport))
        arrived, start = {}, 0
        for parameter, reader in bucket:
            whole = wholes[parameter]
            arrived[parameter] = self._put_before(
                reader,
                whole_rows(
                    rows, start, like=self._standing(parameter, reader),
                    name=f"{parameter}_{how}_whole",
                    output=change.tensor(whole.shape, whole.dtype),
                ),
            )  # fmt: skip
            start += whole.numel // self._ranks
        return arrived

    def _standing(self, parameter: str, reader: str) -> Node:
        """The share as something of the module that reads it."""
        like = self._change[reader]
        share = self._change[parameter]
        return replace(share, phase=like.phase, path=like.path, line=like.line)

    def _put_before(self, anchor: str, *nodes: Node) -> Node:
        for node in nodes:
            self._change.put_before(anchor, node)
        return nodes[-1]

    def scattered(self, graph: Graph, shares: Mapping[str, Tensor]) -> list[Output]:
        """The gradients summed over the ranks, of which each keeps its share."""
        gradients = {
            output.target: graph.by_name[output.node]
            for output in graph.outputs
            if output.kind is OutputKind.GRADIENT and output.target in shares
        }
        in_order = sorted(gradients, key=lambda target: graph.position[gradients[target].name])
        tensors = {target: gradients[target].outputs[0] for target in in_order}
        # Rows of others do not lie side by side.
        able = {
            p: n for p, n in self._together.items() if p in tensors and tensors[p].is_contiguous
        }
        own: dict[str, str] = {}
        for bucket in _buckets(tensors, able):
            if len(bucket) == 1 and tensors[bucket[0]].is_contiguous:
                (target,) = bucket
                own[target] = self._scatter(gradients[target], shares[target])
            else:
                own |= self._scatter_together({t: gradients[t] for t in bucket}, shares)
        return [
            replace(output, node=own[output.target]) if output.target in gradients else output
            for output in graph.outputs
        ]

    def _scatter(self, gradient: Node, share: Tensor) -> str:
        name, own = f"{gradient.name}_scattered", self._change.tensor(share.shape, share.dtype)
        return self._sum(gradient, gradient.name, name=name, own=own)

    def _scatter_together(
        self, gradients: Mapping[str, Node], shares: Mapping[str, Tensor]
    ) -> dict[str, str]:
        """A row of each rank's shares, one for each rank; gradients are views of one's own."""
        change, nodes = self._change, [*gradients.values()]
        behind, dtype = nodes[-1].name, nodes[-1].outputs[0].dtype
        row = sum(shares[target].numel for target in gradients)
        name = f"{behind}_scattered"
        joined = joined_rows(
            nodes, like=nodes[-1], name=f"{name}_joined",
            output=change.tensor((self._ranks, row), dtype),
        )  # fmt: skip
        change.put_behind(behind, joined)
        arrived = self._sum(joined, behind, name=name, own=change.tensor((1, row), dtype))
        rows, own, start = change[arrived], {}, 0
        for target in gradients:
            laid_out = replace(shares[target], storage=rows.outputs[0].storage, offset=start)
            looked = view(rows, laid_out, name=f"{target}_scattered")
            own[target] = change.put_behind(behind, looked).name
            start += laid_out.numel
        return own

    def _sum(self, whole: Node, behind: str, *, name: str, own: Tensor) -> str:
        """Of the sum over the ranks, what is this one's own."""
        exchange = self._collective(Exchange.REDUCE_SCATTER, whole.outputs[0].nbytes)
        sent = issue(exchange, whole, name=name, output=own, moved_bytes=0)
        arrived = wait(sent, self._transport)
        self._change.put_behind(behind, sent)
        return self._change.put_behind(behind, arrived).name


def _buckets(tensors: Mapping[str, Tensor], together: Mapping[str, int]) -> Iterable[list[str]]:
    """Those that follow one another, as long as they are of one kind and within its bytes."""
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
        f"{parameter.replace(':', ' ', 1)} of shape {list(whole.shape)} cannot be cut into "
        f"{num_ranks} equal shares: {reason}",
        expected="a contiguous parameter whose first dimension the number of ranks divides",
        remedy="leave this parameter whole on every rank",
    )
