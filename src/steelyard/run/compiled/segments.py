"""Cuts a program into segments to be compiled and lines that stay uncompiled, as functional fx
graphs.

The program is cut where its backward pass begins. In a single graph, a compiler could fuse the
recomputed copy of a value with the value itself, or merge the two; the copy would then be made
early, and no memory would be saved. The program is also cut at every collective, because a compiler
would reorder collectives. Nothing is merged across a cut. Not for compiling: see inductor.py.
"""

import operator
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

import torch

from steelyard import _torch
from steelyard.errors import BadInput
from steelyard.ir.gradient_codec import CODED_CALLS
from steelyard.ir.graph import UNPACK_ROWS, Argument, Graph, Node, Phase, Ref, Symbol
from steelyard.ir.program import SO_FAR, Instruction, Program
from steelyard.operators import operator_named

aten = torch.ops.aten
_BERNOULLI = operator_named("steelyard.bernoulli.default")
_COPY_STRIDED = "steelyard.copy_strided"
_TORCH_TARGETS = (_torch.OpOverload, type(operator.getitem))
# A single kernel has nothing to fuse with; if it is called uncompiled, it needs no wrapper.
_MIN_KERNELS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """Straight-line code from the values in ``takes`` to those in ``gives``.

    The first ``num_visible`` outputs are read by uncompiled lines, or leave the program.
    """

    instructions: tuple[Instruction, ...]
    takes: tuple[str, ...]
    gives: tuple[str, ...]
    num_visible: int
    phase: Phase


@dataclass(slots=True, kw_only=True)
class _Region:
    """Consecutive lines that can be compiled together; ``phase`` is that of the first line."""

    lines: list[Instruction] = field(default_factory=list)

    @property
    def phase(self) -> Phase:
        return self.lines[0].phase


def segments(program: Program) -> tuple[Segment | Instruction, ...]:
    """Return the segments to be compiled and, in order, the uncompiled lines: collectives, sinks,
    and regions of a single kernel.
    """
    graph = program.graph
    _refuse_offload(graph)
    _refuse_pipeline(program)
    _refuse_mutation(program)
    regions = list(_regions(program))
    dataflow = _Dataflow(program, regions)
    return tuple(dataflow.segment(x) if isinstance(x, _Region) else x for x in regions)


def _regions(program: Program) -> Iterator[_Region | Instruction]:
    """Yield the regions and the uncompiled lines.

    A wait moves to the end of its region, or to just before the first line that reads the received
    value. A sink moves in the same way, with the accumulated gradient sum as its result.
    """
    graph = program.graph
    region_of: dict[str, _Region] = {}
    found: list[_Region | Instruction] = []
    current = _Region()
    deferred: list[Instruction] = []
    arrived: set[str] = set()

    def close() -> None:
        nonlocal current
        if current.lines:
            found.append(current)
        found.extend(deferred)
        deferred.clear()
        arrived.clear()
        current = _Region()

    has_begun = False
    for line in program.instructions:
        node = graph.by_name[line.node]
        if line.sink is not None or node.waits_for:
            if current.lines:
                deferred.append(line)
                arrived.add(f"{SO_FAR}{line.sink.target}" if line.sink else line.value)
            else:
                found.append(line)
        elif _is_opaque(node):
            close()
            found.append(line)
        elif _is_tuple_item(graph, line):
            # A compiled segment returns only tensors, so the results of a multi-output operator are
            # unpacked in the region that makes them.
            region = region_of.get(line.inputs[0])
            (found if region is None else region.lines).append(line)
            if region is not None:
                region_of[line.value] = region
        elif node.is_free and arrived.intersection(line.inputs):
            deferred.append(line)
            arrived.add(line.value)
        else:
            begins = line.phase is Phase.BACKWARD and not has_begun
            has_begun |= begins
            if begins or arrived.intersection(line.inputs):
                close()
            current.lines.append(line)
            region_of[line.value] = current
    close()
    recomputed = {line.node for line in program.recomputed}
    for each in found:
        if isinstance(each, _Region) and _is_single_kernel(graph, each.lines, recomputed):
            yield from each.lines
        else:
            yield each


def _is_opaque(node: Node) -> bool:
    """True for a collective, or for a call that no compiler can look into."""
    return node.collective is not None or node.op == UNPACK_ROWS or node.op in CODED_CALLS


def _is_single_kernel(graph: Graph, lines: Sequence[Instruction], recomputed: Set[str]) -> bool:
    """True for a single kernel that is not recomputed. A recomputed kernel is compiled both times,
    so that its bits are equal.
    """
    kernels = sum(not graph.by_name[line.node].is_free for line in lines)
    return kernels < _MIN_KERNELS and recomputed.isdisjoint(line.node for line in lines)


