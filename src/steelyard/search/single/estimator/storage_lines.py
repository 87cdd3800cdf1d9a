"""The lines of a plain program that make and read each storage.

Not for the lines of a program with copies: see lifetimes.py.
"""

from collections.abc import Sequence

from steelyard.ir.graph import OutputKind
from steelyard.ir.program import Instruction, Program
from steelyard.search.single.estimator.copy_placement import NEVER


class StorageLines:
    """The first and last lines of each storage; reads of the two passes are kept apart.

    The lines are the computed instructions, numbered; the backward pass begins at
    ``backward_start``. ``updates_by_reader`` maps each reader of a buffer to the storages of the
    buffer's new value.
    """

    def __init__(self, program: Program, lines: Sequence[Instruction], backward_start: int) -> None:
        graph = program.graph
        resident = {t.storage for node in graph.inputs() for t in node.outputs}
        count = len(graph.storages)
        self.nbytes = [s.nbytes for s in graph.storages]
        self.born = [NEVER] * count
        self.forward_last = [-1] * count
        self.backward_first = [NEVER] * count
        self.backward_last = [-1] * count
        self.by_node = {
            n.name: [s for s in graph.storages_of(n.name) if s not in resident] for n in graph.nodes
        }
        self.updates_by_reader = self._find_buffer_updates(program)
        for line, instruction in enumerate(lines):
            is_forward = line < backward_start
            for storage in self.by_node[instruction.node]:
                if self.born[storage] == NEVER:
                    self.born[storage] = line
                    last = self.forward_last if is_forward else self.backward_last
                    last[storage] = line
            for name in instruction.inputs:
                for storage in (*self.by_node[name], *self.updates_by_reader.get(name, ())):
                    self._note_read(storage, line, is_forward=is_forward)
        # The storages that the program itself makes.
        self.produced = [s for s in range(count) if self.born[s] < NEVER]

    def _note_read(self, storage: int, line: int, *, is_forward: bool) -> None:
        if is_forward:
            self.forward_last[storage] = max(self.forward_last[storage], line)
        else:
            self.backward_first[storage] = min(self.backward_first[storage], line)
            self.backward_last[storage] = max(self.backward_last[storage], line)

    def _find_buffer_updates(self, program: Program) -> dict[str, tuple[int, ...]]:
        """Map each reader of a buffer to the storages of the buffer's new value.

        The new value is written after the last reader of the old one, and lives as long.
        """
        graph = program.graph
        inputs = {node.name: node for node in graph.inputs()}
        updates_by_reader: dict[str, tuple[int, ...]] = {}
        for output in graph.outputs:
            if output.kind is not OutputKind.UPDATE:
                continue
            old = {t.storage for t in inputs[output.target].outputs}
            new = tuple(self.by_node[output.node])
            for node in graph.nodes:
                if any(t.storage in old for t in node.outputs):
                    updates_by_reader[node.name] = (*updates_by_reader.get(node.name, ()), *new)
        return updates_by_reader
