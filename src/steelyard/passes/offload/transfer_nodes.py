"""Nodes and lines that transfer tensors to and from offload memory.

Not for placing them in a program: see state_transfers.py, sliced_weight_matmuls.py,
sliced_activation_matmuls.py and sliced_gradients.py.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import gcd, lcm
from types import MappingProxyType

from steelyard.hardware.cluster import OFFLOAD_IN, OFFLOAD_OUT, OFFLOAD_PAGE_BYTES
from steelyard.ir.collective import Collective, Exchange
from steelyard.ir.graph import (
    OFFLOAD_CALLS,
    Graph,
    Node,
    Phase,
    Ref,
    Role,
    Storage,
    Tensor,
)
from steelyard.ir.program import Instruction, Program


class Calls:
    """Makes transfer calls and collects their nodes for the rewritten graph.

    The first fetched copy of a tensor takes the name of the replaced node, so that the readers of
    that node need no change.
    """

    def __init__(self, graph: Graph, phase: Phase) -> None:
        self._graph = graph
        self._phase = phase
        self._first: dict[str, Node] = {}
        self._last: dict[str, Node] = {}
        self._instead: dict[str, Node] = {}
        self._dropped: frozenset[str] = frozenset()
        self._storages = list(graph.storages)

    def fetch(self, name: str, number: int = 0) -> Instruction:
        return self._fetch(name, self._graph.by_name[name].outputs[0], number)

    def fetched(self, name: str, number: int = 0) -> Instruction:
        return self._fetched(name, self._graph.by_name[name].outputs[0], number)

    def drop(self, names: frozenset[str]) -> None:
        """Declare that nothing reads these inputs any more, so that they are not resident."""
        self._dropped = names

    def slices(self, weight: str, number: int, count: int) -> tuple[Instruction, Instruction]:
        """Return the lines that begin to fetch slices into a buffer for two, and that free the
        buffer.
        """
        (tensor,) = self._graph.by_name[weight].outputs
        buffer, link = slices_of(tensor, count, storage=len(self._storages))
        self._storages.append(Storage(nbytes=buffer.nbytes, role=Role.ACTIVATION))
        begin = self._call("begin", weight, _fetch_of(weight, number), (), (buffer,))
        begin = replace(begin, args=(weight, count), collective=link)
        end = self._call("end", weight, _numbered(f"{weight}.end", number), (begin.name,))
        return self._first_line(begin), self._last_line(replace(end, waits_for=begin.name))

    def made_in_slices(self, gradient: str, value: str, count: int) -> "MadeInSlices":
        """Make a value a few rows at a time and send each slice, with a buffer for two slices."""
        (tensor,) = self._graph.by_name[value].outputs
        buffer = self._buffer(tensor, rows_in_slice(tensor, count), slices=2)
        begin = self._begin(
            gradient, count, buffer, _over(OFFLOAD_OUT, Exchange.SEND, tensor.nbytes)
        )
        end = self._call("end", gradient, f"{gradient}.end", (begin.name,))
        return MadeInSlices(
            begin=self._first_line(begin),
            before=(),
            after=(),
            end=self._last_line(replace(end, waits_for=begin.name)),
        )

    def added_in_slices(self, gradient: str, value: str, count: int) -> "MadeInSlices":
        """Fetch each slice, add new rows to it and send it back.

        The buffer has a third slice for the rows to be added.
        """
        (tensor,) = self._graph.by_name[value].outputs
        buffer = self._buffer(tensor, rows_in_slice(tensor, count), slices=3)
        begin = self._begin(
            gradient, count, buffer, _over(OFFLOAD_IN, Exchange.FETCH, tensor.nbytes)
        )
        leave = self._leave(gradient, tensor.nbytes)
        arrived = self._call("arrived", gradient, gradient, (begin.name,), (buffer,))
        end = self._call("end", gradient, f"{gradient}.end", (leave.name, gradient))
        return MadeInSlices(
            begin=self._first_line(begin),
            before=(self._first_line(leave),),
            after=(self._first_line(replace(arrived, waits_for=begin.name)),),
            end=self._last_line(replace(end, waits_for=leave.name)),
        )

    def updated_in_slices(self, names: Sequence[str], count: int, rows: int) -> "UpdatedInSlices":
        """Fetch some rows of each state, update them and send them back.

        Each state has a buffer for two slices. Gradients are not sent back. The buffer exists
        before the first fetch arrives, because most slices are fetched and sent while the updating
        lines run.
        """
        before: list[Instruction] = []
        after: list[Instruction] = []
        ends: list[Instruction] = []
        for name in names:
            (tensor,) = self._graph.by_name[name].outputs
            self.shrink(tensor.storage, 2 * rows * tensor.nbytes // tensor.shape[0])
            fetch = _over(OFFLOAD_IN, Exchange.FETCH, tensor.nbytes)
            begin = replace(self._begin(name, count, tensor, fetch), outputs=())
            buffer = replace(self._call("room", name, name, (), (tensor,)), args=(name, count))
            arrived = self._call("arrived", name, f"{name}.arrived", (begin.name,))
            before += [self._first_line(begin), self._first_line(buffer)]
            ends.append(self._last_line(replace(arrived, waits_for=begin.name)))
            if not name.startswith("gradient:"):
                leave = self._leave(name, tensor.nbytes)
                end = self._call("end", name, f"{name}.end", (leave.name, name))
                after.append(self._first_line(leave))
                ends.append(self._last_line(replace(end, waits_for=leave.name)))
        return UpdatedInSlices(before=tuple(before), after=(*after, *ends))

    def shrink(self, storage: int, nbytes: int) -> None:
        """Reduce a storage to the size of the rows that are made on it at a time."""
        self._storages[storage] = replace(self._storages[storage], nbytes=nbytes)

    def _buffer(self, tensor: Tensor, rows: int, *, slices: int) -> Tensor:
        buffer = replace(tensor, shape=(slices, rows, tensor.shape[1]), stride=(0, 0, 0))
        self._storages.append(Storage(nbytes=buffer.nbytes, role=Role.ACTIVATION))
        return replace(buffer, storage=len(self._storages) - 1)

    def _begin(self, name: str, count: int, buffer: Tensor, link: Collective) -> Node:
        node = self._call("begin", name, f"{name}.begin", (), (buffer,))
        return replace(node, args=(name, count), collective=link)

    def _leave(self, name: str, nbytes: int) -> Node:
        """Begin to send: each slice is transferred as soon as it is complete."""
        node = self._call("leave", name, f"{name}.leave", ())
        return replace(node, collective=_over(OFFLOAD_OUT, Exchange.SEND, nbytes))

    def instead(self, node: Node) -> Instruction:
        """Replace the node of the same name by this call, and return its line."""
        self._instead[node.name] = node
        return _line(node)

    def add(self, *nodes: Node) -> None:
        self._last.update((node.name, node) for node in nodes)

    def fetch_sum(self, name: str, value: str) -> tuple[Instruction, Instruction]:
        """Fetch the sum to which this value is added, into a new buffer."""
        (tensor,) = self._graph.by_name[value].outputs
        self._storages.append(Storage(nbytes=tensor.nbytes, role=Role.ACTIVATION))
        tensor = replace(tensor, storage=len(self._storages) - 1)
        return self._fetch(name, tensor, 0), self._fetched(name, tensor, 0)

    def send(self, name: str, value: str, *kept_alive: str) -> Instruction:
        nbytes = self._graph.by_name[value].outputs[0].nbytes
        link = _over(OFFLOAD_OUT, Exchange.SEND, nbytes)
        node = self._call("send", name, f"{name}.send", (value, *kept_alive))
        return self._last_line(replace(node, collective=link))

    def sent(self, name: str, value: str) -> Instruction:
        send = f"{name}.send"
        node = self._call("sent", name, f"{name}.sent", (send, value))
        return self._last_line(replace(node, waits_for=send))

    def _fetch(self, name: str, tensor: Tensor, number: int) -> Instruction:
        link = _over(OFFLOAD_IN, Exchange.FETCH, tensor.nbytes)
        node = self._call("fetch", name, _fetch_of(name, number), (), (tensor,))
        return self._first_line(replace(node, collective=link))

    def _fetched(self, name: str, tensor: Tensor, number: int) -> Instruction:
        fetch = _fetch_of(name, number)
        node = self._call("fetched", name, _numbered(name, number), (fetch,), (tensor,))
        return self._first_line(replace(node, waits_for=fetch))

    def _call(
        self,
        kind: str,
        name: str,
        node_name: str,
        reads: tuple[str, ...],
        outputs: tuple[Tensor, ...] = (),
    ) -> Node:
        # This is not in the forward phase, because names and counts of forward nodes refer to the
        # captured step.
        return Node(
            name=node_name,
            op=f"{OFFLOAD_CALLS}{kind}_{_KINDS.get(name.partition(':')[0], 'state')}",
            args=(name, *(Ref(read) for read in reads)),
            inputs=reads,
            outputs=outputs,
            phase=self._phase,
            path="optimizer" if self._phase is Phase.UPDATE else name.partition(":")[2],
            signature=f"{OFFLOAD_CALLS}{kind}",
        )

    def _first_line(self, node: Node) -> Instruction:
        self._first[node.name] = node
        return _line(node)

    def _last_line(self, node: Node) -> Instruction:
        self._last[node.name] = node
        return _line(node)

    def graph(self) -> Graph:
        """Return the graph with all calls; fetched and dropped inputs are no longer resident."""
        inputs = {node.name: node for node in self._graph.inputs()}
        evicted = {
            t.storage
            for name in {*self._first, *self._dropped}
            if name in inputs
            for t in inputs[name].outputs
        }
        rest = (
            self._instead.get(n.name, n) for n in self._graph.nodes if n.name not in self._first
        )
        return replace(
            self._graph,
            nodes=(*self._first.values(), *rest, *self._last.values()),
            storages=tuple(
                replace(s, role=Role.ACTIVATION) if number in evicted else s
                for number, s in enumerate(self._storages)
            ),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class MadeInSlices:
    """The lines around a product that makes a gradient in slices.

    ``begin`` may run ahead of the product, ``before`` and ``after`` are adjacent to it, and
    ``end`` waits until the last slice is sent.
    """

    begin: Instruction
    before: tuple[Instruction, ...]
    after: tuple[Instruction, ...]
    end: Instruction


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdatedInSlices:
    """The lines before and after those that update a parameter in slices."""

    before: tuple[Instruction, ...]
    after: tuple[Instruction, ...]


_KINDS = {"parameter": "weight", "gradient": "gradient"}


def _over(axis: str, kind: Exchange, nbytes: int, *, pieces: int = 1) -> Collective:
    return Collective(kind=kind, axis=axis, num_ranks=1, sent_bytes=nbytes, hops=pieces)


def _line(node: Node) -> Instruction:
    return Instruction(node=node.name, value=node.name, inputs=node.inputs, phase=node.phase)


def _numbered(name: str, number: int) -> str:
    return f"{name}@{number}" if number else name


def _fetch_of(name: str, number: int) -> str:
    return _numbered(f"{name}.fetch", number)


def interleave(
    lines: Sequence[Instruction],
    *,
    before: Mapping[int, Sequence[Instruction]],
    after: Mapping[int, Sequence[Instruction]],
    instead: Mapping[int, Sequence[Instruction]] = MappingProxyType({}),
) -> list[Instruction]:
    """Return the lines with those inserted before, after and instead of each line number."""
    placed: list[Instruction] = []
    for number, line in enumerate(lines):
        placed += before.get(number, ())
        placed += instead.get(number, (line,))
        placed += after.get(number, ())
    return placed


class Running:
    """Distances between lines, counted in operators that do work.

    Free operators (views, inputs) and transfers do not count.
    """

    def __init__(self, graph: Graph, lines: Sequence[Instruction]) -> None:
        self._at: list[int] = []
        self._so_far: list[int] = []
        self._end = len(lines) - 1
        for number, line in enumerate(lines):
            self._so_far.append(len(self._at))
            node = graph.by_name[line.node]
            if line.sink is None and not node.is_free and not node.is_transfer:
                self._at.append(number)

    def before(self, number: int, count: int) -> int:
        """Return the line that is ``count`` operators before this one."""
        place = self._so_far[number] - count
        return number if not count else self._at[max(0, place)] if self._at else number

    def after(self, number: int, count: int) -> int:
        """Return the last line after this one with at most ``count`` operators in between."""
        place = self._so_far[number] + count
        return self._at[place] - 1 if place < len(self._at) else self._end

    def first_of_runs(self, reads: Sequence[int], lead: int) -> Iterator[int]:
        """Yield the first of each run of lines with gaps of less than ``lead`` operators."""
        last = None
        for number in reads:
            if last is None or self.before(number, lead) > last:
                yield number
            last = number


class OffloadedViews:
    """The views of offloaded values, which are repeated on each fetched copy."""

    def __init__(self, program: Program, offloaded: Iterable[str]) -> None:
        graph = program.graph
        self._graph = graph
        self._source = {name: name for name in offloaded}
        for node in graph.nodes:
            if node.inputs and graph.is_alias(node) and node.inputs[0] in self._source:
                self._source[node.name] = self._source[node.inputs[0]]
        # The key is the value name, so that copies of a view map to the same node.
        self.of = {i.value: i.node for i in program.instructions if i.node in self._source}
        self._number: dict[str, int] = {}
        # The value that currently stands for an offloaded node or a view of it.
        self._current: dict[str, str] = {}

    def reads(self, lines: Sequence[Instruction]) -> dict[str, list[int]]:
        """Return the lines that read each offloaded value or a view of it."""
        found: dict[str, list[int]] = {}
        for number, line in enumerate(lines):
            for source in dict.fromkeys(map(self.offloaded_source, line.inputs)):
                if source:
                    found.setdefault(source, []).append(number)
        return found

    def offloaded_source(self, value: str) -> str:
        """Return the offloaded value that this is, or of which it is a view; otherwise an empty
        string.
        """
        return self._source.get(self.of.get(value, value), "")

    @property
    def names(self) -> frozenset[str]:
        return frozenset(self._source)

    def use_copy(self, source: str, number: int) -> None:
        """Make the following lines read this fetched copy."""
        self._number[source] = number
        self._current = {n: v for n, v in self._current.items() if self._source[n] != source}
        self._current[source] = _numbered(source, number)

    def rewritten(self, line: Instruction) -> list[Instruction]:
        added: list[Instruction] = []
        inputs = tuple(
            self._current_value(self.of.get(i, i), line.phase, added) for i in line.inputs
        )
        return [*added, replace(line, inputs=inputs)]

    def _current_value(self, name: str, phase: Phase, added: list[Instruction]) -> str:
        source = self._source.get(name)
        if source is None:
            return name
        if name not in self._current:
            node = self._graph.by_name[name]
            inputs = tuple(self._current_value(i, phase, added) for i in node.inputs)
            self._current[name] = _numbered(name, self._number[source])
            added.append(
                Instruction(node=name, value=self._current[name], inputs=inputs, phase=phase)
            )
        return self._current[name]


def slices_of(matrix: Tensor, count: int, *, storage: int) -> tuple[Tensor, Collective]:
    """Return the buffer for two slices of a matrix, and the transfer that fetches all slices."""
    rows = rows_in_slice(matrix, count)
    pieces = -(-matrix.shape[0] // rows)
    buffer = replace(
        matrix,
        shape=(min(2, pieces), rows, matrix.shape[1]),
        stride=(0, 0, 0),
        storage=storage,
        offset=0,
    )
    return buffer, _over(OFFLOAD_IN, Exchange.FETCH, matrix.nbytes, pieces=pieces)


def rows_in_slice(tensor: Tensor, count: int) -> int:
    """Return the rows of each slice of a matrix that is cut into ``count`` slices."""
    return rows_of_slice(tensor.shape[0], tensor.nbytes // tensor.shape[0], count)


def rows_of_slice(rows: int, row_bytes: int, count: int) -> int:
    """Return the rows of each slice but the last.

    Each slice begins on a page of offload memory. The number of its rows is a multiple of the
    kernels' vector length, because they become columns of a result.
    """
    step = lcm(OFFLOAD_PAGE_BYTES // gcd(row_bytes, OFFLOAD_PAGE_BYTES), _VECTOR)
    return min(rows, -(-rows // (count * step)) * step)


# Kernels take another code path for the rest of a row beyond a multiple of this number of elements.
_VECTOR = 64
