"""BatchNorm on ranks that share the batch, with statistics over all of it, as on one device.

Exact: every rank normalises by mean and variance of all samples, and the gradient of what was
normalised knows that each sample moves both. Two small exchanges for each BatchNorm, one in each
pass, which nothing hides. Plain data. Not for whether the batch may be shared at all: see
capture/batch/splitting.py.
"""

from collections.abc import Mapping
from dataclasses import replace

from steelyard.errors import Mismatch
from steelyard.ir.collective import Exchange, Transport
from steelyard.ir.graph import Argument, Graph, Node, Ref, Tensor
from steelyard.ir.parallel_layout import DATA, ParallelLayout, spelled
from steelyard.passes.graph_editor import GraphEditor, call, issue, wait

_WITH_BUFFERS = "aten._native_batch_norm_legit_functional.default"
_WITHOUT = "aten._native_batch_norm_legit.no_stats"
_BACKWARD = "aten.native_batch_norm_backward.default"
_JOINT = "steelyard.joint_statistics"
_DTYPES = ("float32", "float64")


def normalising(graph: Graph) -> list[Node]:
    """The calls that take statistics over samples. InstanceNorm takes those of each sample, laid
    out as channels of a single one."""
    return [
        node
        for node in graph.forward()
        if "batch_norm" in node.op and _trains(node) and _given(graph, node).shape[0] > 1
    ]


def why_not_synchronised(graph: Graph) -> str:
    """Of these calls; empty where all can be."""
    for node in normalising(graph):
        if node.op not in (_WITH_BUFFERS, _WITHOUT):
            return f"{node.op} in {node.path} takes its statistics over the whole batch"
        if _given(graph, node).dtype not in _DTYPES:
            return f"BatchNorm in {node.path} takes statistics in half precision"
    return ""


def is_synchronised(graph: Graph) -> bool:
    return any(node.op == _JOINT for node in graph.nodes)


def synchronised(graph: Graph, *, layout: ParallelLayout, transport: Transport) -> Graph:
    """The graph of a rank's share of the batch, with statistics of all shares."""
    norms = normalising(graph)
    if not norms:
        return graph
    if layout.shares:
        raise Mismatch(
            f"BatchNorm takes its statistics over shares of {spelled(layout.shares)}",
            expected="equal shares, whose statistics weigh alike",
            remedy="take shares out from under [[shard_batch]], or plan again",
        )
    work = _Synchronising(graph, layout, transport)
    for node in norms:
        work.take_apart(node)
    return work.result()


def _trains(node: Node) -> bool:
    flags = [a for a in node.args if isinstance(a, bool)]
    return bool(flags) and flags[0]


def _given(graph: Graph, node: Node) -> Tensor:
    return graph.by_name[node.inputs[0]].outputs[0]


