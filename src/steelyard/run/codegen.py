"""Write a program as Python source: one line per instruction, each value dropped when it dies.

Takes no decisions; the order and the copies are the program's. Not for calling it: see step.py.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from types import MappingProxyType
from typing import Any

import torch

from steelyard.comm.channel import Channel, check_channels
from steelyard.comm.gloo.direct_collectives import DirectCollectives
from steelyard.comm.gloo.thread_scheduling import ThreadScheduling
from steelyard.comm.shared_memory.collectives import SharedMemoryCollectives
from steelyard.errors import BadInput, RunFailed
from steelyard.ir.collective import Exchange
from steelyard.ir.gradient_codec import CODED_CALLS
from steelyard.ir.graph import FAR_CALLS, SENT_PRODUCTS, Argument, Axis, Node, Ref, Symbol
from steelyard.ir.message_slots import rounds_of
from steelyard.ir.parallel_layout import DATA
from steelyard.ir.program import Instruction, Program
from steelyard.offload.activations import Slots
from steelyard.offload.parameters import OffloadedTensors
from steelyard.offload.tier import OffloadFile
from steelyard.operators import copy_laid_out, operator_named
from steelyard.run.fast_bindings import Room, made_in, quickest
from steelyard.run.finite_check import FiniteWatch, places_in, watched

_ALONE: Mapping[str, Channel] = MappingProxyType({})
_GIVE_WAY = "give_way"
# Takes values in a list that it empties, so that what it reads last is freed.
Run = Callable[[list[torch.Tensor]], Sequence[torch.Tensor]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fused:
    """Lines that are carried out in one go; ``source`` is what a compiler made of them."""

    takes: tuple[str, ...]
    gives: tuple[str, ...]
    run: Run
    source: str


Line = Instruction | Fused


@dataclass(frozen=True, slots=True, kw_only=True)
class Emitted:
    """``run(inputs, sinks)`` takes the inputs in the order of ``inputs``, and a callable a sink.
    ``earlier`` is what micro-batches before the last carry out, where that is less; ``carriers``
    are to be told when a step begins: what carries exchanges in place of torch's own calls."""

    source: str
    inputs: tuple[str, ...]
    run: Callable[[Sequence[torch.Tensor], Sequence[Callable[[torch.Tensor], None]]], torch.Tensor]
    earlier: "Emitted | None" = None
    carriers: tuple[SharedMemoryCollectives | DirectCollectives, ...] = ()


def emit(
    program: Program,
    *,
    channels: Mapping[str, Channel] = _ALONE,
    offload_file: OffloadFile | None = None,
    tensors: OffloadedTensors | None = None,
    fusing: Callable[[Program], Iterable[Line]] = lambda program: program.instructions,
    rooms: Mapping[str, Room] = MappingProxyType({}),
    watch: FiniteWatch | None = None,
) -> Emitted:
    """``channels`` are the live process groups of the mesh axes that the program speaks over,
    ``tensors`` the weights and gradients that lie in offload memory; ``fusing`` puts lines
    together; ``rooms`` say of nodes where what they make may lie; ``watch`` sees what is exchanged
    before it is."""
    check_channels(program, channels)
    slots = _slots(program, offload_file)
    carriers = _carriers(program, channels)
    channels = {**channels, **{axis: carrier.channel for axis, carrier in carriers.items()}}

    def emitted(program: Program) -> Emitted:
        return _emitted(
            _Writer(program, tuple(fusing(program)), channels, slots, tensors, rooms, watch)
        )

    whole = replace(emitted(program), carriers=tuple(carriers.values()))
    if program.earlier is program:
        return whole
    return replace(whole, earlier=emitted(program.earlier))


