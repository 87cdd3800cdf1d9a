"""Synchronised BatchNorm for data parallelism: statistics over the whole batch.

The result is exact, as on one device: every rank normalises by the mean and variance of all
samples, and the backward pass accounts for each sample's effect on both. Each BatchNorm adds two
small collectives, one in each pass, which do not overlap with computation. Not for deciding if a
batch can be split: see capture/batch/splitting.py.
"""

from collections.abc import Mapping
from dataclasses import replace

from steelyard.errors import Mismatch
from steelyard.ir.collective import Exchange, Transport
from steelyard.ir.graph import Argument, Graph, Node, Ref, Tensor
from steelyard.ir.parallel_layout import DATA, ParallelLayout, spelled
from steelyard.ir.rule import trade_name
from steelyard.ir.rule_kinds import BatchSharding
from steelyard.passes.graph_editor import GraphEditor, call, issue, wait

_WITH_BUFFERS = "aten._native_batch_norm_legit_functional.default"
_WITHOUT = "aten._native_batch_norm_legit.no_stats"
_BACKWARD = "aten.native_batch_norm_backward.default"
_JOINT = "steelyard.batch_norm_gather_stats"
_DTYPES = ("float32", "float64")


def normalising(graph: Graph) -> list[Node]:
    """Return the calls that take statistics over samples.

    InstanceNorm is not among them, because it treats the samples as channels of a single sample.
    """
    return [
        node
        for node in graph.forward()
        if "batch_norm" in node.op and _trains(node) and _input_tensor(graph, node).shape[0] > 1
    ]


def why_not_synchronised(graph: Graph) -> str:
    """Return the reason why some BatchNorm cannot be synchronised; empty if all can."""
    for node in normalising(graph):
        if node.op not in (_WITH_BUFFERS, _WITHOUT):
            return f"{node.op} in {node.path} computes its statistics over the whole batch"
        if _input_tensor(graph, node).dtype not in _DTYPES:
            return f"BatchNorm in {node.path} computes statistics in half precision"
    return ""


def is_synchronised(graph: Graph) -> bool:
    return any(node.op == _JOINT for node in graph.nodes)


def synchronised(graph: Graph, *, layout: ParallelLayout, transport: Transport) -> Graph:
    """Return the graph for a rank's share of the batch, with statistics over all shares."""
    norms = normalising(graph)
    if not norms:
        return graph
    if layout.shares:
        raise Mismatch(
            f"BatchNorm would compute its statistics over unequal shares, {spelled(layout.shares)}",
            expected="equal shares, whose statistics have equal weights",
            remedy=f"remove shares from [[{trade_name(BatchSharding)}]], or plan again",
        )
    work = _Synchronising(graph, layout, transport)
    for node in norms:
        work.synchronise(node)
    return work.result()


def _trains(node: Node) -> bool:
    flags = [a for a in node.args if isinstance(a, bool)]
    return bool(flags) and flags[0]


def _input_tensor(graph: Graph, node: Node) -> Tensor:
    return graph.by_name[node.inputs[0]].outputs[0]


