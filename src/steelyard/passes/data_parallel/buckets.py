"""The buckets in which ranks sum gradients up already: what is in them, and what takes the place of
some of it.

For what sends gradients in another way than all-reducing them
(passes/compression/compressed_all_reduce.py, sparse_embedding_grads.py). Not for filling buckets:
see all_reduce.py.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from steelyard.ir.collective import Collective, Exchange, Transport
from steelyard.ir.graph import Graph, Node, Output, OutputKind, Ref, Tensor
from steelyard.ir.parallel_layout import DATA
from steelyard.passes.graph_editor import GraphEditor, call, issue_in_place, view, wait

Sized = Callable[[Exchange, int], Collective]


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketMember:
    """One gradient of a bucket: its place among the graph's outputs, and what is sent of it."""

    place: int
    target: str
    flat: Node
    laid_out: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    """``nodes`` are those that only its exchange needs."""

    waited: Node
    members: tuple[BucketMember, ...]
    nodes: frozenset[str]


def buckets(graph: Graph, axis: str = DATA) -> list[Bucket]:
    """The all-reduces of gradients over this axis, in their order."""
    waits = {node.waits_for: node for node in graph.nodes if node.waits_for}
    leaving: dict[int, list[int]] = {}
    for place, output in enumerate(graph.outputs):
        if output.kind in (OutputKind.GRADIENT, OutputKind.SUMMED):
            (storage,) = graph.storages_of(output.node)
            leaving.setdefault(storage, []).append(place)
    found = []
    for node in graph.nodes:
        sent = node.collective
        if sent is None or sent.kind is not Exchange.ALL_REDUCE or sent.axis != axis:
            continue
        waited = waits[node.name]
        if places := leaving.get(waited.outputs[0].storage):
            found.append(_bucket(graph, node, waited, places))
    return found


def _bucket(graph: Graph, issued: Node, waited: Node, places: Sequence[int]) -> Bucket:
    given = graph.by_name[issued.inputs[0]]
    joined = given.op == "aten.cat.default"
    flats = [graph.by_name[name] for name in given.inputs] if joined else [given]
    results = {place: graph.by_name[graph.outputs[place].node] for place in places}
    in_order = sorted(places, key=lambda place: results[place].outputs[0].offset)
    members = tuple(
        BucketMember(
            place=place,
            target=graph.outputs[place].target,
            flat=flat,
            laid_out=results[place].outputs[0],
        )
        for place, flat in zip(in_order, flats, strict=True)
    )
    own = {issued.name, waited.name, *(node.name for node in results.values())}
    return Bucket(
        waited=waited,
        members=members,
        nodes=frozenset(own | ({given.name} if joined else set())),
    )


def handed_out(
    change: GraphEditor,
    outputs: list[Output],
    members: Sequence[BucketMember],
    whole: Node,
    *,
    behind: str,
) -> None:
    """Each member's gradient as a view of the sum of all."""
    (summed,) = whole.outputs
    start = summed.offset
    for member in members:
        lies = replace(member.laid_out, storage=summed.storage, offset=start)
        own = view(whole, lies, name=change.fresh(f"{member.flat.name}_of_all"))
        change.put_behind(behind, own)
        outputs[member.place] = replace(outputs[member.place], node=own.name)
        start += lies.numel


def sent_as_they_are(
    change: GraphEditor,
    members: Sequence[BucketMember],
    *,
    name: str,
    behind: str,
    transport: Transport,
    collective: Sized,
) -> Node:
    """All of them as one, all-reduced; the sum over the ranks, flat."""
    name = change.fresh(name)
    flats = [_flattened(change, member.flat, behind) for member in members]
    dtype = flats[0].outputs[0].dtype
    output = change.tensor((sum(f.outputs[0].numel for f in flats),), dtype)
    joined = call(
        "aten.cat.default", flats[-1], name=name,
        args=(tuple(Ref(flat.name) for flat in flats),), inputs=flats, output=output,
        moved_bytes=2 * output.nbytes,
    )  # fmt: skip
    change.put_behind(behind, joined)
    sent = collective(Exchange.ALL_REDUCE, output.nbytes)
    issued = change.put_behind(behind, issue_in_place(sent, joined, name=f"{name}_reduced"))
    return change.put_behind(behind, wait(issued, transport))


def _flattened(change: GraphEditor, given: Node, behind: str) -> Node:
    tensor = given.outputs[0]
    if len(tensor.shape) == 1:
        return given
    flat = replace(tensor, shape=(tensor.numel,), stride=(1,))
    return change.put_behind(behind, view(given, flat, name=change.fresh(f"{given.name}_as_flat")))


__all__ = ["Bucket", "BucketMember", "Sized", "buckets", "handed_out", "sent_as_they_are"]
