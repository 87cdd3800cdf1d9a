"""Cut a program into what a compiler takes in one go and what stands between: functional fx graphs.

It is cut where its backward pass begins. One graph of both would let a compiler fuse a value's copy
with the value itself, or merge the two: the copy would be made early, and nothing would be saved.
And it is cut where something is sent, which a compiler would reorder. Across a cut nothing can be
merged. Not for compiling: see inductor.py.
"""

import operator
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

import torch

from steelyard import _torch
from steelyard.errors import BadInput
from steelyard.ir.gradient_codec import CODED_CALLS
from steelyard.ir.graph import WHOLE_ROWS, Argument, Graph, Node, Phase, Ref, Symbol
from steelyard.ir.program import SO_FAR, Instruction, Program
from steelyard.operators import operator_named

aten = torch.ops.aten
_BERNOULLI = operator_named("steelyard.bernoulli.default")
_COPY_LAID_OUT = "steelyard.copy_laid_out"
_TORCHS_OWN = (_torch.OpOverload, type(operator.getitem))
# A kernel alone is fused with nothing; called as it stands, it needs no wrapper around it.
_LEAST_KERNELS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """Straight-line code from the values in ``takes`` to those in ``gives``.

    Of what it gives, the first ``num_visible`` are read by lines that are carried out as they
    stand, or leave the program.
    """

    instructions: tuple[Instruction, ...]
    takes: tuple[str, ...]
    gives: tuple[str, ...]
    num_visible: int
    phase: Phase


@dataclass(slots=True, kw_only=True)
class _Stretch:
    """Lines that nothing has to stand between; ``phase`` is that of the first."""

    lines: list[Instruction] = field(default_factory=list)

    @property
    def phase(self) -> Phase:
        return self.lines[0].phase


def segments(program: Program) -> tuple[Segment | Instruction, ...]:
    """What to compile, and in their places the lines to carry out as they stand: exchanges, sinks,
    and what would be compiled alone."""
    graph = program.graph
    _refuse_far(graph)
    _refuse_stages(program)
    _refuse_writers(program)
    stretches = list(_stretches(program))
    cut = _Cut(program, stretches)
    return tuple(cut.segment(x) if isinstance(x, _Stretch) else x for x in stretches)


def _stretches(program: Program) -> Iterator[_Stretch | Instruction]:
    """Waits, and what leaves the program, come behind the stretch that they stand in, or before
    what reads them: what arrived, and sums that a gradient was added to as it left."""
    graph = program.graph
    made_in: dict[str, _Stretch] = {}
    found: list[_Stretch | Instruction] = []
    current = _Stretch()
    behind: list[Instruction] = []
    arrived: set[str] = set()

    def close() -> None:
        nonlocal current
        if current.lines:
            found.append(current)
        found.extend(behind)
        behind.clear()
        arrived.clear()
        current = _Stretch()

    has_begun = False
    for line in program.instructions:
        node = graph.by_name[line.node]
        if line.sink is not None or node.waits_for:
            if current.lines:
                behind.append(line)
                arrived.add(f"{SO_FAR}{line.sink.target}" if line.sink else line.value)
            else:
                found.append(line)
        elif _stands_alone(node):
            close()
            found.append(line)
        elif _is_part(graph, line):
            # A compiled segment returns tensors: results of an operator with several are taken
            # apart where they are made.
            made = made_in.get(line.inputs[0])
            (found if made is None else made.lines).append(line)
            if made is not None:
                made_in[line.value] = made
        elif node.is_free and arrived.intersection(line.inputs):
            behind.append(line)
            arrived.add(line.value)
        else:
            begins = line.phase is Phase.BACKWARD and not has_begun
            has_begun |= begins
            if begins or arrived.intersection(line.inputs):
                close()
            current.lines.append(line)
            made_in[line.value] = current
    close()
    again = {line.node for line in program.again}
    for each in found:
        if isinstance(each, _Stretch) and _is_little(graph, each.lines, again):
            yield from each.lines
        else:
            yield each


def _stands_alone(node: Node) -> bool:
    """An exchange, or a call that no compiler looks into."""
    return node.collective is not None or node.op == WHOLE_ROWS or node.op in CODED_CALLS


def _is_little(graph: Graph, lines: Sequence[Instruction], again: Set[str]) -> bool:
    """One kernel, whose bits hang on nothing: what is computed twice is compiled both times."""
    kernels = sum(not graph.by_name[line.node].is_free for line in lines)
    return kernels < _LEAST_KERNELS and again.isdisjoint(line.node for line in lines)