class _Dataflow:
    """The values that flow between regions."""

    def __init__(self, program: Program, regions: Sequence[_Region | Instruction]) -> None:
        self._graph = program.graph
        compiled = [each for each in regions if isinstance(each, _Region)]
        self._own = {id(each): {line.value for line in each.lines} for each in compiled}
        self._views = {
            line.value: line
            for each in compiled
            for line in each.lines
            if self._graph.by_name[line.node].is_free and not _is_tuple_item(self._graph, line)
        }
        plain = [each for each in regions if isinstance(each, Instruction)]
        self._exact = {program.loss, *(name for line in plain for name in line.inputs)}
        self._needed = {id(each): self._needs(each) for each in compiled}
        self._saved = {name for saved, _ in self._needed.values() for name in saved}

    def segment(self, region: _Region) -> Segment:
        saved, replayed = self._needed[id(region)]
        values = [line.value for line in region.lines]
        exact = [v for v in values if v in self._exact]
        return Segment(
            instructions=(*replayed, *region.lines),
            takes=tuple(saved),
            gives=(*exact, *(v for v in values if v in self._saved and v not in self._exact)),
            num_visible=len(exact),
            phase=region.phase,
        )

    def _needs(self, region: _Region) -> tuple[list[str], list[Instruction]]:
        """Return the inputs of a region, and the views that it recomputes.

        A view is not passed on but recomputed from its base. This costs nothing, and lets the
        compiler choose the base's layout.
        """
        own = self._own[id(region)]
        saved: dict[str, None] = {}
        replayed: dict[str, Instruction] = {}

        def need(name: str) -> None:
            if name in own or name in saved or name in replayed:
                return
            view = self._views.get(name)
            if view is None:
                saved[name] = None
                return
            for source in view.inputs:
                need(source)
            replayed[name] = view

        for line in region.lines:
            for name in line.inputs:
                need(name)
        return list(saved), list(replayed.values())


def _refuse_offload(graph: Graph) -> None:
    if any(n.collective is not None and n.collective.is_transfer for n in graph.nodes):
        raise BadInput(
            "the step offloads values, which Inductor would reorder",
            expected="a step that saves or recomputes its activations, for this runner",
            remedy="use runner='python', or plan without offload memory",
        )


def _refuse_pipeline(program: Program) -> None:
    if program.pipeline is not None:
        raise BadInput(
            "the plan assigns layers to several ranks, which only the Python runner supports",
            expected="ranks that share only the batch, tensors or states, for this runner",
            remedy="use runner='python', or plan again with this runner",
        )


def _refuse_mutation(program: Program) -> None:
    for instruction in program.instructions:
        node = program.graph.by_name[instruction.node]
        if instruction.sink is None and node.mutates and not _is_opaque(node):
            where = f" at {node.line}" if node.line else ""
            raise BadInput(
                f"{node.op}{where} writes into its argument",
                expected="functional operators, because the Inductor runner may reorder them",
                remedy="use runner='python', which keeps the order of the program",
            )


def _is_tuple_item(graph: Graph, instruction: Instruction) -> bool:
    """True for a result of a multi-output operator; an item of a view is itself a view."""
    node = graph.by_name[instruction.node]
    return node.is_getitem and not graph.by_name[node.inputs[0]].is_view


