"""Values of the forward pass that only wait for the backward pass: which could be elsewhere
meanwhile, when they are first wanted again, and how late lines read what then stands for them.

What the trades share that put such a value away and bring it back. Not for where it goes.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from steelyard.ir.graph import Graph, Phase, Tensor
from steelyard.ir.program import Instruction, Program

# Smaller values cost as many calls and buy nothing.
LEAST_BYTES = 1024


def saved_for_backward(program: Program, *, least_bytes: int = LEAST_BYTES) -> frozenset[str]:
    """The forward values that could leave: large, whole on a storage that they alone describe, and
    read (or what is read by a copy's maker) after the forward pass."""
    graph = program.graph
    leaving = {s for o in graph.outputs for s in graph.storages_of(o.node)}
    makers: dict[int, set[str]] = {}
    for node in graph.nodes:
        if not graph.is_look(node):
            for storage in graph.storages_of(node.name):
                makers.setdefault(storage, set()).add(node.name)
    useful = graph.reaching_backward & {i.value for i in program.instructions}
    found = set()
    for node in graph.forward():
        if node.name not in useful or len(node.outputs) != 1 or graph.is_look(node):
            continue
        (tensor,) = node.outputs
        maker = graph.by_name[node.inputs[0]] if node.is_getitem else node
        own = {node.name, maker.name} if node.is_getitem else {node.name}
        if (
            tensor.storage not in leaving | graph.written
            and makers[tensor.storage] <= own
            and maker.collective is None
            and not maker.waits_for
            and not maker.is_packing
            and not maker.mutates
            and _fills(tensor, graph.storages[tensor.storage].nbytes)
            and tensor.nbytes >= least_bytes
            and not (len(own) == 1 and graph.has_several(node.name))
        ):
            found.add(node.name)
    return frozenset(found)


def _fills(tensor: Tensor, nbytes: int) -> bool:
    """Whether it is all that lies on its storage, in whatever order."""
    return not tensor.pending and tensor.offset == 0 and tensor.nbytes == nbytes > 0


def first_late(lines: Sequence[Instruction]) -> int:
    """Where the backward pass begins."""
    return next((k for k, i in enumerate(lines) if i.phase is Phase.BACKWARD), len(lines))


def first_wanted(
    graph: Graph, lines: Sequence[Instruction], chosen: Iterable[str]
) -> dict[str, int]:
    """The late line that first reads each value, or looks at it; without those that none does."""
    of = _looked_at(graph, frozenset(chosen))
    wanted: dict[str, int] = {}
    for number in range(first_late(lines), len(lines)):
        for name in lines[number].inputs:
            for value in of.get(name, ()):
                wanted.setdefault(value, number)
    return wanted


def _looked_at(graph: Graph, chosen: frozenset[str]) -> dict[str, tuple[str, ...]]:
    """Forward names, and the chosen values that they are or look at."""
    of: dict[str, tuple[str, ...]] = {name: (name,) for name in chosen}
    for node in graph.forward():
        if node.name not in of and graph.is_look(node):
            values = tuple(dict.fromkeys(v for i in node.inputs for v in of.get(i, ())))
            if values:
                of[node.name] = values
    return of


class Late:
    """Lines of the backward pass, reading what came back ``instead`` of the values it stands for,
    and looking at it anew."""

    def __init__(self, graph: Graph, instead: Mapping[str, str]) -> None:
        self._graph = graph
        self._of = _looked_at(graph, frozenset(instead))
        self._renamed = dict(instead)

    def rewritten(self, line: Instruction) -> list[Instruction]:
        added: list[Instruction] = []
        for name in line.inputs:
            if name in self._of:
                self._look_anew(name, added)
        inputs = tuple(self._renamed.get(i, i) for i in line.inputs)
        return [*added, replace(line, inputs=inputs)]

    def _look_anew(self, name: str, added: list[Instruction]) -> None:
        if name in self._renamed:
            return
        node = self._graph.by_name[name]
        for read in node.inputs:
            if read in self._of:
                self._look_anew(read, added)
        self._renamed[name] = f"{name}.back"
        inputs = tuple(self._renamed.get(i, i) for i in node.inputs)
        added.append(
            Instruction(node=name, value=f"{name}.back", inputs=inputs, phase=Phase.BACKWARD)
        )