class _Cut:
    """Which values go from where to where, once it is known what is compiled together."""

    def __init__(self, program: Program, stretches: Sequence[_Stretch | Instruction]) -> None:
        self._graph = program.graph
        compiled = [each for each in stretches if isinstance(each, _Stretch)]
        self._own = {id(each): {line.value for line in each.lines} for each in compiled}
        self._views = {
            line.value: line
            for each in compiled
            for line in each.lines
            if self._graph.by_name[line.node].is_free and not _is_part(self._graph, line)
        }
        plain = [each for each in stretches if isinstance(each, Instruction)]
        self._exact = {program.loss, *(name for line in plain for name in line.inputs)}
        self._needed = {id(each): self._needs(each) for each in compiled}
        self._saved = {name for saved, _ in self._needed.values() for name in saved}

    def segment(self, stretch: _Stretch) -> Segment:
        saved, replayed = self._needed[id(stretch)]
        values = [line.value for line in stretch.lines]
        exact = [v for v in values if v in self._exact]
        return Segment(
            instructions=(*replayed, *stretch.lines),
            takes=tuple(saved),
            gives=(*exact, *(v for v in values if v in self._saved and v not in self._exact)),
            num_visible=len(exact),
            phase=stretch.phase,
        )

    def _needs(self, stretch: _Stretch) -> tuple[list[str], list[Instruction]]:
        """What the stretch takes, and the views that it looks through again.

        A view is not handed over but made again from what it looks at: that costs nothing, and
        leaves the compiler free in how it lays the tensor out.
        """
        own = self._own[id(stretch)]
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

        for line in stretch.lines:
            for name in line.inputs:
                need(name)
        return list(saved), list(replayed.values())


def _refuse_far(graph: Graph) -> None:
    if any(n.collective is not None and n.collective.is_far for n in graph.nodes):
        raise BadInput(
            "the step moves values to offload memory, which Inductor would reorder",
            expected="a step that keeps or recomputes what it needs, for this runner",
            remedy="take runner='python', or plan without offload memory",
        )


def _refuse_stages(program: Program) -> None:
    if program.pipeline is not None:
        raise BadInput(
            "the plan lays layers on several ranks, each of which runs its stages in Python",
            expected="ranks that share the batch, tensors or states, for this runner",
            remedy="take runner='python', or plan again with this runner",
        )


def _refuse_writers(program: Program) -> None:
    for instruction in program.instructions:
        node = program.graph.by_name[instruction.node]
        if instruction.sink is None and node.mutates and not _stands_alone(node):
            where = f" at {node.line}" if node.line else ""
            raise BadInput(
                f"{node.op}{where} writes into its argument",
                expected="functional operators only, which the Inductor runner may reorder",
                remedy="take runner='python', which keeps the order of the program",
            )


def _is_part(graph: Graph, instruction: Instruction) -> bool:
    """A result of an operator that makes several; a part of a view is itself a view."""
    node = graph.by_name[instruction.node]
    return node.is_getitem and not graph.by_name[node.inputs[0]].is_view


