"""Average gradients over ranks that each worked on a share of the batch: buckets of all-reduces.

As DistributedDataParallel does (Li et al., VLDB 2020), but as nodes of the graph. Not for when the
results are waited for: see overlap.py.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

from steelyard.errors import BadInput
from steelyard.ir.collective import Collective, Exchange, Transport
from steelyard.ir.graph import Graph, Node, Output, OutputKind, Ref, Role, Storage, Tensor
from steelyard.ir.parallel_layout import DATA
from steelyard.ir.program import LOSS_SO_FAR, SO_FAR
from steelyard.passes.graph_editor import GraphEditor, call, issue, issue_in_place, view, wait

# The input that says what a rank's loss weighs in the loss of all.
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
    """The loss of all ranks' samples, in place of this rank's own: what each weighs is an input of
    the step, for it may depend on the batch. Of several micro-batches the last one's is that of
    all."""
    change = GraphEditor(graph)
    (loss,) = (graph.by_name[o.node] for o in graph.outputs if o.kind is OutputKind.LOSS)
    given = replace(loss.outputs[0], storage=len(change.storages), offset=0)
    change.storages.append(Storage(nbytes=given.nbytes, role=Role.TANGENT))
    share = change.put_before(graph.nodes[0].name, Node(name=SHARE, op="input", outputs=(given,)))
    weighed = call(
        "aten.mul.Tensor", loss, name=f"{loss.name}_weighed", args=(Ref(loss.name), Ref(SHARE)),
        inputs=(loss, share), output=change.tensor(given.shape, given.dtype),
        moved_bytes=3 * given.nbytes,
    )  # fmt: skip
    own = [weighed]
    if repeats > 1:
        so_far = change.put_before(graph.nodes[0].name, _so_far(change, LOSS_SO_FAR, loss))
        own.append(
            call(
                "aten.add.Tensor", loss, name=f"{loss.name}_so_far",
                args=(Ref(weighed.name), Ref(so_far.name)), inputs=(weighed, so_far),
                output=change.tensor(given.shape, given.dtype), moved_bytes=3 * given.nbytes,
            )
        )  # fmt: skip
    collective = transport.collective(
        Exchange.ALL_REDUCE, axis=axis, num_ranks=num_ranks, nbytes=given.nbytes, stride=stride
    )
    sent = issue(
        collective, own[-1], name=f"{loss.name}_reduced",
        output=change.tensor(given.shape, given.dtype), moved_bytes=2 * given.nbytes,
    )  # fmt: skip
    arrived = wait(sent, transport)
    for node in (*own, sent, arrived):
        # No call of the user's: rules that name his by their number are for his.
        change.put_behind(loss.name, replace(node, nth=-1))
    outputs = (
        replace(o, node=arrived.name) if o.kind is OutputKind.LOSS else o for o in graph.outputs
    )
    return change.result(tuple(outputs))


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
    """Every gradient summed over the ranks, in the order in which the backward pass makes them.

    A bucket is sent right behind its last gradient and waited for at once; gradients that come
    out of an exchange over this axis already are left alone. With ``repeats`` the last of so many
    micro-batches sends what all have added up, each gradient behind its own part.
    """
    change = GraphEditor(graph)

    def collective(nbytes: int) -> Collective:
        return transport.collective(
            Exchange.ALL_REDUCE, axis=axis, num_ranks=num_ranks, nbytes=nbytes, stride=stride
        )

    outputs = list(graph.outputs)
    for number, bucket in enumerate(_buckets(graph, bucket_bytes, axis)):
        made = [graph.by_name[outputs[place].node] for place in bucket]
        given, behind = made, made[-1].name
        if repeats > 1:
            targets = [f"{SO_FAR}{outputs[place].target}" for place in bucket]
            given = [_so_far(change, name, of) for name, of in zip(targets, made, strict=True)]
            for node in given:
                change.put_before(graph.nodes[0].name, node)
            behind = _last_reader(graph, made)
        whole = _reduced(change, given, behind, number, transport, collective)
        start = 0
        for place, gradient in zip(bucket, given, strict=True):
            laid_out, arrived = gradient.outputs[0], whole
            (summed,) = whole.outputs
            if len(bucket) > 1 or laid_out.shape != summed.shape or not laid_out.is_contiguous:
                begins = summed.offset + start
                part = replace(laid_out, storage=summed.storage, offset=begins)
                arrived = view(whole, part, name=f"{gradient.name}_reduced")
                change.put_behind(behind, arrived)
            start += laid_out.numel
            output = outputs[place]
            if repeats > 1:
                outputs.append(replace(output, kind=OutputKind.SUMMED, node=arrived.name))
            else:
                outputs[place] = replace(output, node=arrived.name)
    return change.result(outputs)


def _so_far(change: GraphEditor, name: str, like: Node) -> Node:
    """What micro-batches before this one have added up to."""
    (tensor,) = like.outputs
    lying = replace(tensor, storage=len(change.storages))
    change.storages.append(Storage(nbytes=tensor.nbytes, role=Role.GRADIENT))
    return Node(
        name=name, op="input", outputs=(lying,), phase=like.phase, path=like.path, line=like.line
    )


def _last_reader(graph: Graph, gradients: Sequence[Node]) -> str:
    """The last of these and of what reads them: they leave, to be added, behind that."""
    names = {name for g in gradients for name in (g.name, *graph.users[g.name])}
    return max(names, key=graph.position.__getitem__)


def why_not_reduced(graph: Graph) -> str | None:
    """Why some gradient cannot be exchanged; None where all can."""
    for output in graph.outputs:
        if output.kind is OutputKind.GRADIENT:
            try:
                _dense(graph, output)
            except BadInput as refusal:
                return refusal.happened
    return None


def _buckets(graph: Graph, bucket_bytes: int, axis: str) -> list[list[int]]:
    """Places in ``graph.outputs``; one gradient may be larger than a bucket."""
    places = [
        place
        for place, output in enumerate(graph.outputs)
        if output.kind is OutputKind.GRADIENT and axis != _arrived_over(graph, output.node)
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


def _arrived_over(graph: Graph, name: str) -> str:
    """The axis of the exchange whose result this is, or a view of it."""
    node = graph.by_name[name]
    while node.is_view:
        node = graph.by_name[node.inputs[0]]
    sent = graph.by_name.get(node.waits_for)
    return sent.collective.axis if sent is not None and sent.collective is not None else ""


def _reduced(
    change: GraphEditor,
    gradients: Sequence[Node],
    behind: str,
    number: int,
    transport: Transport,
    collective: Callable[[int], Collective],
) -> Node:
    """Issue one bucket ``behind`` this node, and wait; the value that is waited for."""
    given = gradients[-1]
    # What was added up is the parameter's own tensor, which others hold; this is a look at it, and
    # a line that nothing moves in front of the last addition.
    if len(gradients) > 1 or given.is_input or not given.outputs[0].is_contiguous:
        flat = [
            change.put_behind(behind, view(g, _flattened(g.outputs[0]), name=f"{g.name}_flat"))
            for g in gradients
        ]
        given = flat[0]
        if len(flat) > 1:
            given = change.put_behind(behind, _joined(change, flat, number))
    tensor, name = given.outputs[0], f"bucket_{number}_reduced"
    if len(gradients) > 1 or gradients[0].is_input or change.is_alone(gradients[0].name):
        # Nothing else reads it: another copy would cost time and room.
        issued = issue_in_place(collective(tensor.nbytes), given, name=name)
    else:
        issued = issue(
            collective(tensor.nbytes), given, name=name,
            output=change.tensor(tensor.shape, tensor.dtype), moved_bytes=2 * tensor.nbytes,
        )  # fmt: skip
    change.put_behind(behind, issued)
    return change.put_behind(behind, wait(issued, transport))


def _joined(change: GraphEditor, flat: Sequence[Node], number: int) -> Node:
    tensors = [node.outputs[0] for node in flat]
    output = change.tensor((sum(t.numel for t in tensors),), tensors[0].dtype)
    return call(
        "aten.cat.default", flat[-1], name=f"bucket_{number}",
        args=(tuple(Ref(node.name) for node in flat),), inputs=flat, output=output,
        moved_bytes=2 * output.nbytes,
    )  # fmt: skip


def _flattened(tensor: Tensor) -> Tensor:
    return replace(tensor, shape=(tensor.numel,), stride=(1,))


def _dense(graph: Graph, output: Output) -> Tensor:
    """The gradient's tensor, which fills its stretch of memory in whatever order."""
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
            expected="parameters that fill the memory they lie on, so that ranks can exchange it",
            remedy="make it a parameter of its own with .clone()",
        )
    return tensor