def _carriers(
    program: Program, channels: Mapping[str, Channel]
) -> dict[str, SharedMemoryCollectives | DirectCollectives]:
    """Of the axes that it speaks over. Where nothing is really exchanged, there are calls."""
    nodes, carriers = (
        program.graph.by_name,
        dict[str, SharedMemoryCollectives | DirectCollectives](),
    )
    issued = (nodes[program.instructions[one.issue].node].collective for one in program.exchanges)
    rounds = rounds_of(program.graph)
    for axis in sorted({c.axis for c in issued if c is not None and not c.is_far}):
        channel = channels[axis]
        if channel.calls:
            continue
        if axis in rounds:
            carriers[axis] = SharedMemoryCollectives(rounds[axis], channel)
        elif DirectCollectives.can(channel):
            carriers[axis] = DirectCollectives(channel)
    return carriers


def _emitted(writer: "_Writer") -> Emitted:
    source = writer.source()
    scope: dict[str, Any] = dict(writer.scope)
    exec(compile(source, "<steelyard program>", "exec"), scope)
    source = "\n".join((source, *(line.source for line in writer.fused)))
    return Emitted(source=source, inputs=tuple(writer.inputs), run=scope["run"])


def _slots(program: Program, offload_file: OffloadFile | None) -> Slots | None:
    """Room in offload memory for what the program moves; its sends number the slots."""
    nodes = program.graph.by_name
    sizes = {
        nodes[i.node].args[0]: c.sent_bytes
        for i in program.instructions
        if i.sink is None
        and (c := nodes[i.node].collective)
        and c.kind is Exchange.SEND
        and isinstance(nodes[i.node].args[0], int)
    }
    if not sizes:
        return None
    if offload_file is None:
        raise BadInput(
            f"the plan moves {len(sizes)} values to offload memory, and none is named",
            expected="a folder on a disk for them, as the plan was made for",
            remedy="name it: --offload-dir DIR, or, in Python, "
            'Cluster.here(far=OffloadMemory("/scratch", ...))',
        )
    return Slots.of(offload_file, [sizes[slot] for slot in range(len(sizes))])


