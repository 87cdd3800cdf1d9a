"""Generates Python source from a program: one line per instruction; each value is deleted after its
last use.

It makes no decisions: the program determines the order and the copies. Not for running the source:
see step.py.
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
from steelyard.ir.graph import MATMUL_SEND, OFFLOAD_CALLS, Argument, Axis, Node, Ref, Symbol
from steelyard.ir.message_slots import rounds_of
from steelyard.ir.parallel_layout import DATA
from steelyard.ir.program import Instruction, Program
from steelyard.offload.activations import Slots
from steelyard.offload.parameters import OffloadedTensors
from steelyard.offload.tier import OffloadFile
from steelyard.operators import copy_strided, operator_named
from steelyard.run.fast_bindings import OutputBuffer, fastest_call, writing_into
from steelyard.run.finite_check import FiniteWatch, checked_call, finite_check_places

_NO_CHANNELS: Mapping[str, Channel] = MappingProxyType({})
_GIVE_WAY = "give_way"
# Takes its inputs in a list that it empties, so that each input can be freed after its last use.
Run = Callable[[list[torch.Tensor]], Sequence[torch.Tensor]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fused:
    """Instructions compiled into one call; ``source`` is the code that the compiler generated."""

    takes: tuple[str, ...]
    gives: tuple[str, ...]
    run: Run
    source: str


Line = Instruction | Fused


@dataclass(frozen=True, slots=True, kw_only=True)
class Emitted:
    """Generated code: ``run(inputs, sinks)`` takes values in the order of ``inputs`` and one
    callable per sink.

    ``earlier`` is the code for all micro-batches but the last, if that code does less. ``carriers``
    replace torch's own collectives; their ``begin()`` must be called at the start of each step.
    """

    source: str
    inputs: tuple[str, ...]
    run: Callable[[Sequence[torch.Tensor], Sequence[Callable[[torch.Tensor], None]]], torch.Tensor]
    earlier: "Emitted | None" = None
    carriers: tuple[SharedMemoryCollectives | DirectCollectives, ...] = ()


def emit(
    program: Program,
    *,
    channels: Mapping[str, Channel] = _NO_CHANNELS,
    offload_file: OffloadFile | None = None,
    tensors: OffloadedTensors | None = None,
    fusing: Callable[[Program], Iterable[Line]] = lambda program: program.instructions,
    output_buffers: Mapping[str, OutputBuffer] = MappingProxyType({}),
    watch: FiniteWatch | None = None,
) -> Emitted:
    """Generate and compile the Python code of a program.

    ``channels`` are the live process groups of the mesh axes over which the program communicates.
    ``tensors`` are the offloaded weights and gradients. ``fusing`` groups instructions into fused
    calls. ``output_buffers`` provide memory for the results of some nodes. ``watch`` checks values
    before they are exchanged.
    """
    check_channels(program, channels)
    slots = _slots(program, offload_file)
    carriers = _carriers(program, channels)
    channels = {**channels, **{axis: carrier.channel for axis, carrier in carriers.items()}}

    def emitted(program: Program) -> Emitted:
        return _emitted(
            _Writer(
                program, tuple(fusing(program)), channels, slots, tensors, output_buffers, watch
            )
        )

    complete = replace(emitted(program), carriers=tuple(carriers.values()))
    if program.earlier is program:
        return complete
    return replace(complete, earlier=emitted(program.earlier))


def _carriers(
    program: Program, channels: Mapping[str, Channel]
) -> dict[str, SharedMemoryCollectives | DirectCollectives]:
    """Return the collectives that replace torch's own, by mesh axis. Simulated channels have
    none."""
    nodes, carriers = (
        program.graph.by_name,
        dict[str, SharedMemoryCollectives | DirectCollectives](),
    )
    issued = (nodes[program.instructions[one.issue].node].collective for one in program.exchanges)
    rounds = rounds_of(program.graph)
    for axis in sorted({c.axis for c in issued if c is not None and not c.is_transfer}):
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
    """Reserve offload memory for the values that the program offloads; the slots are numbered in
    the order of its sends.
    """
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
            f"the plan offloads {len(sizes)} values, but no offload memory was given",
            expected="a folder on a disk, as in the plan",
            remedy="name it: --offload-dir DIR, or, in Python, "
            'Cluster.here(offload_memory=OffloadMemory("/scratch", ...))',
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
        output_buffers: Mapping[str, OutputBuffer],
        watch: FiniteWatch | None = None,
    ) -> None:
        self._program, self._output_buffers = program, output_buffers
        self._watch = watch
        self._checked_nodes = finite_check_places(program.graph) if watch is not None else {}
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
        deaths, yield_points = self._deaths(), self._yield_points()
        if yield_points:
            self.scope[_GIVE_WAY] = ThreadScheduling()
        sinks = 0
        for index, line in enumerate(self._lines):
            dead = deaths[index]
            if isinstance(line, Fused):
                lines += self._fused_call(line, dead)
                dead = [value for value in dead if value in line.gives]
            elif line.sink is not None:
                lines.append(f"    sinks[{sinks}]({self._name(line.inputs[0])})")
                sinks += 1
            else:
                lines.append(f"    {self._name(line.value)} = {self._call(line)}")
            if index in yield_points:
                lines.append(f"    {_GIVE_WAY}()")
            if dead:
                lines.append(f"    del {', '.join(self._name(v) for v in dead)}")
        lines.append(f"    return {self._name(self._program.loss) if self._program.loss else None}")
        return "\n".join(lines) + "\n"

    def _fused_call(self, line: Fused, dead: Sequence[str]) -> list[str]:
        """Return the source lines of a fused call; inputs whose last use it is are deleted before
        the call.
        """
        name = f"go_{self.fused.index(line)}"
        self.scope[name] = line.run
        last = [self._name(value) for value in dead if value not in line.gives]
        assigned = f"{', '.join(map(self._name, line.gives))}, = " if line.gives else ""
        return [
            f"    taken = [{', '.join(map(self._fused_argument, line.takes))}]",
            *([f"    del {', '.join(last)}"] if last else []),
            f"    {assigned}{name}(taken)",
        ]

    def _fused_argument(self, value: str) -> str:
        """Return an argument of a fused call, with the strides that it had at capture.

        Fused code is compiled for these strides, with any storage offset; values made by uncompiled
        lines may have other strides.
        """
        node = self._uncompiled.get(value)
        if node is None or node.collective is not None or node.waits_for:
            return self._name(value)
        (planned,) = node.outputs
        self.scope["with_strides"] = with_strides
        return f"with_strides({self._name(value)}, {planned.stride!r})"

    @cached_property
    def _uncompiled(self) -> dict[str, Node]:
        nodes = self._program.graph.by_name
        return {
            line.value: nodes[line.node] for line in self._lines if isinstance(line, Instruction)
        }

    def _yield_points(self) -> frozenset[int]:
        """Return the lines that compute while a collective is in flight; after each of them, the
        core is yielded to gloo's threads.
        """
        nodes = self._program.graph.by_name
        issued: dict[str, int] = {}
        in_flight: set[int] = set()
        for index, line in enumerate(self._lines):
            if isinstance(line, Fused) or line.sink is not None:
                continue
            node = nodes[line.node]
            if node.collective is not None and not node.collective.is_transfer:
                issued[line.value] = index
            elif node.waits_for and (issue := issued.get(line.inputs[0])) is not None:
                in_flight.update(range(issue + 1, index))
        return frozenset(i for i in in_flight if self._takes_time(self._lines[i]))

    def _takes_time(self, line: Line) -> bool:
        if isinstance(line, Fused):
            return True
        return line.sink is None and not self._program.graph.by_name[line.node].is_free

    def _deaths(self) -> list[list[str]]:
        """Return, for each line, the values that no later line reads; the loss and the inputs stay
        alive.
        """
        last: dict[str, int] = {}
        for index, line in enumerate(self._lines):
            made, read = _made_and_read(line)
            last.update(dict.fromkeys((*made, *read), index))
        persistent = {node.name for node in self._program.graph.inputs()} | {self._program.loss}
        deaths: list[list[str]] = [[] for _ in self._lines]
        for name, index in last.items():
            if name not in persistent:
                deaths[index].append(name)
        return deaths

    def _call(self, instruction: Instruction) -> str:
        node = self._program.graph.by_name[instruction.node]
        values = dict(zip(node.inputs, instruction.inputs, strict=True))
        if _is_identity(self._program, node):
            return self._name(values[node.inputs[0]])
        args = [self._argument(a, values) for a in node.args]
        if node.op in _BY_STRIDES:
            args[0] = self._restrided(args[0], node.inputs[0])
        if node.is_getitem:
            return f"{args[0]}[{args[1]}]"
        args += [f"{key}={self._argument(a, values)}" for key, a in node.kwargs]
        return f"{self._operator(node)}({', '.join(args)})"

    def _restrided(self, argument: str, of: str) -> str:
        """Return the argument of an ``as_strided`` call in its captured layout, since its kernel
        may have chosen another.
        """
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
        call = self._offload_call(node) or self._exchange_call(node) or self._compute_call(node)
        if self._watch is not None and node.name in self._checked_nodes:
            call = checked_call(call, self._watch, self._checked_nodes[node.name])
        name = self._operators.get(call)
        if name is None:
            name = self._operators[call] = f"{node.op.split('.')[1]}_{len(self._operators)}"
            self.scope[name] = call
        return name

    def _compute_call(self, node: Node) -> Callable[..., Any]:
        buffer = self._output_buffers.get(node.name)
        return fastest_call(node) if buffer is None else writing_into(buffer, node)

    def _offload_call(self, node: Node) -> Callable[..., Any] | None:
        if node.is_fetch_matmul:
            (names, *_), body = node.args, node.body
            assert isinstance(names, tuple)
            assert body is not None
            # All operands of a loop are of the same kind: persistent, or for one step.
            owner = self._offload_owner(names[0])
            assert owner is not None
            return owner.products.carrying_out(body)
        if node.op == MATMUL_SEND:
            assert self._tensors is not None
            return self._tensors.gradients.rows
        if not node.is_transfer:
            return None
        owner = self._offload_owner(node.args[0])
        bound: Callable[..., Any] = getattr(owner, node.op.removeprefix(OFFLOAD_CALLS))
        return bound

    def _exchange_call(self, node: Node) -> Callable[..., Any] | None:
        """Return the call for a collective, a wait or a gradient codec; the call is timed, or
        replaces torch's own.
        """
        if node.is_transfer:
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

    def _offload_owner(self, name: Argument) -> OffloadedTensors | Slots | None:
        """Return the owner of an offloaded value: named values persist over steps, numbered ones
        are slots for one step.
        """
        return self._tensors if isinstance(name, str) else self._slots

    def _name(self, value: str) -> str:
        name = self._names.get(value)
        if name is None:
            name = self._names[value] = f"v{len(self._names)}"
        return name


_BY_STRIDES = frozenset({"aten.as_strided.default", "aten.as_strided_copy.default"})


def as_captured(x: torch.Tensor, stride: tuple[int, ...], offset: int) -> torch.Tensor:
    """Return ``x`` with the captured strides, copied if needed; raise RunFailed if a storage
    offset differs."""
    if x.stride() == stride and x.storage_offset() == offset:
        return x
    if offset:
        raise RunFailed(
            f"a value has strides {x.stride()} at offset {x.storage_offset()}",
            expected=f"strides {stride} at offset {offset}, as torch described the value when it "
            "was captured",
            remedy="report this model: torch described one of its operators incorrectly",
        )
    return copy_strided(x, list(x.shape), list(stride))


def with_strides(x: torch.Tensor, stride: tuple[int, ...]) -> torch.Tensor:
    """Return ``x`` with these strides, copied if its own are different."""
    if all(n < 2 or a == b for n, a, b in zip(x.shape, x.stride(), stride, strict=True)):
        return x
    return copy_strided(x, list(x.shape), list(stride))


# Views that differ from their argument only in shape and strides. A conjugate view is not one of
# these.
_RESHAPING = frozenset({
    "aten.expand.default", "aten.permute.default", "aten.slice.Tensor", "aten.squeeze.dim",
    "aten.squeeze.dims", "aten.transpose.int", "aten.view.default",
})  # fmt: skip


def _is_identity(program: Program, node: Node) -> bool:
    """True if a view equals its argument, such as ``expand`` to the same shape; it then needs no
    call.
    """
    if node.op not in _RESHAPING or not node.is_view:
        return False
    return node.outputs == program.graph.by_name[node.inputs[0]].outputs


def _made_and_read(line: Line) -> tuple[Sequence[str], Sequence[str]]:
    if isinstance(line, Fused):
        return line.gives, line.takes
    return ([] if line.sink is not None else [line.value]), line.inputs
