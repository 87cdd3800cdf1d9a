"""Cut a program where its backward pass begins, and write each part as a functional fx graph.

One graph of both would let a compiler fuse a value's copy with the value itself, or merge the two:
the copy would be made early, and nothing would be saved. Across a cut nothing can be merged. Not
for compiling: see inductor.py.
"""

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from steelyard import _torch
from steelyard.core.errors import BadInput
from steelyard.core.graph import Argument, Graph, Node, Phase, Ref, Symbol
from steelyard.core.program import Instruction, Program
from steelyard.operators import operator_named

aten = torch.ops.aten
_BERNOULLI = operator_named("steelyard.bernoulli.default")


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """Straight-line code from the values in ``takes`` to those in ``gives``.

    Of what it gives, the first ``num_visible`` leave the program.
    """

    instructions: tuple[Instruction, ...]
    takes: tuple[str, ...]
    gives: tuple[str, ...]
    num_visible: int
    phase: Phase


@dataclass(frozen=True, slots=True, kw_only=True)
class Segments:
    """Forward, then backward. ``early`` and ``late`` are the program's sinks by position: those
    that can be served after the forward segment, and those that wait for the backward one."""

    forward: Segment
    backward: Segment
    early: tuple[int, ...]
    late: tuple[int, ...]


def segments(program: Program) -> Segments:
    graph = program.graph
    _refuse_exchanges(graph)
    _refuse_writers(program)
    computed = [i for i in program.instructions if i.sink is None]
    cut = next((k for k, i in enumerate(computed) if i.phase is Phase.BACKWARD), len(computed))
    made = {i.value for i in computed[:cut]}
    # A compiled segment returns tensors: results of an operator with several are taken apart in
    # the segment that makes them.
    parts = [i for i in computed[cut:] if _is_part(graph, i) and i.inputs[0] in made]
    forward = [*computed[:cut], *parts]
    backward = [i for i in computed[cut:] if i not in parts]
    made.update(i.value for i in parts)
    early, late = _sinks(program, made)
    sinks = [i for i in program.instructions if i.sink is not None]
    saved, replayed = _saved(graph, forward, backward, [sinks[k].inputs[0] for k in late])
    visible = (program.loss, *(sinks[k].inputs[0] for k in early))
    given = [name for name in saved if name in made]
    return Segments(
        forward=Segment(
            instructions=tuple(forward),
            takes=tuple(n.name for n in graph.inputs() if n.outputs),
            gives=(*visible, *given),
            num_visible=len(visible),
            phase=Phase.FORWARD,
        ),
        backward=Segment(
            instructions=(*replayed, *backward),
            takes=tuple(saved),
            gives=tuple(sinks[k].inputs[0] for k in late),
            num_visible=len(late),
            phase=Phase.BACKWARD,
        ),
        early=early,
        late=late,
    )


def _refuse_exchanges(graph: Graph) -> None:
    if any(n.collective is not None and n.collective.is_far for n in graph.nodes):
        raise BadInput(
            "the step moves values to far memory, which Inductor would reorder",
            expected="a step that keeps or recomputes what it needs, for this runner",
            remedy="take runner='python', or plan without far memory",
        )
    if graph.collectives:
        raise BadInput(
            f"the step exchanges data with other ranks ({graph.collectives[0]}), which Inductor "
            "would reorder",
            expected="a step of one device for this runner",
            remedy="take runner='python'",
        )


def _refuse_writers(program: Program) -> None:
    for instruction in program.instructions:
        node = program.graph.by_name[instruction.node]
        if instruction.sink is None and node.mutates:
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