class _Synchronising:
    def __init__(self, graph: Graph, layout: ParallelLayout, transport: Transport) -> None:
        self._graph, self._layout, self._transport = graph, layout, transport
        self._change = GraphEditor(graph)
        self._gone: set[str] = set()
        # What stands for a value that is no longer made, and where that lies.
        self._instead: dict[str, str] = {}
        self._lies: dict[int, int] = {}

    def result(self) -> Graph:
        graph = self._change.result(self._graph.outputs)
        graph = replace(
            graph,
            nodes=tuple(self._rerouted(n) for n in graph.nodes if n.name not in self._gone),
            outputs=tuple(
                replace(o, node=self._instead.get(o.node, o.node)) for o in graph.outputs
            ),
        )
        assert not graph.problems(), graph.problems()
        return graph

    def _rerouted(self, node: Node) -> Node:
        """Reading what there is now, and views of what is gone become views of that."""
        laid = tuple(
            replace(t, storage=self._lies[t.storage]) if t.storage in self._lies else t
            for t in node.outputs
        )
        if laid == node.outputs and self._instead.keys().isdisjoint(node.inputs):
            return node
        return replace(node.reading(self._instead), outputs=laid)

    def take_apart(self, node: Node) -> None:
        """A call and its derivative, which reads the statistics that the call saved."""
        both = self._forward(node)
        users = self._graph.users
        saved = [user for user in users[node.name] if self._index(user) == 1]
        reading = dict.fromkeys(reader for one in saved for reader in users[one])
        for back in map(self._graph.by_name.__getitem__, reading):
            if back.op == _BACKWARD:
                self._backward(back, both, count=self._count(_given(self._graph, node)))

    def _forward(self, node: Node) -> Node:
        """Gives the statistics of all samples."""
        x, weight, bias, *buffers, _, momentum, eps = node.args
        given = _given(self._graph, node)
        channels, count = given.shape[1], self._count(given)
        statistics = self._change.tensor((2, channels), given.dtype)
        own = self._call(node, "batch_statistics", (x,), statistics)
        gathered = self._exchanged(Exchange.ALL_GATHER, own, at=node)
        both = self._call(
            node, "joint_statistics", (Ref(gathered.name), self._layout.batch),
            self._change.tensor((2, channels), given.dtype),
        )  # fmt: skip
        all_of = Ref(both.name)
        results = {0: self._call(
            node, "normalised", (x, weight, bias, all_of, eps), self._like(node.outputs[0])
        )}  # fmt: skip
        moved = (("moved_mean", (momentum,)), ("moved_variance", (momentum, count)))
        for place, (buffer, (op, rest)) in enumerate(zip(buffers, moved)):
            output = self._change.tensor((channels,), given.dtype)
            results[3 + place] = self._call(node, op, (buffer, all_of, *rest), output)
        self._put_in_place_of(node, results)
        return both

    def _backward(self, node: Node, both: Node, *, count: int) -> None:
        gradient, x, weight, eps, wanted = (node.args[i] for i in (0, 1, 2, 8, 9))
        assert isinstance(wanted, tuple)
        all_of, (_, channels) = Ref(both.name), both.outputs[0].shape
        sums = self._change.tensor((2, channels), both.outputs[0].dtype)
        own = self._call(node, "normalised_sums", (gradient, x, all_of, eps), sums)
        results: dict[int, Node] = {}
        if wanted[0]:
            of_all = Ref(self._exchanged(Exchange.ALL_REDUCE, own, at=node).name)
            results[0] = self._call(
                node, "normalised_backward", (gradient, x, weight, all_of, of_all, count, eps),
                self._like(node.outputs[0]),
            )  # fmt: skip
        for place in (1, 2):
            if wanted[place]:
                row = replace(sums, shape=(channels,), stride=(1,), offset=(place - 1) * channels)
                args = (Ref(own.name), 0, place - 1)
                results[place] = self._call(
                    node, ("", "weight", "bias")[place], args, row, op="aten.select.int"
                )
        self._put_in_place_of(node, results)

    def _put_in_place_of(self, node: Node, results: Mapping[int, Node]) -> None:
        """What read a result of ``node`` reads what stands for it now."""
        self._gone.add(node.name)
        for name in self._graph.users[node.name]:
            self._gone.add(name)
            if (new := results.get(self._index(name))) is not None:
                (old,) = self._graph.storages_of(name)
                self._lies[old] = new.outputs[0].storage
                self._instead[name] = new.name

    def _index(self, name: str) -> int:
        index = self._graph.by_name[name].args[1]
        assert isinstance(index, int)
        return index

    def _exchanged(self, kind: Exchange, value: Node, *, at: Node) -> Node:
        rows, channels = value.outputs[0].shape
        rows *= self._layout.batch if kind is Exchange.ALL_GATHER else 1
        output = self._change.tensor((rows, channels), value.outputs[0].dtype)
        collective = self._transport.collective(
            kind, axis=DATA, num_ranks=self._layout.batch, nbytes=output.nbytes,
            stride=self._layout.tensor,
        )  # fmt: skip
        moved = 0 if kind is Exchange.ALL_GATHER else 2 * output.nbytes
        sent = issue(
            collective, value, name=f"{value.name}_of_all", output=output, moved_bytes=moved
        )
        self._change.put_behind(at.name, replace(sent, nth=at.nth))
        arrived = wait(sent, self._transport)
        return self._change.put_behind(at.name, replace(arrived, nth=at.nth))

    def _call(
        self, at: Node, said: str, args: tuple[Argument, ...], output: Tensor, *, op: str = ""
    ) -> Node:
        """Behind ``at``, of which there is one such call."""
        inputs = [self._change[a.name] for a in args if isinstance(a, Ref)]
        node = call(
            op or f"steelyard.{said}", at, name=f"{at.name}_{said}", args=args, inputs=inputs,
            output=output, moved_bytes=output.nbytes + sum(n.outputs[0].nbytes for n in inputs),
        )  # fmt: skip
        free = 0 if node.is_view else node.moved_bytes
        return self._change.put_behind(at.name, replace(node, nth=at.nth, moved_bytes=free))

    def _like(self, tensor: Tensor) -> Tensor:
        """Laid out alike, on a storage of its own."""
        return replace(self._change.tensor(tensor.shape, tensor.dtype), stride=tensor.stride)

    def _count(self, x: Tensor) -> int:
        """Values of one channel on all ranks."""
        return x.numel // x.shape[1] * self._layout.batch