class _Writer:
    def __init__(
        self,
        program: Program,
        lines: Sequence[Line],
        channels: Mapping[str, Channel],
        slots: Slots | None,
        tensors: OffloadedTensors | None,
        rooms: Mapping[str, Room],
        watch: FiniteWatch | None = None,
    ) -> None:
        self._program, self._rooms = program, rooms
        self._watch = watch
        self._watched = places_in(program.graph) if watch is not None else {}
        self._lines = lines
        self.fused = tuple(line for line in lines if isinstance(line, Fused))
        self._channels = channels
        self._slots = slots
        self._tensors = tensors
        self._names: dict[str, str] = {}
        self._operators: dict[Callable[..., Any], str] = {}
        self.scope: dict[str, Any] = {"torch": torch, "inf": float("inf"), "nan": float("nan")}
        self.inputs = [node.name for node in program.graph.inputs()]

    def source(self) -> str:
        arguments = [self._name(name) for name in self.inputs]
        lines = ["def run(inputs, sinks):"]
        if arguments:
            lines.append(f"    {', '.join(arguments)}, = inputs")
        deaths, giving = self._deaths(), self._gives_way()
        if giving:
            self.scope[_GIVE_WAY] = ThreadScheduling()
        sinks = 0
        for index, line in enumerate(self._lines):
            dead = deaths[index]
            if isinstance(line, Fused):
                lines += self._go(line, dead)
                dead = [value for value in dead if value in line.gives]
            elif line.sink is not None:
                lines.append(f"    sinks[{sinks}]({self._name(line.inputs[0])})")
                sinks += 1
            else:
                lines.append(f"    {self._name(line.value)} = {self._call(line)}")
            if index in giving:
                lines.append(f"    {_GIVE_WAY}()")
            if dead:
                lines.append(f"    del {', '.join(self._name(v) for v in dead)}")
        lines.append(f"    return {self._name(self._program.loss) if self._program.loss else None}")
        return "\n".join(lines) + "\n"

    def _go(self, line: Fused, dead: Sequence[str]) -> list[str]:
        """The call, after which nothing here holds what it reads last."""
        name = f"go_{self.fused.index(line)}"
        self.scope[name] = line.run
        last = [self._name(value) for value in dead if value not in line.gives]
        given = f"{', '.join(map(self._name, line.gives))}, = " if line.gives else ""
        return [
            f"    taken = [{', '.join(map(self._as_compiled, line.takes))}]",
            *([f"    del {', '.join(last)}"] if last else []),
            f"    {given}{name}(taken)",
        ]

    def _as_compiled(self, value: str) -> str:
        """What was made by a line that stands alone has the strides that it was captured with, as
        those lines that are compiled were told; where its storage begins, they do not ask."""
        node = self._standing.get(value)
        if node is None or node.collective is not None or node.waits_for:
            return self._name(value)
        (planned,) = node.outputs
        self.scope["as_told"] = as_told
        return f"as_told({self._name(value)}, {planned.stride!r})"

    @cached_property
    def _standing(self) -> dict[str, Node]:
        nodes = self._program.graph.by_name
        return {
            line.value: nodes[line.node] for line in self._lines if isinstance(line, Instruction)
        }

    def _gives_way(self) -> frozenset[int]:
        """Behind which lines those have a turn who carry what is on its way: such as take time."""
        nodes = self._program.graph.by_name
        issued: dict[str, int] = {}
        moving: set[int] = set()
        for index, line in enumerate(self._lines):
            if isinstance(line, Fused) or line.sink is not None:
                continue
            node = nodes[line.node]
            if node.collective is not None and not node.collective.is_far:
                issued[line.value] = index
            elif node.waits_for and (issue := issued.get(line.inputs[0])) is not None:
                moving.update(range(issue + 1, index))
        return frozenset(i for i in moving if self._takes_time(self._lines[i]))

    def _takes_time(self, line: Line) -> bool:
        if isinstance(line, Fused):
            return True
        return line.sink is None and not self._program.graph.by_name[line.node].is_free

    def _deaths(self) -> list[list[str]]:
        """The values that nothing reads after each line; the loss and the inputs live on."""
        last: dict[str, int] = {}
        for index, line in enumerate(self._lines):
            made, read = _made_and_read(line)
            last.update(dict.fromkeys((*made, *read), index))
        kept = {node.name for node in self._program.graph.inputs()} | {self._program.loss}
        deaths: list[list[str]] = [[] for _ in self._lines]
        for name, index in last.items():
            if name not in kept:
                deaths[index].append(name)
        return deaths

    def _call(self, instruction: Instruction) -> str:
        node = self._program.graph.by_name[instruction.node]
        values = dict(zip(node.inputs, instruction.inputs, strict=True))
        if _is_identity(self._program, node):
            return self._name(values[node.inputs[0]])
        args = [self._argument(a, values) for a in node.args]
        if node.op in _BY_STRIDES:
            args[0] = self._laid_out(args[0], node.inputs[0])
        if node.is_getitem:
            return f"{args[0]}[{args[1]}]"
        args += [f"{key}={self._argument(a, values)}" for key, a in node.kwargs]
        return f"{self._operator(node)}({', '.join(args)})"

    def _laid_out(self, argument: str, of: str) -> str:
        """What is read by strides lies as it was captured, whatever its kernel made of it."""
        (planned,) = self._program.graph.by_name[of].outputs
        self.scope["as_captured"] = as_captured
        return f"as_captured({argument}, {planned.stride!r}, {planned.offset})"

    def _argument(self, argument: Argument, values: dict[str, str]) -> str:
        match argument:
            case Ref(name):
                return self._name(values[name])
            case Symbol(text):
                return text
            case Axis(name):
                return repr(self._channels[name].group)
            case tuple():
                return f"[{', '.join(self._argument(a, values) for a in argument)}]"
        return repr(argument)

    def _operator(self, node: Node) -> str:
        call = self._far_call(node) or self._exchanging(node) or self._computing(node)
        if self._watch is not None and node.name in self._watched:
            call = watched(call, self._watch, self._watched[node.name])
        name = self._operators.get(call)
        if name is None:
            name = self._operators[call] = f"{node.op.split('.')[1]}_{len(self._operators)}"
            self.scope[name] = call
        return name

    def _computing(self, node: Node) -> Callable[..., Any]:
        room = self._rooms.get(node.name)
        return quickest(node) if room is None else made_in(room, node)

    def _far_call(self, node: Node) -> Callable[..., Any] | None:
        if node.is_far_product:
            (names, *_), body = node.args, node.body
            assert isinstance(names, tuple)
            assert body is not None
            # Of one loop all are of the one kind, or all of the other.
            caller = self._caller(names[0])
            assert caller is not None
            return caller.products.carrying_out(body)
        if node.op == SENT_PRODUCTS:
            assert self._tensors is not None
            return self._tensors.gradients.rows
        if not node.is_far:
            return None
        caller = self._caller(node.args[0])
        bound: Callable[..., Any] = getattr(caller, node.op.removeprefix(FAR_CALLS))
        return bound

    def _exchanging(self, node: Node) -> Callable[..., Any] | None:
        """What waits for other ranks or codes for them, and counts for how long; and what stands in
        place of torch's own calls."""
        if node.is_far:
            return None
        if node.op in CODED_CALLS and DATA in self._channels:
            return self._channels[DATA].coding.timed(operator_named(node.op))
        if node.collective is not None:
            return self._channels[node.collective.axis].calls.get(node.op)
        if not node.waits_for:
            return None
        collective = self._program.graph.by_name[node.waits_for].collective
        assert collective is not None
        return self._channels[collective.axis].waiting

    def _caller(self, name: Argument) -> OffloadedTensors | Slots | None:
        """What has a place for good is named; what has one for a step has a number."""
        return self._tensors if isinstance(name, str) else self._slots

    def _name(self, value: str) -> str:
        name = self._names.get(value)
        if name is None:
            name = self._names[value] = f"v{len(self._names)}"
        return name