def _sinks(program: Program, made: set[str]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Which sinks come before the first backward line of the program, and which after."""
    early: list[int] = []
    late: list[int] = []
    is_backward = False
    for instruction in program.instructions:
        if instruction.sink is None:
            is_backward |= instruction.phase is Phase.BACKWARD
        else:
            where = late if is_backward or instruction.inputs[0] not in made else early
            where.append(len(early) + len(late))
    return tuple(early), tuple(late)


def _saved(
    graph: Graph,
    forward: Sequence[Instruction],
    backward: Sequence[Instruction],
    leaving: Sequence[str],
) -> tuple[list[str], list[Instruction]]:
    """What the backward segment takes, and the views that it looks through again.

    A view is not handed over but made again from what it looks at: that costs nothing, and leaves
    the compiler free in how it lays the tensor out.
    """
    views = {
        i.value: i for i in forward if graph.by_name[i.node].is_free and not _is_part(graph, i)
    }
    own = {i.value for i in backward}
    saved: dict[str, None] = {}
    replayed: dict[str, Instruction] = {}

    def need(name: str) -> None:
        if name in own or name in saved or name in replayed:
            return
        view = views.get(name)
        if view is None:
            saved[name] = None
            return
        for source in view.inputs:
            need(source)
        replayed[name] = view

    for instruction in backward:
        for name in instruction.inputs:
            need(name)
    for name in leaving:
        need(name)
    return list(saved), list(replayed.values())


class Writer:
    """Writes one segment as fx nodes, each named for its value, with fake tensors on them."""

    def __init__(self, graph: Graph, mode: Any) -> None:
        self._graph = graph
        self._mode = mode
        self._fx = torch.fx.Graph()
        self._nodes: dict[str, torch.fx.Node] = {}

    def write(self, segment: Segment, fakes: Mapping[str, torch.Tensor]) -> torch.fx.GraphModule:
        """``fakes`` holds a fake tensor for each value that the segment takes."""
        for index, name in enumerate(segment.takes):
            node = self._fx.placeholder(f"arg_{index}")
            node.meta["val"] = fakes[name]
            self._nodes[name] = node
        for instruction in segment.instructions:
            self._nodes[instruction.value] = self._call(instruction)
        nodes_of = {i.value: i.node for i in segment.instructions}
        given = self._fx.output(
            tuple(
                self._as_planned(name, nodes_of.get(name, name))
                if place < segment.num_visible
                else self._nodes[name]
                for place, name in enumerate(segment.gives)
            )
        )
        # Gradients are laid out as their parameters; what is only saved, as suits the kernels.
        exact = len(segment.gives) if self._looks_at_strides() else segment.num_visible
        given.meta["user_visible_output_idxs"] = list(range(exact))
        self._fx.eliminate_dead_code(_acts)
        return torch.fx.GraphModule({}, self._fx)

    def fake(self, value: str) -> Any:
        return self._nodes[value].meta["val"]

    def value_names(self) -> dict[str, str]:
        """By fx node name, the value that it computes."""
        return {node.name: value for value, node in self._nodes.items()}

    def _as_planned(self, value: str, name: str) -> torch.fx.Node:
        """What leaves the program is laid out as the graph says: a gradient as its parameter,
        where a convolution would give it the layout that its saved input came in."""
        node, planned = self._nodes[value], self._graph.by_name[name].outputs[0]
        strides = zip(planned.shape, node.meta["val"].stride(), planned.stride, strict=True)
        if all(size < 2 or ours == theirs for size, ours, theirs in strides):
            return node
        return self._laid_out(node, list(planned.shape), list(planned.stride))

    def _looks_at_strides(self) -> bool:
        return any(node.op.startswith("aten.as_strided") for node in self._graph.nodes)

    def _call(self, instruction: Instruction) -> torch.fx.Node:
        node = self._graph.by_name[instruction.node]
        values = dict(zip(node.inputs, instruction.inputs, strict=True))
        args = [self._argument(a, values) for a in node.args]
        kwargs = {key: self._argument(a, values) for key, a in node.kwargs}
        if node.op == "steelyard.copy_laid_out":
            return self._laid_out(*args)
        if node.op == "aten.bernoulli.p":
            return self._drawn(*args, name=instruction.value)
        return self._add(_target(node), args, kwargs, name=instruction.value)

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