class _Synchronising:
    def __init__(self, graph: Graph, layout: ParallelLayout, transport: Transport) -> None:
        self._graph, self._layout, self._transport = graph, layout, transport
        self._editor = GraphEditor(graph)
        self._replaced: set[str] = set()
        # The new value and the new storage for each replaced value.
        self._replacement: dict[str, str] = {}
        self._new_storage: dict[int, int] = {}

    def result(self) -> Graph:
        graph = self._editor.result(self._graph.outputs)
        graph = replace(
            graph,
            nodes=tuple(self._rerouted(n) for n in graph.nodes if n.name not in self._replaced),
            outputs=tuple(
                replace(o, node=self._replacement.get(o.node, o.node)) for o in graph.outputs
            ),
        )
        assert not graph.problems(), graph.problems()
        return graph

    def _rerouted(self, node: Node) -> Node:
        """Return the node with the new values as inputs, and with its views moved to the new
        storages.
        """
        outputs = tuple(
            replace(t, storage=self._new_storage[t.storage])
            if t.storage in self._new_storage
            else t
            for t in node.outputs
        )
        if outputs == node.outputs and self._replacement.keys().isdisjoint(node.inputs):
            return node
        return replace(node.reading(self._replacement), outputs=outputs)

    def synchronise(self, node: Node) -> None:
        """Replace a call and its backward, which reads the statistics that the call saved."""
        joint = self._forward(node)
        users = self._graph.users
        saved = [user for user in users[node.name] if self._index(user) == 1]
        reading = dict.fromkeys(reader for one in saved for reader in users[one])
        for backward in map(self._graph.by_name.__getitem__, reading):
            if backward.op == _BACKWARD:
                self._backward(backward, joint, count=self._count(_input_tensor(self._graph, node)))

    def _forward(self, node: Node) -> Node:
        """Replace the forward call; return the node with the statistics of all samples."""
        x, weight, bias, *buffers, _, momentum, eps = node.args
        given = _input_tensor(self._graph, node)
        channels, count = given.shape[1], self._count(given)
        statistics = self._editor.tensor((2, channels), given.dtype)
        own = self._call(node, "batch_norm_stats", (x,), statistics)
        gathered = self._exchanged(Exchange.ALL_GATHER, own, at=node)
        joint = self._call(
            node, "batch_norm_gather_stats", (Ref(gathered.name), self._layout.data),
            self._editor.tensor((2, channels), given.dtype),
        )  # fmt: skip
        all_statistics = Ref(joint.name)
        results = {0: self._call(
            node, "batch_norm_elemt", (x, weight, bias, all_statistics, eps),
            self._like(node.outputs[0]),
        )}  # fmt: skip
        updates = (("update_running_mean", (momentum,)), ("update_running_var", (momentum, count)))
        for place, (buffer, (op, rest)) in enumerate(zip(buffers, updates)):
            output = self._editor.tensor((channels,), given.dtype)
            results[3 + place] = self._call(node, op, (buffer, all_statistics, *rest), output)
        self._substitute(node, results)
        return joint

    def _backward(self, node: Node, joint: Node, *, count: int) -> None:
        gradient, x, weight, eps, wanted = (node.args[i] for i in (0, 1, 2, 8, 9))
        assert isinstance(wanted, tuple)
        all_statistics, (_, channels) = Ref(joint.name), joint.outputs[0].shape
        sums = self._editor.tensor((2, channels), joint.outputs[0].dtype)
        own = self._call(
            node, "batch_norm_backward_reduce", (gradient, x, all_statistics, eps), sums
        )
        results: dict[int, Node] = {}
        if wanted[0]:
            all_sums = Ref(self._exchanged(Exchange.ALL_REDUCE, own, at=node).name)
            results[0] = self._call(
                node, "batch_norm_backward_elemt",
                (gradient, x, weight, all_statistics, all_sums, count, eps),
                self._like(node.outputs[0]),
            )  # fmt: skip
        for place in (1, 2):
            if wanted[place]:
                row = replace(sums, shape=(channels,), stride=(1,), offset=(place - 1) * channels)
                args = (Ref(own.name), 0, place - 1)
                results[place] = self._call(
                    node, ("", "weight", "bias")[place], args, row, op="aten.select.int"
                )
        self._substitute(node, results)

    def _substitute(self, node: Node, results: Mapping[int, Node]) -> None:
        """Make the readers of each result of ``node`` read its replacement."""
        self._replaced.add(node.name)
        for name in self._graph.users[node.name]:
            self._replaced.add(name)
            if (new := results.get(self._index(name))) is not None:
                (old,) = self._graph.storages_of(name)
                self._new_storage[old] = new.outputs[0].storage
                self._replacement[name] = new.name

    def _index(self, name: str) -> int:
        index = self._graph.by_name[name].args[1]
        assert isinstance(index, int)
        return index

    def _exchanged(self, kind: Exchange, value: Node, *, at: Node) -> Node:
        rows, channels = value.outputs[0].shape
        rows *= self._layout.data if kind is Exchange.ALL_GATHER else 1
        output = self._editor.tensor((rows, channels), value.outputs[0].dtype)
        collective = self._transport.collective(
            kind, axis=DATA, num_ranks=self._layout.data, nbytes=output.nbytes,
            stride=self._layout.tensor,
        )  # fmt: skip
        moved = 0 if kind is Exchange.ALL_GATHER else 2 * output.nbytes
        sent = issue(
            collective, value, name=f"{value.name}_of_all", output=output, moved_bytes=moved
        )
        self._editor.put_after(at.name, replace(sent, nth=at.nth))
        arrived = wait(sent, self._transport)
        return self._editor.put_after(at.name, replace(arrived, nth=at.nth))

    def _call(
        self, at: Node, label: str, args: tuple[Argument, ...], output: Tensor, *, op: str = ""
    ) -> Node:
        """Insert a call after ``at``; ``label`` must be unique for ``at``."""
        inputs = [self._editor[a.name] for a in args if isinstance(a, Ref)]
        node = call(
            op or f"steelyard.{label}", at, name=f"{at.name}_{label}", args=args, inputs=inputs,
            output=output, moved_bytes=output.nbytes + sum(n.outputs[0].nbytes for n in inputs),
        )  # fmt: skip
        free = 0 if node.is_view else node.moved_bytes
        return self._editor.put_after(at.name, replace(node, nth=at.nth, moved_bytes=free))

    def _like(self, tensor: Tensor) -> Tensor:
        """Add a tensor of the same shape and strides on a new storage."""
        return replace(self._editor.tensor(tensor.shape, tensor.dtype), stride=tensor.stride)

    def _count(self, x: Tensor) -> int:
        """Return the number of values of one channel on all ranks."""
        return x.numel // x.shape[1] * self._layout.data
