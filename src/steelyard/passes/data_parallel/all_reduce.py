"""All-reduces gradients in buckets over data-parallel ranks.

This is what DistributedDataParallel does (Li et al., VLDB 2020), but as nodes of the graph. Not for
overlapping the waits: see overlap.py.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

from steelyard.errors import BadInput
from steelyard.ir.collective import Collective, Exchange, Transport
from steelyard.ir.graph import Graph, Node, Output, OutputKind, Ref, Role, Storage, Tensor
from steelyard.ir.parallel_layout import DATA
from steelyard.ir.program import LOSS_SO_FAR, SO_FAR
from steelyard.passes.graph_editor import GraphEditor, call, issue, issue_in_place, view, wait

# The name of the input that is the weight of a rank's loss within the loss of all ranks.
SHARE = "share"


def with_whole_loss(
    graph: Graph,
    *,
    num_ranks: int,
    transport: Transport,
    axis: str = DATA,
    stride: int = 1,
    repeats: int = 1,
) -> Graph:
    """Replace the loss of a rank by the weighted sum over all ranks.

    The weight is an input of the step, because it may depend on the batch. With several
    micro-batches, the last one returns the total loss.
    """
    editor = GraphEditor(graph)
    (loss,) = (graph.by_name[o.node] for o in graph.outputs if o.kind is OutputKind.LOSS)
    given = replace(loss.outputs[0], storage=len(editor.storages), offset=0)
    editor.storages.append(Storage(nbytes=given.nbytes, role=Role.TANGENT))
    share = editor.put_before(graph.nodes[0].name, Node(name=SHARE, op="input", outputs=(given,)))
    weighed = call(
        "aten.mul.Tensor", loss, name=f"{loss.name}_weighed", args=(Ref(loss.name), Ref(SHARE)),
        inputs=(loss, share), output=editor.tensor(given.shape, given.dtype),
        moved_bytes=3 * given.nbytes,
    )  # fmt: skip
    own = [weighed]
    if repeats > 1:
        so_far = editor.put_before(graph.nodes[0].name, _sum_input(editor, LOSS_SO_FAR, loss))
        own.append(
            call(
                "aten.add.Tensor", loss, name=f"{loss.name}_so_far",
                args=(Ref(weighed.name), Ref(so_far.name)), inputs=(weighed, so_far),
                output=editor.tensor(given.shape, given.dtype), moved_bytes=3 * given.nbytes,
            )
        )  # fmt: skip
    collective = transport.collective(
        Exchange.ALL_REDUCE, axis=axis, num_ranks=num_ranks, nbytes=given.nbytes, stride=stride
    )
    sent = issue(
        collective, own[-1], name=f"{loss.name}_reduced",
        output=editor.tensor(given.shape, given.dtype), moved_bytes=2 * given.nbytes,
    )  # fmt: skip
    arrived = wait(sent, transport)
    for node in (*own, sent, arrived):
        # These calls are not part of the user's model, so they get no number (nth) that a rule
        # could name.
        editor.put_after(loss.name, replace(node, nth=-1))
    outputs = (
        replace(o, node=arrived.name) if o.kind is OutputKind.LOSS else o for o in graph.outputs
    )
    return editor.result(tuple(outputs))


def bucketed_all_reduce(
    graph: Graph,
    *,
    bucket_bytes: int,
    num_ranks: int,
    transport: Transport,
    axis: str = DATA,
    stride: int = 1,
    repeats: int = 1,
) -> Graph:
    """All-reduce every gradient over the ranks, in the order in which the backward pass makes them.

    A bucket is issued right after its last gradient and waited for immediately. Gradients that
    already result from a collective over this axis are skipped. With ``repeats`` micro-batches, the
    last one sends the sums over all of them, each bucket after the last addition to it.
    """
    editor = GraphEditor(graph)

    def collective(nbytes: int) -> Collective:
        return transport.collective(
            Exchange.ALL_REDUCE, axis=axis, num_ranks=num_ranks, nbytes=nbytes, stride=stride
        )

    outputs = list(graph.outputs)
    for number, bucket in enumerate(_buckets(graph, bucket_bytes, axis)):
        made = [graph.by_name[outputs[place].node] for place in bucket]
        sent, after = made, made[-1].name
        if repeats > 1:
            targets = [f"{SO_FAR}{outputs[place].target}" for place in bucket]
            sent = [_sum_input(editor, name, of) for name, of in zip(targets, made, strict=True)]
            for node in sent:
                editor.put_before(graph.nodes[0].name, node)
            after = _last_reader(graph, made)
        whole = _reduced(editor, sent, after, number, transport, collective)
        start = 0
        for place, gradient in zip(bucket, sent, strict=True):
            tensor, arrived = gradient.outputs[0], whole
            (summed,) = whole.outputs
            if len(bucket) > 1 or tensor.shape != summed.shape or not tensor.is_contiguous:
                begins = summed.offset + start
                part = replace(tensor, storage=summed.storage, offset=begins)
                arrived = view(whole, part, name=f"{gradient.name}_reduced")
                editor.put_after(after, arrived)
            start += tensor.numel
            output = outputs[place]
            if repeats > 1:
                outputs.append(replace(output, kind=OutputKind.SUMMED, node=arrived.name))
            else:
                outputs[place] = replace(output, node=arrived.name)
    return editor.result(outputs)


def _sum_input(editor: GraphEditor, name: str, like: Node) -> Node:
    """Make an input for the sum over the earlier micro-batches."""
    (tensor,) = like.outputs
    total = replace(tensor, storage=len(editor.storages))
    editor.storages.append(Storage(nbytes=tensor.nbytes, role=Role.GRADIENT))
    return Node(
        name=name, op="input", outputs=(total,), phase=like.phase, path=like.path, line=like.line
    )


def _last_reader(graph: Graph, gradients: Sequence[Node]) -> str:
    """Return the last node among these gradients and their readers; after it, the sums are
    complete.
    """
    names = {name for g in gradients for name in (g.name, *graph.users[g.name])}
    return max(names, key=graph.position.__getitem__)


def why_not_reduced(graph: Graph) -> str | None:
    """Return the reason why some gradient cannot be all-reduced; None if all can."""
    for output in graph.outputs:
        if output.kind is OutputKind.GRADIENT:
            try:
                _dense(graph, output)
            except BadInput as refusal:
                return refusal.happened
    return None


def _buckets(graph: Graph, bucket_bytes: int, axis: str) -> list[list[int]]:
    """Return buckets as indices into ``graph.outputs``; a single gradient may be larger than a
    bucket.
    """
    places = [
        place
        for place, output in enumerate(graph.outputs)
        if output.kind is OutputKind.GRADIENT and axis != _collective_axis(graph, output.node)
    ]
    places.sort(key=lambda place: graph.position[graph.outputs[place].node])
    buckets: list[list[int]] = []
    filled, dtype = 0, ""
    for place in places:
        tensor = _dense(graph, graph.outputs[place])
        if not buckets or filled + tensor.nbytes > bucket_bytes or tensor.dtype != dtype:
            buckets.append([])
            filled, dtype = 0, tensor.dtype
        buckets[-1].append(place)
        filled += tensor.nbytes
    return buckets


def _collective_axis(graph: Graph, name: str) -> str:
    """Return the axis of the collective whose result, or a view of it, this is; otherwise empty."""
    node = graph.by_name[name]
    while node.is_view:
        node = graph.by_name[node.inputs[0]]
    sent = graph.by_name.get(node.waits_for)
    return sent.collective.axis if sent is not None and sent.collective is not None else ""


def _reduced(
    editor: GraphEditor,
    gradients: Sequence[Node],
    after: str,
    number: int,
    transport: Transport,
    collective: Callable[[int], Collective],
) -> Node:
    """Issue one bucket ``after`` this node and wait for it; return the node that waits."""
    given = gradients[-1]
    # A sum over micro-batches is the parameter's own gradient tensor, to which others refer. The
    # flat view of it is also a line that is never moved before the last addition.
    if len(gradients) > 1 or given.is_input or not given.outputs[0].is_contiguous:
        flat = [
            editor.put_after(after, view(g, _flattened(g.outputs[0]), name=f"{g.name}_flat"))
            for g in gradients
        ]
        given = flat[0]
        if len(flat) > 1:
            given = editor.put_after(after, _joined(editor, flat, number))
    tensor, name = given.outputs[0], f"bucket_{number}_reduced"
    if len(gradients) > 1 or gradients[0].is_input or editor.has_own_storage(gradients[0].name):
        # Nothing else reads the bucket, so it is reduced in place, without the time and memory of a
        # copy.
        issued = issue_in_place(collective(tensor.nbytes), given, name=name)
    else:
        issued = issue(
            collective(tensor.nbytes), given, name=name,
            output=editor.tensor(tensor.shape, tensor.dtype), moved_bytes=2 * tensor.nbytes,
        )  # fmt: skip
    editor.put_after(after, issued)
    return editor.put_after(after, wait(issued, transport))


def _joined(editor: GraphEditor, flat: Sequence[Node], number: int) -> Node:
    tensors = [node.outputs[0] for node in flat]
    output = editor.tensor((sum(t.numel for t in tensors),), tensors[0].dtype)
    return call(
        "aten.cat.default", flat[-1], name=f"bucket_{number}",
        args=(tuple(Ref(node.name) for node in flat),), inputs=flat, output=output,
        moved_bytes=2 * output.nbytes,
    )  # fmt: skip


def _flattened(tensor: Tensor) -> Tensor:
    return replace(tensor, shape=(tensor.numel,), stride=(1,))


def _dense(graph: Graph, output: Output) -> Tensor:
    """Return the gradient's tensor; raise BadInput if it has gaps in every order of dims."""
    tensor = graph.by_name[output.node].outputs[0]
    by_stride = sorted(zip(tensor.stride, tensor.shape, strict=True))
    ordered = replace(
        tensor,
        shape=tuple(size for _, size in reversed(by_stride)),
        stride=tuple(stride for stride, _ in reversed(by_stride)),
    )
    if not ordered.is_contiguous:
        raise BadInput(
            f"{output.target.replace(':', ' ', 1)} has gaps between its elements: shape "
            f"{list(tensor.shape)}, strides {list(tensor.stride)}",
            expected="parameters without gaps in memory, so that ranks can exchange it",
            remedy="make it a separate parameter with .clone()",
        )
    return tensor
