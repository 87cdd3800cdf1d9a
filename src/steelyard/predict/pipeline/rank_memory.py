"""The memory of one rank of a pipeline, and the parts of its peak.

Not for the schedule of its work: see step.py.
"""

from dataclasses import dataclass

from steelyard.ir.graph import Phase, Role
from steelyard.ir.program import Program
from steelyard.plans.peak_memory import LiveTensor, PeakMemory
from steelyard.predict.liveness import Liveness, alive_at


@dataclass(frozen=True, slots=True, kw_only=True)
class RankBytes:
    """The bytes of one rank.

    ``pass_bytes`` are the bytes of the passes beyond the resident ones, including gradients and the
    ``gathered`` weights.
    """

    number: int
    parameters: int
    buffers: int
    batch: int
    others: int
    state: int
    gradients: int
    gathered: int
    pass_bytes: int
    update: Liveness | None

    @property
    def resident(self) -> int:
        return self.parameters + self.buffers + self.batch + self.others + self.state

    @property
    def nbytes_in_update(self) -> int:
        nbytes = self.update.peak_bytes if self.update is not None else 0
        return self.resident + self.gradients + nbytes

    @property
    def is_in_update(self) -> bool:
        return self.update is not None and self.nbytes_in_update > self.resident + self.pass_bytes

    @property
    def nbytes(self) -> int:
        return max(self.resident + self.pass_bytes, self.nbytes_in_update)

    def resident_tensors(self) -> list[LiveTensor]:
        where = f" of rank {self.number}"
        return [
            LiveTensor.of(self.parameters, f"parameters{where}", Role.PARAMETER),
            LiveTensor.of(self.buffers, f"buffers{where}", Role.BUFFER),
            LiveTensor.of(self.batch, "the batch", Role.BATCH),
            LiveTensor.of(self.others, "constants", Role.CONSTANT),
            LiveTensor.of(self.state, f"optimizer state{where}", Role.STATE),
        ]


def peak_memory_of(
    program: Program,
    live_bytes: Liveness,
    rank: RankBytes,
    *,
    extra: list[LiveTensor],
    phase: Phase,
) -> PeakMemory:
    """Return the peak of a rank, explained by the tensors alive in the program that causes it.

    ``extra`` are live tensors that the program itself does not contain.
    """
    at = path = line = ""
    alive: tuple[LiveTensor, ...] = ()
    if program.instructions:
        node = program.graph.by_name[program.instructions[live_bytes.peak_index].node]
        at, path, line = node.op, node.path, node.line
        is_late = phase is not Phase.UPDATE
        alive = alive_at(program, live_bytes.peak_index, accumulating=is_late)
    everything = [*rank.resident_tensors(), *extra, *alive]
    return PeakMemory(
        nbytes=rank.nbytes,
        resident_bytes=rank.resident,
        workspace_bytes=max(0, live_bytes.peak_bytes - sum(h.nbytes for h in alive)),
        at=at,
        path=path,
        line=line,
        phase=phase,
        alive=tuple(sorted((h for h in everything if h.nbytes), key=lambda h: -h.nbytes)),
    )
