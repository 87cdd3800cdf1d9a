"""The calls by which tensors come from offload memory and go there, and the lines between them.

Not for where the calls go: see state_transfers.py, sliced_weight_matmuls.py,
sliced_activation_matmuls.py and sliced_gradients.py.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import gcd, lcm
from types import MappingProxyType

from steelyard.hardware.cluster import FAR_IN, FAR_OUT, OFFLOAD_PAGE_BYTES
from steelyard.ir.collective import Collective, Exchange
from steelyard.ir.graph import (
    FAR_CALLS,
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
    """The calls by which each of these comes and goes. What is fetched first has the name of what
    was there before, so that whatever reads it need not change."""

    def __init__(self, graph: Graph, phase: Phase) -> None:
        self._graph = graph
        self._phase = phase
        self._first: dict[str, Node] = {}
        self._last: dict[str, Node] = {}
        self._instead: dict[str, Node] = {}
        self._gone: frozenset[str] = frozenset()
        self._storages = list(graph.storages)

    def fetch(self, name: str, number: int = 0) -> Instruction:
        return self._fetch(name, self._graph.by_name[name].outputs[0], number)

    def fetched(self, name: str, number: int = 0) -> Instruction:
        return self._fetched(name, self._graph.by_name[name].outputs[0], number)

    def drop(self, names: frozenset[str]) -> None:
        """Nothing reads these any more; they are not near."""
        self._gone = names

    def slices(self, weight: str, number: int, count: int) -> tuple[Instruction, Instruction]:
        """Begin to fetch, in room for two slices; let them go."""
        (tensor,) = self._graph.by_name[weight].outputs
        room, link = slices_of(tensor, count, storage=len(self._storages))
        self._storages.append(Storage(nbytes=room.nbytes, role=Role.ACTIVATION))
        begin = self._call("begin", weight, _fetch_of(weight, number), (), (room,))
        begin = replace(begin, args=(weight, count), collective=link)
        end = self._call("end", weight, _numbered(f"{weight}.end", number), (begin.name,))
        return self._first_line(begin), self._last_line(replace(end, waits_for=begin.name))

    def made_in_slices(self, gradient: str, value: str, count: int) -> "MadeInSlices":
        """Make this value some rows at a time, and send each, in room for two slices."""
        (tensor,) = self._graph.by_name[value].outputs
        room = self._room(tensor, rows_in_slice(tensor, count), slices=2)
        begin = self._begin(gradient, count, room, _over(FAR_OUT, Exchange.SEND, tensor.nbytes))
        end = self._call("end", gradient, f"{gradient}.end", (begin.name,))
        return MadeInSlices(
            begin=self._first_line(begin),
            before=(),
            behind=(),
            end=self._last_line(replace(end, waits_for=begin.name)),
        )

    def added_in_slices(self, gradient: str, value: str, count: int) -> "MadeInSlices":
        """The same, and each slice is fetched first and added to: a third one is what is added."""
        (tensor,) = self._graph.by_name[value].outputs
        room = self._room(tensor, rows_in_slice(tensor, count), slices=3)
        begin = self._begin(gradient, count, room, _over(FAR_IN, Exchange.FETCH, tensor.nbytes))
        leave = self._leave(gradient, tensor.nbytes)
        arrived = self._call("arrived", gradient, gradient, (begin.name,), (room,))
        end = self._call("end", gradient, f"{gradient}.end", (leave.name, gradient))
        return MadeInSlices(
            begin=self._first_line(begin),
            before=(self._first_line(leave),),
            behind=(self._first_line(replace(arrived, waits_for=begin.name)),),
            end=self._last_line(replace(end, waits_for=leave.name)),
        )

    def updated_in_slices(self, names: Sequence[str], count: int, rows: int) -> "UpdatedInSlices":
        """Fetch some rows of each of these, change them and send them back, in room for two slices
        of each. Gradients are not sent back.

        What is changed lies in the room from the start: the lines that change it run beside the
        fetch of most slices, and before the send of most.
        """
        before: list[Instruction] = []
        behind: list[Instruction] = []
        ends: list[Instruction] = []
        for name in names:
            (tensor,) = self._graph.by_name[name].outputs
            self.shrink(tensor.storage, 2 * rows * tensor.nbytes // tensor.shape[0])
            fetch = _over(FAR_IN, Exchange.FETCH, tensor.nbytes)
            begin = replace(self._begin(name, count, tensor, fetch), outputs=())
            room = replace(self._call("room", name, name, (), (tensor,)), args=(name, count))
            arrived = self._call("arrived", name, f"{name}.arrived", (begin.name,))
            before += [self._first_line(begin), self._first_line(room)]
            ends.append(self._last_line(replace(arrived, waits_for=begin.name)))
            if not name.startswith("gradient:"):
                leave = self._leave(name, tensor.nbytes)
                end = self._call("end", name, f"{name}.end", (leave.name, name))
                behind.append(self._first_line(leave))
                ends.append(self._last_line(replace(end, waits_for=leave.name)))
        return UpdatedInSlices(before=tuple(before), behind=(*behind, *ends))

    def shrink(self, storage: int, nbytes: int) -> None:
        """What is made on it, of some rows at a time."""
        self._storages[storage] = replace(self._storages[storage], nbytes=nbytes)

    def _room(self, tensor: Tensor, rows: int, *, slices: int) -> Tensor:
        room = replace(tensor, shape=(slices, rows, tensor.shape[1]), stride=(0, 0, 0))
        self._storages.append(Storage(nbytes=room.nbytes, role=Role.ACTIVATION))
        return replace(room, storage=len(self._storages) - 1)

    def _begin(self, name: str, count: int, room: Tensor, link: Collective) -> Node:
        node = self._call("begin", name, f"{name}.begin", (), (room,))
        return replace(node, args=(name, count), collective=link)

    def _leave(self, name: str, nbytes: int) -> Node:
        """On the link from now on: each slice as soon as it is there."""
        node = self._call("leave", name, f"{name}.leave", ())
        return replace(node, collective=_over(FAR_OUT, Exchange.SEND, nbytes))

    def instead(self, node: Node) -> Instruction:
        """A call that takes the place of the one with its name."""
        self._instead[node.name] = node
        return _line(node)

    def add(self, *nodes: Node) -> None:
        self._last.update((node.name, node) for node in nodes)

    def before(self, name: str, value: str) -> tuple[Instruction, Instruction]:
        """Fetch what this value is added to, in room of its own."""
        (tensor,) = self._graph.by_name[value].outputs
        self._storages.append(Storage(nbytes=tensor.nbytes, role=Role.ACTIVATION))
        tensor = replace(tensor, storage=len(self._storages) - 1)
        return self._fetch(name, tensor, 0), self._fetched(name, tensor, 0)

    def send(self, name: str, value: str, *held: str) -> Instruction:
        nbytes = self._graph.by_name[value].outputs[0].nbytes
        link = _over(FAR_OUT, Exchange.SEND, nbytes)
        node = self._call("send", name, f"{name}.send", (value, *held))
        return self._last_line(replace(node, collective=link))

    def sent(self, name: str, value: str) -> Instruction:
        send = f"{name}.send"
        node = self._call("sent", name, f"{name}.sent", (send, value))
        return self._last_line(replace(node, waits_for=send))

    def _fetch(self, name: str, tensor: Tensor, number: int) -> Instruction:
        link = _over(FAR_IN, Exchange.FETCH, tensor.nbytes)
        node = self._call("fetch", name, _fetch_of(name, number), (), (tensor,))
        return self._first_line(replace(node, collective=link))

    def _fetched(self, name: str, tensor: Tensor, number: int) -> Instruction:
        fetch = _fetch_of(name, number)
        node = self._call("fetched", name, _numbered(name, number), (fetch,), (tensor,))
        return self._first_line(replace(node, waits_for=fetch))

    def _call(
        self,
        what: str,
        name: str,
        called: str,
        reads: tuple[str, ...],
        outputs: tuple[Tensor, ...] = (),
    ) -> Node:
        # Not of the forward pass: whatever names or counts that sees the step as captured.
        return Node(
            name=called,
            op=f"{FAR_CALLS}{what}_{_KINDS.get(name.partition(':')[0], 'state')}",
            args=(name, *(Ref(read) for read in reads)),
            inputs=reads,
            outputs=outputs,
            phase=self._phase,
            path="optimizer" if self._phase is Phase.UPDATE else name.partition(":")[2],
            signature=f"{FAR_CALLS}{what}",
        )

    def _first_line(self, node: Node) -> Instruction:
        self._first[node.name] = node
        return _line(node)

    def _last_line(self, node: Node) -> Instruction:
        self._last[node.name] = node
        return _line(node)

    def graph(self) -> Graph:
        """With what is fetched no longer there from the start."""
        inputs = {node.name: node for node in self._graph.inputs()}
        gone = {
            t.storage
            for name in {*self._first, *self._gone}
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
                replace(s, role=Role.ACTIVATION) if number in gone else s
                for number, s in enumerate(self._storages)
            ),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class MadeInSlices:
    """What begins before the product that makes a gradient, stands right before it and right behind
    it, and ends when the last slice is gone."""

    begin: Instruction
    before: tuple[Instruction, ...]
    behind: tuple[Instruction, ...]
    end: Instruction


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdatedInSlices:
    """What stands before the lines that update a parameter in slices, and behind them."""

    before: tuple[Instruction, ...]
    behind: tuple[Instruction, ...]


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
    behind: Mapping[int, Sequence[Instruction]],
    instead: Mapping[int, Sequence[Instruction]] = MappingProxyType({}),
) -> list[Instruction]:
    """The lines with what goes before, behind and in the place of each, by its number."""
    placed: list[Instruction] = []
    for number, line in enumerate(lines):
        placed += before.get(number, ())
        placed += instead.get(number, (line,))
        placed += behind.get(number, ())
    return placed


class Running:
    """Lines counted in operators that run."""

    def __init__(self, graph: Graph, lines: Sequence[Instruction]) -> None:
        self._at: list[int] = []
        self._so_far: list[int] = []
        self._end = len(lines) - 1
        for number, line in enumerate(lines):
            self._so_far.append(len(self._at))
            node = graph.by_name[line.node]
            if line.sink is None and not node.is_free and not node.is_far:
                self._at.append(number)

    def before(self, number: int, count: int) -> int:
        """The line so many operators before this one."""
        place = self._so_far[number] - count
        return number if not count else self._at[max(0, place)] if self._at else number

    def behind(self, number: int, count: int) -> int:
        """The last line behind this one with no more than so many operators between."""
        place = self._so_far[number] + count
        return self._at[place] - 1 if place < len(self._at) else self._end

    def apart(self, reads: Sequence[int], lead: int) -> Iterator[int]:
        """The first of each run of lines that are less than ``lead`` operators apart."""
        last = None
        for number in reads:
            if last is None or self.before(number, lead) > last:
                yield number
            last = number


class Looks:
    """Values that look at some others that lie far; they look anew at each copy that is fetched."""

    def __init__(self, program: Program, far: Iterable[str]) -> None:
        graph = program.graph
        self._graph = graph
        self._far = {name: name for name in far}
        for node in graph.nodes:
            if node.inputs and graph.is_look(node) and node.inputs[0] in self._far:
                self._far[node.name] = self._far[node.inputs[0]]
        # By value: of copies too, which stand for the same.
        self.of = {i.value: i.node for i in program.instructions if i.node in self._far}
        self._number: dict[str, int] = {}
        self._made: dict[str, str] = {}

    def reads(self, lines: Sequence[Instruction]) -> dict[str, list[int]]:
        """The lines that read each, or a look at it."""
        found: dict[str, list[int]] = {}
        for number, line in enumerate(lines):
            for far in dict.fromkeys(map(self.far_of, line.inputs)):
                if far:
                    found.setdefault(far, []).append(number)
        return found

    def far_of(self, value: str) -> str:
        return self._far.get(self.of.get(value, value), "")

    @property
    def names(self) -> frozenset[str]:
        return frozenset(self._far)

    def begin_anew(self, far: str, number: int) -> None:
        """From here on it is this copy that is read."""
        self._number[far] = number
        self._made = {n: v for n, v in self._made.items() if self._far[n] != far}
        self._made[far] = _numbered(far, number)

    def rewritten(self, line: Instruction) -> list[Instruction]:
        added: list[Instruction] = []
        inputs = tuple(self._now(self.of.get(i, i), line.phase, added) for i in line.inputs)
        return [*added, replace(line, inputs=inputs)]

    def _now(self, name: str, phase: Phase, added: list[Instruction]) -> str:
        far = self._far.get(name)
        if far is None:
            return name
        if name not in self._made:
            node = self._graph.by_name[name]
            inputs = tuple(self._now(i, phase, added) for i in node.inputs)
            self._made[name] = _numbered(name, self._number[far])
            added.append(Instruction(node=name, value=self._made[name], inputs=inputs, phase=phase))
        return self._made[name]


def slices_of(matrix: Tensor, count: int, *, storage: int) -> tuple[Tensor, Collective]:
    """The room that two slices of it take, and what brings them all."""
    rows = rows_in_slice(matrix, count)
    pieces = -(-matrix.shape[0] // rows)
    room = replace(
        matrix,
        shape=(min(2, pieces), rows, matrix.shape[1]),
        stride=(0, 0, 0),
        storage=storage,
        offset=0,
    )
    return room, _over(FAR_IN, Exchange.FETCH, matrix.nbytes, pieces=pieces)


def rows_in_slice(tensor: Tensor, count: int) -> int:
    """Of a matrix in so many slices."""
    return rows_of_slice(tensor.shape[0], tensor.nbytes // tensor.shape[0], count)


def rows_of_slice(rows: int, row_bytes: int, count: int) -> int:
    """Of each slice but the last: so many that each begins on a page of offload memory, and that so
    many columns are whole vectors to a kernel."""
    step = lcm(OFFLOAD_PAGE_BYTES // gcd(row_bytes, OFFLOAD_PAGE_BYTES), _VECTOR)
    return min(rows, -(-rows // (count * step)) * step)


# Kernels go another way for what is left of a row beyond so many elements.
_VECTOR = 64