class Writer:
    """Writes one segment as an fx graph with fake tensors, decomposed into operators that Inductor
    fuses.
    """

    def __init__(self, graph: Graph, mode: Any) -> None:
        self._graph = graph
        self._mode = mode
        self._fx = torch.fx.Graph()
        # This is a tuple for a multi-output operator that was decomposed.
        self._nodes: dict[str, Any] = {}
        self._values: dict[str, str] = {}
        self._decompositions = _torch.inductor_decompositions()
        self._outputs: dict[str, torch.fx.Node] = {}

    def write(self, segment: Segment, fakes: Mapping[str, torch.Tensor]) -> torch.fx.GraphModule:
        """Write the segment; ``fakes`` holds a fake tensor for each of its inputs."""
        for index, name in enumerate(segment.takes):
            node = self._fx.placeholder(f"arg_{index}")
            node.meta["val"] = fakes[name]
            self._nodes[name] = node
        for instruction in segment.instructions:
            known = len(self._fx.nodes)
            self._nodes[instruction.value] = self._call(instruction)
            new = list(self._fx.nodes)[known:]
            self._values.update((node.name, instruction.value) for node in new)
        nodes_of = {i.value: i.node for i in segment.instructions}
        self._outputs = {
            name: self._in_captured_layout(name, nodes_of[name])
            if place < segment.num_visible
            else self._nodes[name]
            for place, name in enumerate(segment.gives)
        }
        outputs = self._fx.output(tuple(self._outputs.values()))
        # Gradients have the layout of their parameters; saved activations have the layout that
        # suits the kernels.
        exact = len(segment.gives) if self._reads_strides() else segment.num_visible
        outputs.meta["user_visible_output_idxs"] = list(range(exact))
        self._fx.eliminate_dead_code(_has_effect)
        return torch.fx.GraphModule({}, self._fx)

    def output_fake(self, value: str) -> Any:
        """Return the fake tensor of an output."""
        return self._outputs[value].meta["val"]

    def value_names(self) -> dict[str, str]:
        """Return the value that each fx node computes, by the node's name."""
        return self._values

    def _in_captured_layout(self, value: str, name: str) -> torch.fx.Node:
        """Return an output in its captured layout. For a gradient this is its parameter's layout,
        while a convolution would return it in the layout of its saved input.
        """
        node: torch.fx.Node = self._nodes[value]
        planned = self._graph.by_name[name].outputs[0]
        strides = zip(planned.shape, node.meta["val"].stride(), planned.stride, strict=True)
        if all(size < 2 or actual == expected for size, actual, expected in strides):
            return node
        return self._add_restrided(node, list(planned.shape), list(planned.stride))

    def _reads_strides(self) -> bool:
        return any(node.op.startswith("aten.as_strided") for node in self._graph.nodes)

    def _call(self, instruction: Instruction) -> Any:
        node = self._graph.by_name[instruction.node]
        values = dict(zip(node.inputs, instruction.inputs, strict=True))
        args = [self._argument(a, values) for a in node.args]
        kwargs = {key: self._argument(a, values) for key, a in node.kwargs}
        if node.op == _COPY_STRIDED:
            return self._add_restrided(*args)
        if node.op == "aten.bernoulli.p":
            return self._add_bernoulli(*args, name=instruction.value)
        if node.is_getitem and isinstance(args[0], tuple):
            several, place = args
            return several[place]
        target = _target(node)
        if target in self._decompositions or not isinstance(target, _TORCH_TARGETS):
            return self._decomposed(target, args, kwargs)
        return self._add(target, args, kwargs, name=instruction.value)

    def _decomposed(self, target: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
        """Add a call that is decomposed into parts: trades match whole operators, but Inductor
        fuses parts.
        """
        operands = [x for x in _torch.tree_leaves((args, kwargs)) if isinstance(x, torch.fx.Node)]
        operands = list(dict.fromkeys(operands))

        def run(*tensors: torch.Tensor) -> Any:
            live = dict(zip(operands, tensors, strict=True))
            own, named = torch.fx.node.map_arg((args, kwargs), live.__getitem__)
            return target(*own, **named)

        with self._mode:
            parts = _torch.taken_apart(run, [n.meta["val"] for n in operands], self._decompositions)
        places = dict(zip(parts.find_nodes(op="placeholder"), operands, strict=True))
        return self._fx.graph_copy(parts, places)

    def _add_bernoulli(self, like: torch.fx.Node, p: float, *, name: str) -> torch.fx.Node:
        """Add a random draw that has no input.

        Inductor (torch 2.13) would draw into a copy of ``like``. It may fuse an operator that reads
        the numbers into the kernel that makes the copy, so that they are read before they are
        drawn. It would also fill the copy first, with booleans one by one, which took a tenth of
        the step time of a small GPT.
        """
        fake = like.meta["val"]
        settings = {"dtype": fake.dtype, "device": fake.device}
        return self._add(_BERNOULLI, [list(fake.shape), p], settings, name=name)

    def _add_restrided(
        self, x: torch.fx.Node, shape: list[int], stride: list[int]
    ) -> torch.fx.Node:
        """Add a copy with these strides, in functional operators; the dim with the largest stride
        is outermost.
        """
        order = sorted(range(len(shape)), key=lambda d: (-stride[d], d))
        inverse = [order.index(d) for d in range(len(shape))]
        permuted = self._add(aten.permute.default, [x, order], {})
        copied = self._add(
            aten.clone.default, [permuted], {"memory_format": torch.contiguous_format}
        )
        return self._add(aten.permute.default, [copied, inverse], {})

    def _add(
        self, target: Any, args: list[Any], kwargs: dict[str, Any], *, name: str = "copy"
    ) -> torch.fx.Node:
        node = self._fx.create_node(
            "call_function", target, tuple(args), kwargs, name=name.replace(".", "_")
        )
        with self._mode:
            fakes = torch.fx.node.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
            node.meta["val"] = target(*fakes[0], **fakes[1])
        return node

    def _argument(self, argument: Argument, values: Mapping[str, str]) -> Any:
        match argument:
            case Ref(name):
                return self._nodes[values[name]]
            case Symbol(text):
                return _object(text)
            case tuple():
                return [self._argument(a, values) for a in argument]
        return argument


def _has_effect(node: torch.fx.Node) -> bool:
    """True if a node must run although nothing reads it, namely a draw, which advances the
    generator.
    """
    if node.op != "call_function":
        return True
    if not isinstance(node.target, _torch.OpOverload):
        return False
    # Upstream (torch 2.13) also marks ``empty`` as random. It is left out, because filling the
    # tensor would take time.
    is_random = _torch.draws(node.target, node.args, node.kwargs)
    return is_random and "empty" not in node.target.overloadpacket.__name__


def _target(node: Node) -> Any:
    if node.is_getitem:
        return operator.getitem
    if node.op == "aten.view.default":
        # The layout of the view's base may be another one than at capture.
        return aten.reshape.default
    return operator_named(node.op)


def _object(text: str) -> Any:
    """Parse ``torch.float32`` or ``torch.device('cpu')``."""
    name = text.removeprefix("torch.")
    if name.startswith("device("):
        return torch.device(name.removeprefix("device(").removesuffix(")").strip("'\""))
    return getattr(torch, name)
