"""Gradients summed over ranks in few bits: written down, exchanged, added up, all as nodes.

Takes the place of all-reduces that are in the graph already (passes/data_parallel/all_reduce.py).
What is linear is all-reduced itself, and so are both factors of a matrix, one after the other. Of
all else, between two ranks each sends the other all of its codes; of more, each adds up a part,
writes the sum down again and hands it to the others, so that nobody sends more where there are
more. Not for what a code is: see ir/gradient_codec.py.
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
    OF_FACTORS,
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
    buckets,
    handed_out,
    sent_as_they_are,
)
from steelyard.passes.graph_editor import GraphEditor, call, issue, issue_in_place, wait


def coded(
    graph: Graph,
    codecs: Mapping[str, Codec],
    *,
    num_ranks: int,
    transport: Transport,
    axis: str = DATA,
    stride: int = 1,
) -> Graph:
    """The gradients of these parameters in their codes. What shares a bucket with them and has none
    goes with the like of other buckets, behind the last."""
    change = GraphEditor(graph)

    def collective(kind: Exchange, nbytes: int) -> Collective:
        return transport.collective(
            kind, axis=axis, num_ranks=num_ranks, nbytes=nbytes, stride=stride
        )

    sending = _Sending(change, transport, collective, num_ranks)
    outputs = list(graph.outputs)
    left: list[BucketMember] = []
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
        left += [m for m in bucket.members if m.target not in codecs]
        for codec, members in by_codec.items():
            whole = sending.compress_gradients(members, codec, behind=bucket.waited.name)
            handed_out(change, outputs, members, whole, behind=bucket.waited.name)
        last = bucket.waited.name
    if left:
        whole = sent_as_they_are(
            change, left, name="rest_of_buckets", behind=last, transport=transport,
            collective=collective,
        )  # fmt: skip
        handed_out(change, outputs, left, whole, behind=last)
    return change.result(outputs, without=dropped)


class _Sending:
    """Puts exchanges into the graph; each returns the sum over the ranks, flat."""

    def __init__(
        self,
        change: GraphEditor,
        transport: Transport,
        collective: Sized,
        num_ranks: int,
    ) -> None:
        self._change, self._transport, self._collective = change, transport, collective
        self._num_ranks = num_ranks

    def compress_gradients(
        self, members: Sequence[BucketMember], codec: Codec, *, behind: str
    ) -> Node:
        flats = [member.flat for member in members]
        name = members[0].target.partition(":")[2]
        if codec.is_linear:
            return self._narrowed(flats, codec, name=name, behind=behind)
        if codec.rank:
            return self._in_factors(members, codec.rank, name=name, behind=behind)
        at_once = self._num_ranks == 2
        parts = 1 if at_once else self._num_ranks
        blocks = blocks_of(sum(f.outputs[0].numel for f in flats), parts=parts)
        lost = self._residual(f"{name}", blocks, codec, flats[-1])
        row = codec.row_bytes(blocks // parts)
        written = self._called(
            ENCODE, flats, lost, (codec.name, parts), (parts, row), "uint8",
            name=f"{name}.coded", like=flats[-1], behind=behind,
        )  # fmt: skip
        if at_once:
            gathered = self._exchanged(Exchange.ALL_GATHER, written, behind=behind)
            return self._called(
                DECODE_SUM, [gathered], None, (codec.name,), (blocks * BLOCK,), "float32",
                name=f"{name}.decoded", like=gathered, behind=behind,
            )  # fmt: skip
        received = self._exchanged(Exchange.ALL_TO_ALL, written, behind=behind)
        own = self._residual(f"{name}:own", blocks // parts, codec, received)
        added = self._called(
            ENCODE_SUM, [received], own, (codec.name,), (1, row), "uint8",
            name=f"{name}.added", like=received, behind=behind,
        )  # fmt: skip
        gathered = self._exchanged(Exchange.ALL_GATHER, added, behind=behind)
        return self._called(
            DECODE, [gathered], None, (codec.name,), (blocks * BLOCK,), "float32",
            name=f"{name}.decoded", like=gathered, behind=behind,
        )  # fmt: skip

    def _narrowed(self, flats: Sequence[Node], codec: Codec, *, name: str, behind: str) -> Node:
        shape = (sum(flat.outputs[0].numel for flat in flats),)
        written = self._called(
            ENCODE, flats, None, (codec.name, 1), shape, codec.name,
            name=f"{name}.coded", like=flats[-1], behind=behind,
        )  # fmt: skip
        sent = self._collective(Exchange.ALL_REDUCE, written.outputs[0].nbytes)
        issued = issue_in_place(sent, written, name=f"{written.name}_sent")
        arrived = self._issued(issued, behind=behind)
        return self._called(
            DECODE, [arrived], None, (codec.name,), shape, "float32",
            name=f"{name}.decoded", like=arrived, behind=behind,
        )  # fmt: skip

    def _in_factors(
        self, members: Sequence[BucketMember], rank: int, *, name: str, behind: str
    ) -> Node:
        """A product of matrices that are known of all ranks' sum, each after another all-reduce."""
        flats = [member.flat for member in members]
        shapes = tuple(matrix_of(member.laid_out) for member in members)
        numel = sum(rows * columns for rows, columns in shapes)
        lost = self._state(name, numel, flats[-1])
        start = self._state(f"{name}{START}", rank * sum(c for _, c in shapes), flats[-1])

        def put(
            op: str, own: str, args: tuple[Argument, ...], inputs: Sequence[Node], elements: int,
            mutates: Sequence[Node],
        ) -> Node:  # fmt: skip
            output = self._change.tensor((elements,), "float32")
            moved = output.nbytes + sum(n.outputs[0].nbytes for n in inputs)
            node = call(
                op, inputs[0], name=f"{name}.{own}", args=(*args, shapes, rank), inputs=inputs,
                output=output, moved_bytes=moved,
            )  # fmt: skip
            changed = tuple(each.name for each in mutates)
            return self._change.put_behind(behind, replace(node, nth=-1, mutates=changed))

        def summed(value: Node) -> Node:
            sent = self._collective(Exchange.ALL_REDUCE, value.outputs[0].nbytes)
            issued = issue_in_place(sent, value, name=f"{value.name}_sent")
            return self._issued(issued, behind=behind)

        given = tuple(Ref(flat.name) for flat in flats)
        left = put(
            LEFT, "coded", (given, Ref(lost.name), Ref(start.name)), [*flats, lost, start],
            rank * sum(r for r, _ in shapes), [lost],
        )  # fmt: skip
        left = summed(left)
        right = put(
            RIGHT, "added", (Ref(left.name), Ref(lost.name)), [left, lost],
            rank * sum(c for _, c in shapes), [left, lost],
        )  # fmt: skip
        right = summed(right)
        return put(
            OF_FACTORS, "decoded", (Ref(left.name), Ref(right.name), Ref(start.name)),
            [left, right, start], numel, [start],
        )  # fmt: skip

    def _residual(self, name: str, blocks: int, codec: Codec, like: Node) -> Node | None:
        return self._state(name, blocks * BLOCK, like) if codec.has_residual else None

    def _state(self, name: str, numel: int, like: Node) -> Node:
        """An input that stays from step to step."""
        change = self._change
        tensor = change.tensor((numel,), "float32")
        change.storages[tensor.storage] = Storage(nbytes=tensor.nbytes, role=Role.STATE)
        node = Node(
            name=f"{RESIDUAL}{name}", op="input", outputs=(tensor,), phase=like.phase,
            path=like.path, line=like.line,
        )  # fmt: skip
        return change.put_before(change.before.nodes[0].name, node)

    def _called(
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
        behind: str,
    ) -> Node:
        values = tuple(Ref(node.name) for node in given)
        lost = () if op in (DECODE, DECODE_SUM) else (Ref(residual.name) if residual else None,)
        output = self._change.tensor(shape, dtype)
        node = call(
            op, like, name=name, args=(values if op == ENCODE else values[0], *lost, *rest),
            inputs=[*given, *([residual] if residual else [])], output=output,
            moved_bytes=output.nbytes + sum(n.outputs[0].nbytes for n in given),
        )  # fmt: skip
        if residual is not None:
            node = replace(node, mutates=(residual.name,))
        return self._change.put_behind(behind, replace(node, nth=-1))

    def _exchanged(self, kind: Exchange, value: Node, *, behind: str) -> Node:
        rows, row = value.outputs[0].shape
        ranks = self._num_ranks if kind is Exchange.ALL_GATHER else 1
        nbytes = value.outputs[0].nbytes * ranks
        issued = issue(
            self._collective(kind, nbytes), value, name=f"{value.name}_sent",
            output=self._change.tensor((rows * ranks, row), "uint8"), moved_bytes=0,
        )  # fmt: skip
        return self._issued(issued, behind=behind)

    def _issued(self, issued: Node, *, behind: str) -> Node:
        self._change.put_behind(behind, replace(issued, nth=-1))
        arrived = wait(issued, self._transport)
        return self._change.put_behind(behind, replace(arrived, nth=-1))


__all__ = ["coded"]