class Writer:
    """Writes one segment as fx nodes with fake tensors on them, in operators that are fused."""

    def __init__(self, graph: Graph, mode: Any) -> None:
        self._graph = graph
        self._mode = mode
        self._fx = torch.fx.Graph()
        # Several where an operator with several results is taken apart into others.
        self._nodes: dict[str, Any] = {}
        self._values: dict[str, str] = {}
        self._taking_apart = _torch.inductor_decompositions()
        self._given: dict[str, torch.fx.Node] = {}

    def write(self, segment: Segment, fakes: Mapping[str, torch.Tensor]) -> torch.fx.GraphModule:
        """``fakes`` holds a fake tensor for each value that the segment takes."""
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
        self._given = {
            name: self._as_planned(name, nodes_of[name])
            if place < segment.num_visible
            else self._nodes[name]
            for place, name in enumerate(segment.gives)
        }
        given = self._fx.output(tuple(self._given.values()))
        # Gradients are laid out as their parameters; what is only saved, as suits the kernels.
        exact = len(segment.gives) if self._looks_at_strides() else segment.num_visible
        given.meta["user_visible_output_idxs"] = list(range(exact))
        self._fx.eliminate_dead_code(_acts)
        return torch.fx.GraphModule({}, self._fx)

    def given(self, value: str) -> Any:
        """A fake tensor for what the segment gives."""
        return self._given[value].meta["val"]

    def value_names(self) -> dict[str, str]:
        """By fx node name, the value that it computes."""
        return self._values

    def _as_planned(self, value: str, name: str) -> torch.fx.Node:
        """What leaves the program is laid out as the graph says: a gradient as its parameter,
        where a convolution would give it the layout that its saved input came in."""
        node: torch.fx.Node = self._nodes[value]
        planned = self._graph.by_name[name].outputs[0]
        strides = zip(planned.shape, node.meta["val"].stride(), planned.stride, strict=True)
        if all(size < 2 or ours == theirs for size, ours, theirs in strides):
            return node
        return self._laid_out(node, list(planned.shape), list(planned.stride))

    def _looks_at_strides(self) -> bool:
        return any(node.op.startswith("aten.as_strided") for node in self._graph.nodes)

    def _call(self, instruction: Instruction) -> Any:
        node = self._graph.by_name[instruction.node]
        values = dict(zip(node.inputs, instruction.inputs, strict=True))
        args = [self._argument(a, values) for a in node.args]
        kwargs = {key: self._argument(a, values) for key, a in node.kwargs}
        if node.op == _COPY_LAID_OUT:
            return self._laid_out(*args)
        if node.op == "aten.bernoulli.p":
            return self._drawn(*args, name=instruction.value)
        if node.is_getitem and isinstance(args[0], tuple):
            several, place = args
            return several[place]
        target = _target(node)
        if target in self._taking_apart or not isinstance(target, _TORCHS_OWN):
            return self._taken_apart(target, args, kwargs)
        return self._add(target, args, kwargs, name=instruction.value)

    def _taken_apart(self, target: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
        """In the operators that it is made of: trades look for whole ones, Inductor fuses parts."""
        given = [x for x in _torch.tree_leaves((args, kwargs)) if isinstance(x, torch.fx.Node)]
        given = list(dict.fromkeys(given))

        def called(*tensors: torch.Tensor) -> Any:
            live = dict(zip(given, tensors, strict=True))
            own, named = torch.fx.node.map_arg((args, kwargs), live.__getitem__)
            return target(*own, **named)

        with self._mode:
            parts = _torch.taken_apart(called, [n.meta["val"] for n in given], self._taking_apart)
        places = dict(zip(parts.find_nodes(op="placeholder"), given, strict=True))
        return self._fx.graph_copy(parts, places)

    def _drawn(self, like: torch.fx.Node, p: float, *, name: str) -> torch.fx.Node:
        """Inductor (torch 2.13) draws into a copy of ``like``, and may fuse what reads the numbers
        into the kernel that makes that copy: they were read before they were drawn. And it fills
        the copy first, booleans one by one, which took a tenth of a small GPT's step."""
        fake = like.meta["val"]
        settings = {"dtype": fake.dtype, "device": fake.device}
        return self._add(_BERNOULLI, [list(fake.shape), p], settings, name=name)

    def _laid_out(self, x: torch.fx.Node, shape: list[int], stride: list[int]) -> torch.fx.Node:
        """A copy with these strides in functional operators: the largest stride outermost."""
        order = sorted(range(len(shape)), key=lambda d: (-stride[d], d))
        back = [order.index(d) for d in range(len(shape))]
        turned = self._add(aten.permute.default, [x, order], {})
        copied = self._add(aten.clone.default, [turned], {"memory_format": torch.contiguous_format})
        return self._add(aten.permute.default, [copied, back], {})

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


def _acts(node: torch.fx.Node) -> bool:
    """Whether a node must run although nothing reads it: a draw, which moves the generator on."""
    if node.op != "call_function":
        return True
    if not isinstance(node.target, _torch.OpOverload):
        return False
    # Upstream (torch 2.13) marks ``empty`` as random too; filling it would take its time.
    is_random = _torch.draws(node.target, node.args, node.kwargs)
    return is_random and "empty" not in node.target.overloadpacket.__name__


def _target(node: Node) -> Any:
    if node.is_getitem:
        return operator.getitem
    if node.op == "aten.view.default":
        # What is looked at may be laid out otherwise than when it was captured.
        return aten.reshape.default
    return operator_named(node.op)


def _object(text: str) -> Any:
    """``torch.float32`` or ``torch.device('cpu')``."""
    name = text.removeprefix("torch.")
    if name.startswith("device("):
        return torch.device(name.removeprefix("device(").removesuffix(")").strip("'\""))
    return getattr(torch, name)
