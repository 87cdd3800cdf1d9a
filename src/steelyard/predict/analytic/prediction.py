"""Converts an analytic step to a ``Prediction``: four amounts and a peak.

Not for the costs of stages: see step.py.
"""

from collections.abc import Sequence

from steelyard.hardware.calibration import DECLARED_DOUBT
from steelyard.ir.graph import Phase, Role
from steelyard.ir.metrics import Estimate, Metrics
from steelyard.plans.peak_memory import LiveTensor, PeakMemory
from steelyard.plans.plan import Prediction
from steelyard.predict.analytic.step import LayoutCost, StageBlocks, StageMemory, analytic_step

# Bytes are counted exactly, but without the overhead of the allocator.
_DOUBT_OF_BYTES = 0.1


def priced(
    costs: Sequence[LayoutCost], stages: Sequence[StageBlocks], *, doubt: float = DECLARED_DOUBT
) -> Prediction:
    """Return the prediction of a deep model's step on a declared cluster.

    Memory is that of the rank that needs most, computation that of the rank that computes longest.
    ``costs`` contains the cost model of each stage on its device. ``doubt`` is the relative error
    of the step and of its computation.
    """
    step = analytic_step(costs, stages)
    numbered = list(enumerate(stages))
    fullest = max(numbered, key=lambda s: step.stages[s[0]].nbytes)[0]
    busiest = max(numbered, key=lambda s: costs[s[0]].computing_seconds(*s))
    cost = costs[busiest[0]]
    computing = cost.computing_seconds(*busiest)
    in_all, sent = cost.exchanged(*busiest)
    within = Estimate.within
    return Prediction(
        metrics=Metrics(
            memory_bytes=within(step.peak_bytes, share=_DOUBT_OF_BYTES),
            communication_bytes=Estimate.exactly(sent),
            communication_seconds=within(in_all, share=DECLARED_DOUBT),
            # A rank that waits for an exchange or for another rank does not compute.
            exposed_communication_seconds=within(
                max(0.0, step.step_seconds - computing), share=DECLARED_DOUBT
            ),
            computation_seconds=_within(computing, doubt),
            step_seconds=_within(step.step_seconds, doubt),
        ),
        peak=_peak(step.stages[fullest], fullest),
        flops=cost.flops(*busiest),
    )


def _within(seconds: float, doubt: float) -> Estimate:
    """Return an estimate with a relative error that may exceed 1.

    Steps may take several times as long as predicted, but never a negative time.
    """
    low = seconds * max(0.0, 1 - doubt)
    return Estimate(value=seconds, low=low, high=seconds * (1 + doubt))


def _peak(memory: StageMemory, stage: int) -> PeakMemory:
    tensors = (
        LiveTensor.of(memory.weight_bytes, "weights", Role.PARAMETER),
        LiveTensor.of(memory.gradient_bytes, "gradients", Role.GRADIENT),
        LiveTensor.of(memory.state_bytes, "optimizer state", Role.STATE),
        LiveTensor.of(memory.activation_bytes, "saved activations", Role.ACTIVATION),
        LiveTensor.of(
            memory.workspace_bytes, "recomputed activations or gathered weights", Role.ACTIVATION
        ),
    )
    return PeakMemory(
        nbytes=memory.nbytes,
        resident_bytes=memory.weight_bytes + memory.state_bytes,
        workspace_bytes=memory.workspace_bytes,
        at=f"the first backward pass of stage {stage}",
        path="",
        line="",
        phase=Phase.BACKWARD,
        alive=tuple(sorted((h for h in tensors if h.nbytes), key=lambda h: -h.nbytes)),
    )
