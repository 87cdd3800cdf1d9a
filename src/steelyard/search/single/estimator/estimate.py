"""The inputs and results of the fast estimator: recomputable operators, 8-bit codecs, estimates.

Not for estimating: see fast_estimator.py.
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
    """The peak bytes and seconds of a set of choices.

    ``active`` are the operators that really run again; a chosen value that nothing reads costs
    nothing. ``evicted`` are those choices to offload a value, or to keep it in 8 bits, that take
    effect. ``repeated`` are those choices to recompute a value several times that take effect.
    ``live_bytes`` are the bytes at each line, including copies. ``shift`` is the offset that copies
    add to each line of the plain program. ``first_needed`` is the line before which the backward
    pass first needs each storage.
    """

    peak_bytes: int
    seconds: float
    active: tuple[int, ...]
    evicted: tuple[int, ...]
    repeated: tuple[int, ...]
    live_bytes: Floats
    shift: Ints
    first_needed: list[int]

    def excess(self, peak_bytes: int) -> float:
        """Return the bytes above the limit, summed over all lines."""
        return float(np.maximum(self.live_bytes - peak_bytes, 0.0).sum())

    def folded(self) -> Floats:
        """Return the peak bytes at each line of the plain program, including the copies before
        it.
        """
        starts = np.arange(len(self.shift)) + np.concatenate(([0], self.shift[:-1]))
        folded: Floats = np.maximum.reduceat(self.live_bytes, starts)
        return folded

    def peak_line(self) -> int:
        """Return the line of the plain program at which, or just before which, the peak occurs."""
        return int(self.folded().argmax())


@dataclass(frozen=True, slots=True, kw_only=True)
class RecomputableUnit:
    """One operator that can be recomputed, with the storages that it makes and reads.

    ``touches`` are the new values of buffers that must not be written before this operator has read
    the old ones.
    """

    node: str
    makes: tuple[int, ...]
    reads: tuple[int, ...]
    touches: tuple[int, ...]
    seconds: float
    flops: int
    workspace_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Coder:
    """The cost of keeping one value in 8 bits; the seconds are those of the operators, for one
    pass.
    """

    nbytes: int
    encode_seconds: float
    decode_seconds: float
    encode_workspace: int
    decode_workspace: int

    @classmethod
    def of(cls, graph: Graph, value: str, costs: CostTable) -> "Coder":
        quantized = QuantizedActivation.of(graph, value, number=len(graph.storages))
        return cls(
            nbytes=quantized.storage.nbytes,
            encode_seconds=costs.seconds(quantized.encode).value,
            decode_seconds=costs.seconds(quantized.decode).value,
            encode_workspace=costs.workspace_bytes(quantized.encode),
            decode_workspace=costs.workspace_bytes(quantized.decode),
        )

    @property
    def seconds(self) -> float:
        return self.encode_seconds + self.decode_seconds
