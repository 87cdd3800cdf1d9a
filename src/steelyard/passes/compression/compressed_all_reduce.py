"""Compressed all-reduce of gradients: encode, exchange, sum and decode, all as graph nodes.

It replaces the all-reduces that passes/data_parallel/all_reduce.py put into the graph. The codes of
linear codecs are all-reduced directly. So are the two factors of a low-rank matrix, one after the
other. For the other codecs, two ranks all-gather their codes. More ranks use an all-to-all: each
rank sums one part, encodes the sum and all-gathers it, so the bytes sent per rank do not grow with
the number of ranks. Not for the codecs: see ir/gradient_codec.py.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from steelyard.ir.collective import Collective, Exchange, Transport
from steelyard.ir.gradient_codec import (
    BLOCK,
    DECODE,
    DECODE_SUM,
    ENCODE,
    ENCODE_SUM,
    LEFT,
    MATRICES_OF_FACTORS,
    RESIDUAL,
    RIGHT,
    START,
    Codec,
    blocks_of,
    matrix_of,
)
from steelyard.ir.graph import Argument, Graph, Node, Ref, Role, Storage
from steelyard.ir.parallel_layout import DATA
from steelyard.passes.data_parallel.buckets import (
    BucketMember,
    Sized,
    all_reduce_joined,
    assign_views,
    buckets,
)
from steelyard.passes.graph_editor import GraphEditor, call, issue, issue_in_place, wait


def compressed(
    graph: Graph,
    codecs: Mapping[str, Codec],
    *,
    num_ranks: int,
    transport: Transport,
    axis: str = DATA,
    stride: int = 1,
) -> Graph:
    """Return the graph with the gradients of these parameters sent by their codecs.

    The other gradients of the same buckets stay uncompressed; they are all-reduced together in one
    bucket at the end.
    """
    editor = GraphEditor(graph)

    def collective(kind: Exchange, nbytes: int) -> Collective:
        return transport.collective(
            kind, axis=axis, num_ranks=num_ranks, nbytes=nbytes, stride=stride
        )

    sending = _Sending(editor, transport, collective, num_ranks)
    outputs = list(graph.outputs)
    uncompressed: list[BucketMember] = []
    dropped: set[str] = set()
    last = ""
    for bucket in buckets(graph, axis):
        by_codec: dict[Codec, list[BucketMember]] = {}
        for member in bucket.members:
            if member.target in codecs:
                by_codec.setdefault(codecs[member.target], []).append(member)
        if not by_codec:
            continue
        dropped |= bucket.nodes
        uncompressed += [m for m in bucket.members if m.target not in codecs]
        for codec, members in by_codec.items():
            whole = sending.compress_gradients(members, codec, after=bucket.waited.name)
            assign_views(editor, outputs, members, whole, after=bucket.waited.name)
        last = bucket.waited.name
    if uncompressed:
        whole = all_reduce_joined(
            editor, uncompressed, name="rest_of_buckets", after=last, transport=transport,
            collective=collective,
        )  # fmt: skip
        assign_views(editor, outputs, uncompressed, whole, after=last)
    return editor.result(outputs, without=dropped)


class _Sending:
    """Inserts compressed all-reduces; each returns the flat sum over the ranks."""

    def __init__(
        self,
        editor: GraphEditor,
        transport: Transport,
        collective: Sized,
        num_ranks: int,
    ) -> None:
        self._editor, self._transport, self._collective = editor, transport, collective
        self._num_ranks = num_ranks

    def compress_gradients(
        self, members: Sequence[BucketMember], codec: Codec, *, after: str
    ) -> Node:
        flats = [member.flat for member in members]
        name = members[0].target.partition(":")[2]
        if codec.is_linear:
            return self._linear(flats, codec, name=name, after=after)
        if codec.rank:
            return self._low_rank(members, codec.rank, name=name, after=after)
        is_direct = self._num_ranks == 2
        parts = 1 if is_direct else self._num_ranks
        blocks = blocks_of(sum(f.outputs[0].numel for f in flats), parts=parts)
        residual = self._residual(f"{name}", blocks, codec, flats[-1])
        row = codec.row_bytes(blocks // parts)
        encoded = self._codec_call(
            ENCODE, flats, residual, (codec.name, parts), (parts, row), "uint8",
            name=f"{name}.coded", like=flats[-1], after=after,
        )  # fmt: skip
        if is_direct:
            gathered = self._exchanged(Exchange.ALL_GATHER, encoded, after=after)
            return self._codec_call(
                DECODE_SUM, [gathered], None, (codec.name,), (blocks * BLOCK,), "float32",
                name=f"{name}.decoded", like=gathered, after=after,
            )  # fmt: skip
        received = self._exchanged(Exchange.ALL_TO_ALL, encoded, after=after)
        own = self._residual(f"{name}:own", blocks // parts, codec, received)
        added = self._codec_call(
            ENCODE_SUM, [received], own, (codec.name,), (1, row), "uint8",
            name=f"{name}.added", like=received, after=after,
        )  # fmt: skip
        gathered = self._exchanged(Exchange.ALL_GATHER, added, after=after)
        return self._codec_call(
            DECODE, [gathered], None, (codec.name,), (blocks * BLOCK,), "float32",
            name=f"{name}.decoded", like=gathered, after=after,
        )  # fmt: skip

    def _linear(self, flats: Sequence[Node], codec: Codec, *, name: str, after: str) -> Node:
        shape = (sum(flat.outputs[0].numel for flat in flats),)
        encoded = self._codec_call(
            ENCODE, flats, None, (codec.name, 1), shape, codec.name,
            name=f"{name}.coded", like=flats[-1], after=after,
        )  # fmt: skip
        sent = self._collective(Exchange.ALL_REDUCE, encoded.outputs[0].nbytes)
        issued = issue_in_place(sent, encoded, name=f"{encoded.name}_sent")
        arrived = self._issued(issued, after=after)
        return self._codec_call(
            DECODE, [arrived], None, (codec.name,), shape, "float32",
            name=f"{name}.decoded", like=arrived, after=after,
        )  # fmt: skip

    def _low_rank(
        self, members: Sequence[BucketMember], rank: int, *, name: str, after: str
    ) -> Node:
        """Send low-rank factors: all-reduce the left ones, then the right ones, and multiply
        them.
        """
        flats = [member.flat for member in members]
        shapes = tuple(matrix_of(member.tensor) for member in members)
        numel = sum(rows * columns for rows, columns in shapes)
        residual = self._state(name, numel, flats[-1])
        start = self._state(f"{name}{START}", rank * sum(c for _, c in shapes), flats[-1])

        def put(
            op: str, own: str, args: tuple[Argument, ...], inputs: Sequence[Node], elements: int,
            mutates: Sequence[Node],
        ) -> Node:  # fmt: skip
            output = self._editor.tensor((elements,), "float32")
            moved = output.nbytes + sum(n.outputs[0].nbytes for n in inputs)
            node = call(
                op, inputs[0], name=f"{name}.{own}", args=(*args, shapes, rank), inputs=inputs,
                output=output, moved_bytes=moved,
            )  # fmt: skip
            changed = tuple(each.name for each in mutates)
            return self._editor.put_after(after, replace(node, nth=-1, mutates=changed))

        def summed(value: Node) -> Node:
            sent = self._collective(Exchange.ALL_REDUCE, value.outputs[0].nbytes)
            issued = issue_in_place(sent, value, name=f"{value.name}_sent")
            return self._issued(issued, after=after)

        given = tuple(Ref(flat.name) for flat in flats)
        left = put(
            LEFT, "coded", (given, Ref(residual.name), Ref(start.name)), [*flats, residual, start],
            rank * sum(r for r, _ in shapes), [residual],
        )  # fmt: skip
        left = summed(left)
        right = put(
            RIGHT, "added", (Ref(left.name), Ref(residual.name)), [left, residual],
            rank * sum(c for _, c in shapes), [left, residual],
        )  # fmt: skip
        right = summed(right)
        return put(
            MATRICES_OF_FACTORS, "decoded", (Ref(left.name), Ref(right.name), Ref(start.name)),
            [left, right, start], numel, [start],
        )  # fmt: skip

    def _residual(self, name: str, blocks: int, codec: Codec, like: Node) -> Node | None:
        return self._state(name, blocks * BLOCK, like) if codec.has_residual else None

    def _state(self, name: str, numel: int, like: Node) -> Node:
        """Add an input whose value is kept from step to step."""
        editor = self._editor
        tensor = editor.tensor((numel,), "float32")
        editor.storages[tensor.storage] = Storage(nbytes=tensor.nbytes, role=Role.STATE)
        node = Node(
            name=f"{RESIDUAL}{name}", op="input", outputs=(tensor,), phase=like.phase,
            path=like.path, line=like.line,
        )  # fmt: skip
        return editor.put_before(editor.before.nodes[0].name, node)

    def _codec_call(
        self,
        op: str,
        given: Sequence[Node],
        residual: Node | None,
        rest: tuple[str | int, ...],
        shape: tuple[int, ...],
        dtype: str,
        *,
        name: str,
        like: Node,
        after: str,
    ) -> Node:
        values = tuple(Ref(node.name) for node in given)
        state = () if op in (DECODE, DECODE_SUM) else (Ref(residual.name) if residual else None,)
        output = self._editor.tensor(shape, dtype)
        node = call(
            op, like, name=name, args=(values if op == ENCODE else values[0], *state, *rest),
            inputs=[*given, *([residual] if residual else [])], output=output,
            moved_bytes=output.nbytes + sum(n.outputs[0].nbytes for n in given),
        )  # fmt: skip
        if residual is not None:
            node = replace(node, mutates=(residual.name,))
        return self._editor.put_after(after, replace(node, nth=-1))

    def _exchanged(self, kind: Exchange, value: Node, *, after: str) -> Node:
        rows, row = value.outputs[0].shape
        ranks = self._num_ranks if kind is Exchange.ALL_GATHER else 1
        nbytes = value.outputs[0].nbytes * ranks
        issued = issue(
            self._collective(kind, nbytes), value, name=f"{value.name}_sent",
            output=self._editor.tensor((rows * ranks, row), "uint8"), moved_bytes=0,
        )  # fmt: skip
        return self._issued(issued, after=after)

    def _issued(self, issued: Node, *, after: str) -> Node:
        self._editor.put_after(after, replace(issued, nth=-1))
        arrived = wait(issued, self._transport)
        return self._editor.put_after(after, replace(arrived, nth=-1))


__all__ = ["compressed"]
