"""Sparse embedding gradients: send the rows that were looked up instead of the whole table.

Ranks all-gather the row gradients and their indices, and every rank computes the total gradient.
The result is exact except for the order of sums. The gradient is removed from its all-reduce
bucket. Not for other gradients: see passes/compression/compressed_all_reduce.py.
"""

from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace

from steelyard.ir.collective import Collective, Exchange, Transport
from steelyard.ir.graph import Graph, Node, Output, OutputKind, Ref
from steelyard.ir.parallel_layout import DATA
from steelyard.passes.data_parallel.buckets import (
    BucketMember,
    Sized,
    all_reduce_joined,
    assign_views,
    buckets,
)
from steelyard.passes.graph_editor import GraphEditor, call, issue, wait

_EMBEDDING_BACKWARD = "aten.embedding_dense_backward.default"


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """An embedding table whose rows are looked up on each rank.

    ``why_whole`` is the reason why its gradient must be sent as a whole; empty if it need not.
    """

    target: str
    num_rows: int
    looked_up: int
    row_bytes: int
    why_whole: str


def tables(graph: Graph) -> list[Table]:
    """Return the tables whose summed gradient comes, at least in part, from rows that were looked
    up.
    """
    return [
        _table(graph, member.target, made, reason)
        for bucket in buckets(graph)
        for member in bucket.members
        for made, reason in _from_rows(graph, _gradient_maker(graph, member))
    ]


def _from_rows(graph: Graph, made: Node) -> Iterator[tuple[Node, str]]:
    """Yield the embedding backward that makes a gradient, and the reason if it cannot be sent as
    rows.
    """
    if made.op == _EMBEDDING_BACKWARD:
        yield made, _why_whole(graph, made)
        return
    terms = (graph.by_name[name] for name in made.inputs)
    for node in [node for node in terms if node.op == _EMBEDDING_BACKWARD][:1]:
        yield node, "the table is also read by other operators, or more than once"


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
        return "the tensors of its rows are not contiguous"
    return ""


def _gradient_maker(graph: Graph, member: BucketMember) -> Node:
    """Return the node that makes the gradient (of one micro-batch, if several are summed)."""
    return _view_base(graph, graph.by_name[_gradient(graph, member).node])


def _gradient(graph: Graph, member: BucketMember) -> Output:
    output = graph.outputs[member.place]
    if output.kind is not OutputKind.SUMMED:
        return replace(output, node=member.flat.name)
    return next(
        o for o in graph.outputs if o.kind is OutputKind.GRADIENT and o.target == output.target
    )


def _is_same(output: Output, other: Output) -> bool:
    return (output.kind, output.target) == (other.kind, other.target)


def _view_base(graph: Graph, node: Node) -> Node:
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
    """Return the graph with the gradients of these parameters sent as rows."""
    editor = GraphEditor(graph)

    def collective(kind: Exchange, nbytes: int) -> Collective:
        return transport.collective(
            kind, axis=axis, num_ranks=num_ranks, nbytes=nbytes, stride=stride
        )

    outputs = list(graph.outputs)
    dropped: set[str] = set()
    obsolete: set[int] = set()
    for number, bucket in enumerate(buckets(graph, axis)):
        own = [member for member in bucket.members if member.target in targets]
        if not own:
            continue
        dropped |= bucket.nodes
        rest = [member for member in bucket.members if member.target not in targets]
        if rest:
            after = bucket.waited.name
            whole = all_reduce_joined(
                editor, rest, name=f"rest_of_bucket_{number}", after=after, transport=transport,
                collective=collective,
            )  # fmt: skip
            assign_views(editor, outputs, rest, whole, after=after)
        for member in own:
            made = _gradient_maker(graph, member)
            summed = _gathered_gradient(editor, made, member, num_ranks, transport, collective)
            given = _gradient(graph, member)
            place = next(p for p, o in enumerate(graph.outputs) if _is_same(o, given))
            outputs[place] = replace(given, node=summed.name)
            if place != member.place:
                # Each micro-batch's gradient already covers all ranks, and so does their sum.
                obsolete.add(member.place)
            dropped |= {made.name, *_aliases(graph, made), *_aliases(graph, member.flat)}
    remaining = [output for place, output in enumerate(outputs) if place not in obsolete]
    return editor.result(remaining, without=dropped)


def _gathered_gradient(
    editor: GraphEditor,
    made: Node,
    member: BucketMember,
    num_ranks: int,
    transport: Transport,
    collective: Sized,
) -> Node:
    """Insert, after one rank's embedding backward, the embedding backward for the rows of all
    ranks.
    """
    gathered = []
    for name, kind in zip(made.inputs, ("rows", "places"), strict=True):
        value = editor[name]
        (tensor,) = value.outputs
        shape = (tensor.shape[0] * num_ranks, *tensor.shape[1:])
        issued = issue(
            collective(Exchange.ALL_GATHER, tensor.nbytes * num_ranks), value,
            name=f"{member.target.partition(':')[2]}.{kind}_sent",
            output=editor.tensor(shape, tensor.dtype), moved_bytes=0,
        )  # fmt: skip
        issued = editor.put_after(made.name, replace(issued, nth=-1))
        waited = wait(issued, transport)
        gathered.append(editor.put_after(made.name, replace(waited, nth=-1)))
    rows, places = gathered
    (tensor,) = made.outputs
    summed = call(
        made.op, made, name=f"{member.target.partition(':')[2]}.of_all",
        args=(Ref(rows.name), Ref(places.name), *made.args[2:]), inputs=gathered,
        output=editor.tensor(tensor.shape, tensor.dtype),
        moved_bytes=made.moved_bytes,
    )  # fmt: skip
    return editor.put_after(made.name, replace(summed, nth=-1))


def _aliases(graph: Graph, node: Node) -> Iterator[str]:
    """Yield all nodes on the storage of this one, such as views of the gradient or of its sum."""
    (storage,) = graph.storages_of(node.name)
    return (n.name for n in graph.nodes if storage in graph.storages_of(n.name))


__all__ = ["Table", "in_rows", "tables"]
