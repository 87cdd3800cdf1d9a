"""What it takes to read a value slice by slice, for each product that may: the tally's part for
values that come back so.

Not for which do: that is a choice.
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
    """A product that may read a value in ``pieces``, in room for two: its line in the plain
    program, what it takes so, and how much more that is than on the whole value."""

    line: int
    pieces: int
    room_bytes: int
    seconds: float
    more_seconds: float
    more_workspace: int

    @classmethod
    def of(cls, read: Read, line: int, whole: Node, costs: CostTable) -> Self:
        seconds = costs.seconds(read.call).value
        return cls(
            line=line,
            pieces=read.link.hops,
            room_bytes=read.room.nbytes,
            seconds=seconds,
            more_seconds=seconds - costs.seconds(whole).value,
            more_workspace=costs.workspace_bytes(read.call) - costs.workspace_bytes(whole),
        )


def sliced_reads(
    program: Program, lines: Sequence[Instruction], slices: Mapping[str, int], costs: CostTable
) -> dict[str, tuple[SlicedRead, ...]]:
    """By value; ``lines`` are those that compute, as they are counted."""
    slots = {value: slot for slot, value in enumerate(slices)}
    reads = with_inputs_in_slices(program, slices, slots).reads
    place = {line.value: number for number, line in enumerate(lines)}
    node = {line.value: program.graph.by_name[line.node] for line in lines}
    return {
        value: tuple(SlicedRead.of(r, place[r.result], node[r.result], costs) for r in own)
        for value, own in reads.items()
    }
