"""A parameter in shares on several ranks: gathered to be read, its gradient reduced and scattered.

As ZeRO's third stage does (Rajbhandari et al., SC 2020), but as nodes of the graph. Not for when
results are waited for: see windows.py.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace

from steelyard.core.collective import Collective, Exchange, Transport
from steelyard.core.errors import BadInput
from steelyard.core.graph import Graph, Node, Output, OutputKind, Phase, Tensor
from steelyard.core.layout import DATA
from steelyard.exchange.rewriting import (
    Rewriting,
    issue,
    issue_in_place,
    wait,
    wait_for_own_rows,
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
) -> Graph:
    """The step on one share of each of the parameters, cut along its first dimension.

    Each is gathered in front of its first reader and kept from there on; those that are gathered
    ``again`` are so in front of the first reader of the backward pass, and not kept until then.
    """
    change = Rewriting(graph)

    def collective(kind: Exchange, nbytes: int) -> Collective:
        return transport.collective(
            kind, axis=axis, num_ranks=num_ranks, nbytes=nbytes, stride=stride
        )

    shares: dict[str, Tensor] = {}
    for parameter in parameters:
        held = change[parameter]
        whole = held.outputs[0]
        check_shared(graph, parameter, num_ranks)
        share = replace(whole, shape=(whole.shape[0] // num_ranks, *whole.shape[1:]))
        shares[parameter] = share
        storage = graph.storages[whole.storage]
        change.storages[whole.storage] = replace(storage, nbytes=share.nbytes)
        change.change(replace(held, outputs=(share,)))
        exchange = collective(Exchange.ALL_GATHER, whole.nbytes)
        first = graph.users[parameter][0]
        late = _read_late(graph, parameter) if parameter in again else []
        early = graph.by_name[first].phase is Phase.FORWARD
        arrived = _arriving(change, change[parameter], first, exchange, transport, "gathered")
        change.reroute(change[parameter], arrived)
        if late and early:
            second = _arriving(change, change[parameter], late[0], exchange, transport, "again")
            _reroute_late(change, graph, parameter, arrived, second, late)
    outputs = [
        _scattered(change, output, shares[output.target], transport, collective)
        if output.kind is OutputKind.GRADIENT and output.target in shares
        else output
        for output in graph.outputs
    ]
    return change.result(outputs)


def _arriving(
    change: Rewriting,
    parameter: Node,
    first: str,
    exchange: Collective,
    transport: Transport,
    how: str,
) -> Node:
    """The whole parameter, gathered in front of ``first``."""
    whole = change.tensor(_whole_shape(parameter, exchange), parameter.outputs[0].dtype)
    sent = issue(
        exchange, _standing_at(parameter, change[first]), name=f"{parameter.name}_{how}",
        output=whole, moved_bytes=0,
    )  # fmt: skip
    arrived = wait(sent, transport)
    change.put_before(first, sent)
    change.put_before(first, arrived)
    return arrived


def _whole_shape(parameter: Node, exchange: Collective) -> tuple[int, ...]:
    rows, *rest = parameter.outputs[0].shape
    return (rows * exchange.num_ranks, *rest)


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
    change: Rewriting,
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
    for look in reversed(looks):
        wanted |= set(change[look].inputs) if look in wanted else set()
    for look in looks:
        if look in wanted:
            anew = replace(moved(change[look]), name=f"{look}_again", phase=Phase.BACKWARD)
            change.put_before(late[0], anew)
            renamed[look] = anew.name
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


def _scattered(
    change: Rewriting,
    output: Output,
    share: Tensor,
    transport: Transport,
    collective: Callable[[Exchange, int], Collective],
) -> Output:
    """The gradient summed over the ranks, of which each keeps its share."""
    gradient = change[output.node]
    exchange = collective(Exchange.REDUCE_SCATTER, gradient.outputs[0].nbytes)
    name, own = f"{gradient.name}_scattered", change.tensor(share.shape, share.dtype)
    sums_whole = Exchange.REDUCE_SCATTER in transport.reduces_all
    if sums_whole and gradient.outputs[0].is_contiguous and change.is_alone(gradient.name):
        # Gloo would do the same on a copy of its own, and let go of it where no meter sees it.
        sent = issue_in_place(exchange, gradient, name=name)
        arrived = wait_for_own_rows(sent, output=own)
    else:
        moved_bytes = 2 * exchange.held_bytes
        sent = issue(exchange, gradient, name=name, output=own, moved_bytes=moved_bytes)
        arrived = wait(sent, transport)
    change.put_behind(gradient.name, sent)
    change.put_behind(gradient.name, arrived)
    return replace(output, node=arrived.name)


def _standing_at(value: Node, reader: Node) -> Node:
    """The parameter as something of the module that reads it."""
    return replace(value, phase=reader.phase, path=reader.path, line=reader.line)


def _refusal(parameter: str, whole: Tensor, num_ranks: int, reason: str) -> BadInput:
    return BadInput(
        f"{parameter.replace(':', ' ', 1)} of shape {list(whole.shape)} cannot be cut into "
        f"{num_ranks} equal shares: {reason}",
        expected="a contiguous parameter whose first dimension the number of ranks divides",
        remedy="leave this parameter whole on every rank",
    )
