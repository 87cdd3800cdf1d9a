"""Finds the gradient buckets that are already all-reduced in a graph, and replaces their members.

Passes that send gradients in another way use it (passes/compression/compressed_all_reduce.py,
sparse_embedding_grads.py). Not for filling buckets: see all_reduce.py.
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
    """One gradient of a bucket.

    ``place`` is its index in the graph's outputs, ``flat`` is the flat value that is sent, and
    ``tensor`` has the shape and strides of the gradient.
    """

    place: int
    target: str
    flat: Node
    tensor: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    """An all-reduced bucket; ``nodes`` are those that serve only its all-reduce."""

    waited: Node
    members: tuple[BucketMember, ...]
    nodes: frozenset[str]


def buckets(graph: Graph, axis: str = DATA) -> list[Bucket]:
    """Return the buckets of gradients that are all-reduced over this axis, in graph order."""
    waits = {node.waits_for: node for node in graph.nodes if node.waits_for}
    outputs_on: dict[int, list[int]] = {}
    for place, output in enumerate(graph.outputs):
        if output.kind in (OutputKind.GRADIENT, OutputKind.SUMMED):
            (storage,) = graph.storages_of(output.node)
            outputs_on.setdefault(storage, []).append(place)
    found = []
    for node in graph.nodes:
        sent = node.collective
        if sent is None or sent.kind is not Exchange.ALL_REDUCE or sent.axis != axis:
            continue
        waited = waits[node.name]
        if places := outputs_on.get(waited.outputs[0].storage):
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
            tensor=results[place].outputs[0],
        )
        for place, flat in zip(in_order, flats, strict=True)
    )
    own = {issued.name, waited.name, *(node.name for node in results.values())}
    return Bucket(
        waited=waited,
        members=members,
        nodes=frozenset(own | ({given.name} if joined else set())),
    )


def assign_views(
    editor: GraphEditor,
    outputs: list[Output],
    members: Sequence[BucketMember],
    whole: Node,
    *,
    after: str,
) -> None:
    """Make each member's gradient a view of the flat sum, and change the output to it."""
    (summed,) = whole.outputs
    start = summed.offset
    for member in members:
        part = replace(member.tensor, storage=summed.storage, offset=start)
        own = view(whole, part, name=editor.fresh(f"{member.flat.name}_of_all"))
        editor.put_after(after, own)
        outputs[member.place] = replace(outputs[member.place], node=own.name)
        start += part.numel


def all_reduce_joined(
    editor: GraphEditor,
    members: Sequence[BucketMember],
    *,
    name: str,
    after: str,
    transport: Transport,
    collective: Sized,
) -> Node:
    """Concatenate and all-reduce the members uncompressed; return the flat sum over the ranks."""
    name = editor.fresh(name)
    flats = [_flattened(editor, member.flat, after) for member in members]
    dtype = flats[0].outputs[0].dtype
    output = editor.tensor((sum(f.outputs[0].numel for f in flats),), dtype)
    joined = call(
        "aten.cat.default", flats[-1], name=name,
        args=(tuple(Ref(flat.name) for flat in flats),), inputs=flats, output=output,
        moved_bytes=2 * output.nbytes,
    )  # fmt: skip
    editor.put_after(after, joined)
    sent = collective(Exchange.ALL_REDUCE, output.nbytes)
    issued = editor.put_after(after, issue_in_place(sent, joined, name=f"{name}_reduced"))
    return editor.put_after(after, wait(issued, transport))


def _flattened(editor: GraphEditor, given: Node, after: str) -> Node:
    tensor = given.outputs[0]
    if len(tensor.shape) == 1:
        return given
    flat = replace(tensor, shape=(tensor.numel,), stride=(1,))
    return editor.put_after(after, view(given, flat, name=editor.fresh(f"{given.name}_as_flat")))


__all__ = ["Bucket", "BucketMember", "Sized", "all_reduce_joined", "assign_views", "buckets"]
