"""The live tensors at peak memory, which show what causes the peak.

Not for computing them: see predict/.
"""

from dataclasses import dataclass
from itertools import pairwise

from steelyard.ir.graph import Phase, Role

# Memory that a transfer needs in addition to the values of the step.
PIECES = "offload transfer buffers"


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveTensor:
    """Storages that are live at the same time and were made by the same operator of the same
    module.
    """

    nbytes: int
    what: str
    path: str
    line: str
    phase: Phase
    role: Role

    @classmethod
    def of(cls, nbytes: int, what: str, role: Role) -> "LiveTensor":
        """Return an entry for memory that was not made by a single operator."""
        return cls(nbytes=nbytes, what=what, path="", line="", phase=Phase.FORWARD, role=role)


@dataclass(frozen=True, slots=True, kw_only=True)
class PeakMemory:
    """The instruction with the most live memory, and the live tensors there, largest first.

    ``resident_bytes`` (parameters, buffers, batch, optimizer state) are part of ``nbytes``.
    """

    nbytes: int
    resident_bytes: int
    workspace_bytes: int
    at: str
    path: str
    line: str
    phase: Phase
    alive: tuple[LiveTensor, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """Live bytes at each instruction of one step, and the start time of each; for drawing.

    With several micro-batches, two of them are covered: the first, and one that accumulates
    gradients.
    """

    seconds: tuple[float, ...]
    nbytes: tuple[int, ...]
    phases: tuple[Phase, ...]

    def thinned(self, most: int) -> "Timeline":
        """Return at most ``most`` instants, each the highest of its interval, including the
        peak.
        """
        count = len(self.nbytes)
        if count <= most:
            return self
        edges = [count * i // most for i in range(most + 1)]
        chosen = [max(range(a, b), key=self.nbytes.__getitem__) for a, b in pairwise(edges)]
        return Timeline(
            seconds=tuple(self.seconds[i] for i in chosen),
            nbytes=tuple(self.nbytes[i] for i in chosen),
            phases=tuple(self.phases[i] for i in chosen),
        )
