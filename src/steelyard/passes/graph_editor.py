"""Edits a graph to insert collectives: places nodes before or after others, adds storages.

Plain data, without torch. Not for choosing collectives: see passes/data_parallel/all_reduce.py and
passes/data_parallel/shard_parameters.py.
"""

from collections.abc import Collection, Sequence
from dataclasses import replace

from steelyard.ir.collective import Collective, Exchange, Transport
from steelyard.ir.graph import (
    PACK_ROWS,
    UNPACK_ROWS,
    Argument,
    Axis,
    Graph,
    Node,
    Output,
    Ref,
    Role,
    Storage,
    Tensor,
)


class GraphEditor:
    """Collects changes to ``graph``, which is not modified; ``result`` returns the new graph."""

    def __init__(self, graph: Graph) -> None:
        self.storages = list(graph.storages)
        self.before = graph
        self._nodes = dict(graph.by_name)
        self._before: dict[str, list[str]] = {}
        self._after: dict[str, list[str]] = {}

    def __getitem__(self, name: str) -> Node:
        return self._nodes[name]

    def result(self, outputs: Sequence[Output], *, without: Collection[str] = ()) -> Graph:
        """Return the edited graph with these outputs and ``without`` the replaced nodes."""
        ordered: list[Node] = []
        for node in self.before.nodes:
            names = (*self._before.get(node.name, ()), node.name, *self._after.get(node.name, ()))
            ordered += [self._nodes[name] for name in names if name not in without]
        # Inputs exist from the start of the step, and a collective may read them before its anchor.
        ordered.sort(key=lambda node: not node.is_input)
        graph = replace(
            self.before,
            nodes=tuple(ordered),
            storages=tuple(self.storages),
            outputs=tuple(outputs),
        )
        assert not graph.problems(), graph.problems()
        return graph

    def has_own_storage(self, name: str) -> bool:
        """True if this output of the step has a storage that nothing else reads or returns."""
        graph = self.before
        (storage,) = graph.storages_of(name)
        aliases = {n.name for n in graph.nodes if storage in graph.storages_of(n.name)}
        readers = {user for alias in aliases for user in graph.users[alias]}
        outputs = [output for output in graph.outputs if output.node in aliases]
        is_input = any(graph.by_name[alias].is_input for alias in aliases)
        return readers <= aliases and len(outputs) == 1 and not is_input

    def fresh(self, name: str) -> str:
        """Return an unused node name; earlier edits of the graph may have used ``name``."""
        found, number = name, 1
        while found in self._nodes:
            number += 1
            found = f"{name}_{number}"
        return found

    def put_before(self, anchor: str, node: Node) -> Node:
        return self._put(self._before.setdefault(anchor, []), node)

    def put_after(self, anchor: str, node: Node) -> Node:
        """Insert a node after the anchor and after all nodes inserted there before."""
        return self._put(self._after.setdefault(anchor, []), node)

    def set_node(self, node: Node) -> None:
        self._nodes[node.name] = node

    def reroute(self, old: Node, new: Node) -> None:
        """Make the readers of ``old`` read ``new``, and turn views of ``old`` into views of
        ``new``.
        """
        before, after = old.outputs[0].storage, new.outputs[0].storage
        for name in self.before.by_name:
            node = self._nodes[name]
            if name == old.name:
                continue
            outputs = tuple(
                replace(t, storage=after) if t.storage == before else t for t in node.outputs
            )
            if outputs != node.outputs or old.name in node.inputs:
                self.set_node(replace(node.reading({old.name: new.name}), outputs=outputs))

    def tensor(self, shape: tuple[int, ...], dtype: str) -> Tensor:
        """Add a contiguous tensor on a new storage."""
        stride, step = [], 1
        for size in reversed(shape):
            stride.append(step)
            step *= size
        made = Tensor(
            shape=shape, stride=tuple(reversed(stride)), dtype=dtype, storage=len(self.storages)
        )
        self.storages.append(Storage(nbytes=made.nbytes, role=Role.ACTIVATION))
        return made

    def _put(self, place: list[str], node: Node) -> Node:
        assert node.name not in self._nodes, node.name
        self._nodes[node.name] = node
        place.append(node.name)
        return node


