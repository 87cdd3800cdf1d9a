"""A parameter in shares on several ranks: gathered to be read, its gradient reduced and scattered.

As ZeRO's third stage does (Rajbhandari et al., SC 2020), but as nodes of the graph; to gather it a
second time is to recompute the gathering. Not for when results are waited for: see windows.py.
"""

from dataclasses import replace

from steelyard.core.collective import Exchange, Transport
from steelyard.core.errors import BadInput
from steelyard.core.graph import Graph, Node, Output, OutputKind, Storage, Tensor
from steelyard.exchange.rewriting import Rewriting, issue, wait


def gathered(
    graph: Graph, parameter: str, *, num_ranks: int, transport: Transport, axis: str = "data"
) -> Graph:
    """The step on one share of ``parameter``, cut along its first dimension.

    It is gathered in front of its first reader and kept from there on.
    """
    change = Rewriting(graph)
    held = graph.by_name[parameter]
    whole = held.outputs[0]
    _check(parameter, graph.storages[whole.storage], whole, num_ranks)
    share = replace(whole, shape=(whole.shape[0] // num_ranks, *whole.shape[1:]))
    change.storages[whole.storage] = replace(graph.storages[whole.storage], nbytes=share.nbytes)
    change.change(replace(held, outputs=(share,)))
    first = graph.users[parameter][0]
    collective = transport.collective(
        Exchange.ALL_GATHER, axis=axis, num_ranks=num_ranks, nbytes=whole.nbytes
    )
    sent = issue(
        collective, _standing_at(change[parameter], graph.by_name[first]),
        name=f"{parameter}_gathered", output=change.tensor(whole.shape, whole.dtype),
        moved_bytes=0,
    )  # fmt: skip
    arrived = wait(sent, transport)
    change.reroute(change[parameter], arrived)
    change.put_before(first, sent)
    change.put_before(first, arrived)
    outputs = [
        _scattered(change, output, share, num_ranks, transport, axis)
        if output.kind is OutputKind.GRADIENT and output.target == parameter
        else output
        for output in graph.outputs
    ]
    return change.result(outputs)


def _scattered(
    change: Rewriting,
    output: Output,
    share: Tensor,
    num_ranks: int,
    transport: Transport,
    axis: str,
) -> Output:
    """The gradient summed over the ranks, of which each keeps its share."""
    gradient = change[output.node]
    collective = transport.collective(
        Exchange.REDUCE_SCATTER,
        axis=axis,
        num_ranks=num_ranks,
        nbytes=gradient.outputs[0].nbytes,
    )
    sent = issue(
        collective, gradient, name=f"{gradient.name}_scattered",
        output=change.tensor(share.shape, share.dtype), moved_bytes=2 * collective.held_bytes,
    )  # fmt: skip
    change.put_behind(gradient.name, sent)
    arrived = change.put_behind(gradient.name, wait(sent, transport))
    return replace(output, node=arrived.name)


def _standing_at(value: Node, reader: Node) -> Node:
    """The parameter as something of the module that reads it."""
    return replace(value, phase=reader.phase, path=reader.path, line=reader.line)


def _check(parameter: str, storage: Storage, whole: Tensor, num_ranks: int) -> None:
    stride, step = [], 1
    for size in reversed(whole.shape):
        stride.append(step)
        step *= size
    alone = storage.nbytes == whole.nbytes and whole.stride == tuple(reversed(stride))
    if not whole.shape or whole.shape[0] % num_ranks or not alone:
        raise BadInput(
            f"{parameter.replace(':', ' ', 1)} of shape {list(whole.shape)} cannot be cut into "
            f"{num_ranks} equal shares",
            expected="a contiguous parameter whose first dimension the number of ranks divides",
            remedy="leave this parameter whole on every rank",
        )
