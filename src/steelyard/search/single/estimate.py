"""What the tally counts with and answers: an operator that may run again, a value that may be kept
in 8 bits, and the bytes and seconds of a choice among them.

Not for counting: see fast_estimator.py.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from steelyard.ir.graph import Graph
from steelyard.ir.quantized_activation import QuantizedActivation
from steelyard.predict.cost_table import CostTable

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class PeakEstimate:
    """``active`` are the operators that really run again; a chosen value nobody reads is free.

    ``away`` are the choices to move to offload memory, or to keep in 8 bits, that really do;
    ``often`` those to make a value several times that really is. ``held`` are the bytes at each
    line, copies included; ``shift`` how far copies have moved each line of the plain program;
    ``first`` the line at which each storage is first wanted late.
    """

    peak_bytes: int
    seconds: float
    active: tuple[int, ...]
    away: tuple[int, ...]
    often: tuple[int, ...]
    held: Floats
    shift: Ints
    first: list[int]

    def excess(self, peak_bytes: int) -> float:
        """Bytes above the limit, added over the lines."""
        return float(np.maximum(self.held - peak_bytes, 0.0).sum())

    def folded(self) -> Floats:
        """Peak bytes at each line of the plain program, the copies before it counted with it."""
        starts = np.arange(len(self.shift)) + np.concatenate(([0], self.shift[:-1]))
        folded: Floats = np.maximum.reduceat(self.held, starts)
        return folded

    def peak_line(self) -> int:
        """The line of the plain program at, or just before, which most is held."""
        return int(self.folded().argmax())


@dataclass(frozen=True, slots=True, kw_only=True)
class RecomputableUnit:
    """One operator that can be called again: what it makes and reads, as storages."""

    node: str
    makes: tuple[int, ...]
    reads: tuple[int, ...]
    touches: tuple[int, ...]
    seconds: float
    flops: int
    workspace_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Coder:
    """What it costs to keep one value in 8 bits; seconds are those of one pass, operators alone."""

    nbytes: int
    encode_seconds: float
    decode_seconds: float
    encode_workspace: int
    decode_workspace: int

    @classmethod
    def of(cls, graph: Graph, value: str, costs: CostTable) -> "Coder":
        coding = QuantizedActivation.of(graph, value, number=len(graph.storages))
        return cls(
            nbytes=coding.storage.nbytes,
            encode_seconds=costs.seconds(coding.encode).value,
            decode_seconds=costs.seconds(coding.decode).value,
            encode_workspace=costs.workspace_bytes(coding.encode),
            decode_workspace=costs.workspace_bytes(coding.decode),
        )

    @property
    def seconds(self) -> float:
        return self.encode_seconds + self.decode_seconds
