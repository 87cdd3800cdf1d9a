"""Activations saved for the backward pass: candidates for removal, first readers, replacements.

Several trades remove such a value from device memory and restore it later. Not for the place where
it is stored in the meantime.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from steelyard.ir.graph import Graph, Phase, Tensor
from steelyard.ir.program import Instruction, Program

# Smaller values need as many calls and save hardly any memory.
LEAST_BYTES = 1024


def saved_for_backward(program: Program, *, least_bytes: int = LEAST_BYTES) -> frozenset[str]:
    """Return the forward values that could leave device memory until the backward pass.

    They have at least ``least_bytes``, fill a storage that no other value shares, and the
    backward pass depends on them.
    """
    graph = program.graph
    output_storages = {s for o in graph.outputs for s in graph.storages_of(o.node)}
    makers: dict[int, set[str]] = {}
    for node in graph.nodes:
        if not graph.is_alias(node):
            for storage in graph.storages_of(node.name):
                makers.setdefault(storage, set()).add(node.name)
    needed = graph.reaching_backward & {i.value for i in program.instructions}
    found = set()
    for node in graph.forward():
        if node.name not in needed or len(node.outputs) != 1 or graph.is_alias(node):
            continue
        (tensor,) = node.outputs
        maker = graph.by_name[node.inputs[0]] if node.is_getitem else node
        allowed_makers = {node.name, maker.name} if node.is_getitem else {node.name}
        if (
            tensor.storage not in output_storages | graph.written
            and makers[tensor.storage] <= allowed_makers
            and maker.collective is None
            and not maker.waits_for
            and not maker.is_packing
            and not maker.mutates
            and _fills(tensor, graph.storages[tensor.storage].nbytes)
            and tensor.nbytes >= least_bytes
            and not (len(allowed_makers) == 1 and graph.has_several(node.name))
        ):
            found.add(node.name)
    return frozenset(found)


def _fills(tensor: Tensor, nbytes: int) -> bool:
    """True if the tensor fills its storage, in any dim order."""
    return not tensor.pending and tensor.offset == 0 and tensor.nbytes == nbytes > 0


def first_backward_line(lines: Sequence[Instruction]) -> int:
    """Return the index of the first backward line."""
    return next((k for k, i in enumerate(lines) if i.phase is Phase.BACKWARD), len(lines))


def first_backward_reader(
    graph: Graph, lines: Sequence[Instruction], chosen: Iterable[str]
) -> dict[str, int]:
    """Return the first backward line that reads each value or a view of it, if one does."""
    values_of = _values_behind(graph, frozenset(chosen))
    first_reader: dict[str, int] = {}
    for number in range(first_backward_line(lines), len(lines)):
        for name in lines[number].inputs:
            for value in values_of.get(name, ()):
                first_reader.setdefault(value, number)
    return first_reader


def _values_behind(graph: Graph, chosen: frozenset[str]) -> dict[str, tuple[str, ...]]:
    """Return the chosen values behind each forward name: the value itself or its views."""
    values_of: dict[str, tuple[str, ...]] = {name: (name,) for name in chosen}
    for node in graph.forward():
        if node.name not in values_of and graph.is_alias(node):
            values = tuple(dict.fromkeys(v for i in node.inputs for v in values_of.get(i, ())))
            if values:
                values_of[node.name] = values
    return values_of


class BackwardRewriter:
    """Rewrites backward lines to read restored values ``instead`` of the originals.

    Views of the originals are recreated on the restored values.
    """

    def __init__(self, graph: Graph, instead: Mapping[str, str]) -> None:
        self._graph = graph
        self._values_of = _values_behind(graph, frozenset(instead))
        self._renamed = dict(instead)

    def rewritten(self, line: Instruction) -> list[Instruction]:
        added: list[Instruction] = []
        for name in line.inputs:
            if name in self._values_of:
                self._recreate_view(name, added)
        inputs = tuple(self._renamed.get(i, i) for i in line.inputs)
        return [*added, replace(line, inputs=inputs)]

    def _recreate_view(self, name: str, added: list[Instruction]) -> None:
        if name in self._renamed:
            return
        node = self._graph.by_name[name]
        for read in node.inputs:
            if read in self._values_of:
                self._recreate_view(read, added)
        self._renamed[name] = f"{name}.back"
        inputs = tuple(self._renamed.get(i, i) for i in node.inputs)
        added.append(
            Instruction(node=name, value=f"{name}.back", inputs=inputs, phase=Phase.BACKWARD)
        )
