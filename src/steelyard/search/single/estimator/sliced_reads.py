"""The cost of reading an offloaded value slice by slice, for each product that supports it.

This is a part of the fast estimator. Not for choosing the products, which the search does.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Self

from steelyard.ir.graph import Node
from steelyard.ir.program import Instruction, Program
from steelyard.passes.offload.sliced_activation_matmuls import Read, with_inputs_in_slices
from steelyard.predict.cost_table import CostTable


@dataclass(frozen=True, slots=True, kw_only=True)
class SlicedRead:
    """A product that may read a value in ``pieces`` slices, through a buffer for two of them.

    ``line`` is its line in the plain program. ``more_seconds`` and ``more_workspace`` are relative
    to the product on the whole value.
    """

    line: int
    pieces: int
    room_bytes: int
    seconds: float
    more_seconds: float
    more_workspace: int

    @classmethod
    def of(cls, read: Read, line: int, unsliced: Node, costs: CostTable) -> Self:
        seconds = costs.seconds(read.call).value
        return cls(
            line=line,
            pieces=read.link.hops,
            room_bytes=read.room.nbytes,
            seconds=seconds,
            more_seconds=seconds - costs.seconds(unsliced).value,
            more_workspace=costs.workspace_bytes(read.call) - costs.workspace_bytes(unsliced),
        )


def sliced_reads(
    program: Program, lines: Sequence[Instruction], slices: Mapping[str, int], costs: CostTable
) -> dict[str, tuple[SlicedRead, ...]]:
    """Return the sliced reads of each value; ``lines`` are the computed lines, as numbered here."""
    slots = {value: slot for slot, value in enumerate(slices)}
    reads = with_inputs_in_slices(program, slices, slots).reads
    line_of = {line.value: number for number, line in enumerate(lines)}
    node_of = {line.value: program.graph.by_name[line.node] for line in lines}
    return {
        value: tuple(
            SlicedRead.of(r, line_of[r.result], node_of[r.result], costs) for r in reads_of_value
        )
        for value, reads_of_value in reads.items()
    }
