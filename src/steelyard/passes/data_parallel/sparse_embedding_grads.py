"""Gradients of tables sent as the rows that were looked up, in place of the whole table.

What ranks would sum up is made of few rows: each hands the others its own, and which they are, and
every rank makes the gradient of all. Exact but for the order of sums. Takes the gradient out of the
bucket that it is in. Not for other gradients: see passes/compression/compressed_all_reduce.py.
"""

from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace

from steelyard.ir.collective import Collective, Exchange, Transport
from steelyard.ir.graph import Graph, Node, Output, OutputKind, Ref
from steelyard.ir.parallel_layout import DATA
from steelyard.passes.data_parallel.buckets import (
    BucketMember,
    Sized,
    buckets,
    handed_out,
    sent_as_they_are,
)
from steelyard.passes.graph_editor import GraphEditor, call, issue, wait

_LOOKED_UP_BACK = "aten.embedding_dense_backward.default"


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """A parameter of whose rows each rank looks some up; ``why_whole`` says why its gradient goes
    as a whole nevertheless, and is empty where it need not."""

    target: str
    num_rows: int
    looked_up: int
    row_bytes: int
    why_whole: str


def tables(graph: Graph) -> list[Table]:
    """Of each gradient that ranks sum up and that is made of rows, alone or among others."""
    return [
        _table(graph, member.target, made, reason)
        for bucket in buckets(graph)
        for member in bucket.members
        for made, reason in _from_rows(graph, _made(graph, member))
    ]


def _from_rows(graph: Graph, made: Node) -> Iterator[tuple[Node, str]]:
    """The call that makes a gradient of rows, and why those are not all."""
    if made.op == _LOOKED_UP_BACK:
        yield made, _why_whole(graph, made)
        return
    among = (graph.by_name[name] for name in made.inputs)
    for node in [node for node in among if node.op == _LOOKED_UP_BACK][:1]:
        yield node, "the table is read in other ways too, or more than once"


def _table(graph: Graph, target: str, made: Node, reason: str) -> Table:
    (whole,), places = made.outputs, graph.by_name[made.inputs[1]].outputs[0]
    place_bytes = places.nbytes // max(1, places.numel)
    return Table(
        target=target,
        num_rows=whole.shape[0],
        looked_up=places.numel,
        row_bytes=whole.nbytes // whole.shape[0] + place_bytes,
        why_whole=reason,
    )


def _why_whole(graph: Graph, made: Node) -> str:
    given = [graph.by_name[name].outputs[0] for name in made.inputs]
    if not all(tensor.is_contiguous for tensor in given):
        return "what its rows are made of has gaps"
    return ""


def _made(graph: Graph, member: BucketMember) -> Node:
    """Of one micro-batch, where several are added up before they go."""
    return _underneath(graph, graph.by_name[_gradient(graph, member).node])


def _gradient(graph: Graph, member: BucketMember) -> Output:
    output = graph.outputs[member.place]
    if output.kind is not OutputKind.SUMMED:
        return replace(output, node=member.flat.name)
    return next(
        o for o in graph.outputs if o.kind is OutputKind.GRADIENT and o.target == output.target
    )


def _is_same(output: Output, other: Output) -> bool:
    return (output.kind, output.target) == (other.kind, other.target)


def _underneath(graph: Graph, node: Node) -> Node:
    while node.is_view and node.inputs:
        node = graph.by_name[node.inputs[0]]
    return node


def in_rows(
    graph: Graph,
    targets: Collection[str],
    *,
    num_ranks: int,
    transport: Transport,
    axis: str = DATA,
    stride: int = 1,
) -> Graph:
    """The gradients of these parameters sent as rows."""
    change = GraphEditor(graph)

    def collective(kind: Exchange, nbytes: int) -> Collective:
        return transport.collective(
            kind, axis=axis, num_ranks=num_ranks, nbytes=nbytes, stride=stride
        )

    outputs = list(graph.outputs)
    dropped: set[str] = set()
    added_up: set[int] = set()
    for number, bucket in enumerate(buckets(graph, axis)):
        own = [member for member in bucket.members if member.target in targets]
        if not own:
            continue
        dropped |= bucket.nodes
        rest = [member for member in bucket.members if member.target not in targets]
        if rest:
            behind = bucket.waited.name
            whole = sent_as_they_are(
                change, rest, name=f"rest_of_bucket_{number}", behind=behind, transport=transport,
                collective=collective,
            )  # fmt: skip
            handed_out(change, outputs, rest, whole, behind=behind)
        for member in own:
            made = _made(graph, member)
            summed = _of_all(change, made, member, num_ranks, transport, collective)
            given = _gradient(graph, member)
            place = next(p for p, o in enumerate(graph.outputs) if _is_same(o, given))
            outputs[place] = replace(given, node=summed.name)
            if place != member.place:
                # What several micro-batches add up is of all ranks already.
                added_up.add(member.place)
            dropped |= {made.name, *_looks_at(graph, made), *_looks_at(graph, member.flat)}
    left = [output for place, output in enumerate(outputs) if place not in added_up]
    return change.result(left, without=dropped)


def _of_all(
    change: GraphEditor,
    made: Node,
    member: BucketMember,
    num_ranks: int,
    transport: Transport,
    collective: Sized,
) -> Node:
    """The gradient of all ranks' rows, behind the call that makes that of one rank's."""
    gathered = []
    for name, what in zip(made.inputs, ("rows", "places"), strict=True):
        value = change[name]
        (tensor,) = value.outputs
        shape = (tensor.shape[0] * num_ranks, *tensor.shape[1:])
        issued = issue(
            collective(Exchange.ALL_GATHER, tensor.nbytes * num_ranks), value,
            name=f"{member.target.partition(':')[2]}.{what}_sent",
            output=change.tensor(shape, tensor.dtype), moved_bytes=0,
        )  # fmt: skip
        issued = change.put_behind(made.name, replace(issued, nth=-1))
        waited = wait(issued, transport)
        gathered.append(change.put_behind(made.name, replace(waited, nth=-1)))
    rows, places = gathered
    (tensor,) = made.outputs
    summed = call(
        made.op, made, name=f"{member.target.partition(':')[2]}.of_all",
        args=(Ref(rows.name), Ref(places.name), *made.args[2:]), inputs=gathered,
        output=change.tensor(tensor.shape, tensor.dtype),
        moved_bytes=made.moved_bytes,
    )  # fmt: skip
    return change.put_behind(made.name, replace(summed, nth=-1))


def _looks_at(graph: Graph, node: Node) -> Iterator[str]:
    """What else lies on the memory of this: views of the gradient, or of what is added up to."""
    (storage,) = graph.storages_of(node.name)
    return (n.name for n in graph.nodes if storage in graph.storages_of(n.name))


__all__ = ["Table", "in_rows", "tables"]