def call(
    op: str,
    like: Node,
    *,
    name: str,
    args: tuple[Argument, ...],
    inputs: Sequence[Node],
    output: Tensor,
    moved_bytes: int = 0,
) -> Node:
    """Make a node with the phase, module path and source line of ``like``."""
    return Node(
        name=name,
        op=op,
        args=args,
        inputs=tuple(dict.fromkeys(node.name for node in inputs)),
        outputs=(output,),
        phase=like.phase,
        path=like.path,
        line=like.line,
        signature=f"{op}({';'.join(_layout(node.outputs[0]) for node in inputs)};{_plain(args)})",
        moved_bytes=moved_bytes,
        is_view=any(t.storage == output.storage for node in inputs for t in node.outputs),
    )


def view(source: Node, tensor: Tensor, *, name: str) -> Node:
    """Make a node for ``tensor``, a view on the storage of ``source``."""
    return call(
        "aten.as_strided.default", source, name=name,
        args=(Ref(source.name), tensor.shape, tensor.stride, tensor.offset), inputs=(source,),
        output=tensor,
    )  # fmt: skip


def pack_rows(tensors: Sequence[Node], *, like: Node, name: str, output: Tensor) -> Node:
    """Make a node that reshapes each tensor to the rows of ``output`` and joins them on dim 1."""
    return call(
        PACK_ROWS, like, name=name, args=(tuple(Ref(t.name) for t in tensors), output.shape[0]),
        inputs=tensors, output=output, moved_bytes=2 * output.nbytes,
    )  # fmt: skip


def unpack_rows(joined: Node, start: int, *, like: Node, name: str, output: Tensor) -> Node:
    """Make a node that copies one tensor out of ``joined``; its columns begin at ``start``."""
    return call(
        UNPACK_ROWS, like, name=name, args=(Ref(joined.name), start, output.shape),
        inputs=(joined,), output=output, moved_bytes=2 * output.nbytes,
    )  # fmt: skip


def issue(
    collective: Collective, value: Node, *, name: str, output: Tensor, moved_bytes: int
) -> Node:
    """Make the node that issues a collective on ``value``."""
    axis, ranks = Axis(collective.axis), collective.num_ranks
    rest: dict[Exchange, tuple[Argument, ...]] = {
        Exchange.ALL_REDUCE: ("sum", axis),
        Exchange.REDUCE_SCATTER: ("sum", ranks, axis),
        Exchange.ALL_GATHER: (ranks, axis),
        # The input has one row for each rank.
        Exchange.ALL_TO_ALL: ((1,) * ranks, (1,) * ranks, axis),
    }
    node = call(
        _CALLS[collective.kind], value, name=name, args=(Ref(value.name), *rest[collective.kind]),
        inputs=(value,), output=output, moved_bytes=moved_bytes,
    )  # fmt: skip
    return replace(node, collective=collective)


def issue_in_place(collective: Collective, value: Node, *, name: str) -> Node:
    """Make the node that issues an in-place all-reduce of ``value``, which nothing else reads."""
    assert collective.kind is Exchange.ALL_REDUCE
    node = call(
        "_c10d_functional.all_reduce_.default", value, name=name,
        args=(Ref(value.name), "sum", Axis(collective.axis)), inputs=(value,),
        output=value.outputs[0],
    )  # fmt: skip
    # The wait is not a view: passes may repeat views, but the memory has other contents by then.
    return replace(node, collective=collective, is_view=False, mutates=(value.name,))


def wait(issued: Node, transport: Transport) -> Node:
    """Make the node that waits for a collective and returns its result."""
    assert issued.collective is not None
    node = call(
        "_c10d_functional.wait_tensor.default", issued, name=f"{issued.name}_waited",
        args=(Ref(issued.name),), inputs=(issued,), output=issued.outputs[0],
    )  # fmt: skip
    kept_inputs = issued.inputs if issued.collective.kind in transport.keeps_input else ()
    # The wait is not a view: passes may drop or repeat views, but not waits.
    return replace(node, is_view=False, waits_for=issued.name, inputs=(issued.name, *kept_inputs))


_CALLS = {
    Exchange.ALL_REDUCE: "_c10d_functional.all_reduce.default",
    Exchange.REDUCE_SCATTER: "_c10d_functional.reduce_scatter_tensor.default",
    Exchange.ALL_GATHER: "steelyard.all_gather",
    Exchange.ALL_TO_ALL: "_c10d_functional.all_to_all_single.default",
}


def _layout(tensor: Tensor) -> str:
    return f"{tensor.dtype}{list(tensor.shape)}"


def _plain(args: tuple[Argument, ...]) -> str:
    return ";".join(str(a) for a in args if not isinstance(a, Ref | Axis))