_BY_STRIDES = frozenset({"aten.as_strided.default", "aten.as_strided_copy.default"})


def as_captured(x: torch.Tensor, stride: tuple[int, ...], offset: int) -> torch.Tensor:
    if x.stride() == stride and x.storage_offset() == offset:
        return x
    if offset:
        raise RunFailed(
            f"a value lies in memory with strides {x.stride()} at {x.storage_offset()}",
            expected=f"strides {stride} at {offset}, as torch described it when it was captured",
            remedy="report this model: an operator in it is described wrongly",
        )
    return copy_laid_out(x, list(x.shape), list(stride))


def as_told(x: torch.Tensor, stride: tuple[int, ...]) -> torch.Tensor:
    if all(n < 2 or a == b for n, a, b in zip(x.shape, x.stride(), stride, strict=True)):
        return x
    return copy_laid_out(x, list(x.shape), list(stride))


# Views that differ from their argument in shape and strides only; a conjugate does not, and counts.
_RESHAPING = frozenset({
    "aten.expand.default", "aten.permute.default", "aten.slice.Tensor", "aten.squeeze.dim",
    "aten.squeeze.dims", "aten.transpose.int", "aten.view.default",
})  # fmt: skip


def _is_identity(program: Program, node: Node) -> bool:
    """A view that is its argument over again (``expand`` to the same shape) needs no call."""
    if node.op not in _RESHAPING or not node.is_view:
        return False
    return node.outputs == program.graph.by_name[node.inputs[0]].outputs


def _made_and_read(line: Line) -> tuple[Sequence[str], Sequence[str]]:
    if isinstance(line, Fused):
        return line.gives, line.takes
    return ([] if line.sink is not None else [line.value]), line.inputs
