"""What is alive when most is: the answer to "which tensor is to blame".

Not for finding it: see predict/.
"""

from dataclasses import dataclass
from itertools import pairwise

from steelyard.ir.graph import Phase, Role

# What is held so, beside what a step itself holds.
PIECES = "pieces on their way to offload memory"


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveTensor:
    """Storages that are alive together, made by one operator of one module."""

    nbytes: int
    what: str
    path: str
    line: str
    phase: Phase
    role: Role

    @classmethod
    def of(cls, nbytes: int, what: str, role: Role) -> "LiveTensor":
        """What no single operator made."""
        return cls(nbytes=nbytes, what=what, path="", line="", phase=Phase.FORWARD, role=role)


@dataclass(frozen=True, slots=True, kw_only=True)
class PeakMemory:
    """The line of the step at which most is alive, and what is, largest first.

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
    """Bytes held at each instruction of one step, and when each begins; for drawing.

    Of several micro-batches two are there, the first and one that adds to its gradients.
    """

    seconds: tuple[float, ...]
    nbytes: tuple[int, ...]
    phases: tuple[Phase, ...]

    def thinned(self, most: int) -> "Timeline":
        """At most ``most`` instants, each the highest of its stretch; the peak is one of them."""
        count = len(self.nbytes)
        if count <= most:
            return self
        edges = [count * i // most for i in range(most + 1)]
        kept = [max(range(a, b), key=self.nbytes.__getitem__) for a, b in pairwise(edges)]
        return Timeline(
            seconds=tuple(self.seconds[i] for i in kept),
            nbytes=tuple(self.nbytes[i] for i in kept),
            phases=tuple(self.phases[i] for i in kept),
        )
