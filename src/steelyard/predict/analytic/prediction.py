"""A deep model's step on a declared cluster in the words of every prediction: four amounts, a peak.

Not for what stages take and hold: see step.py.
"""

from collections.abc import Sequence

from steelyard.hardware.calibration import DECLARED_DOUBT
from steelyard.ir.graph import Phase, Role
from steelyard.ir.metrics import Estimate, Metrics
from steelyard.plans.peak_memory import LiveTensor, PeakMemory
from steelyard.plans.plan import Prediction
from steelyard.predict.analytic.step import LayoutCost, StageBlocks, StageMemory, deep_step_of

# Bytes are counted; what an allocator adds to them is not.
_DOUBT_OF_BYTES = 0.1


def priced(
    laid: Sequence[LayoutCost], stages: Sequence[StageBlocks], *, doubt: float = DECLARED_DOUBT
) -> Prediction:
    """Of the rank that holds most, and of the one that computes longest; ``laid`` says of each
    stage what that takes and holds where it lies. ``doubt`` is the share by which the step and its
    computation may take more or less."""
    step = deep_step_of(laid, stages)
    numbered = list(enumerate(stages))
    fullest = max(numbered, key=lambda s: step.stages[s[0]].nbytes)[0]
    busiest = max(numbered, key=lambda s: laid[s[0]].computing_seconds(*s))
    on = laid[busiest[0]]
    computing = on.computing_seconds(*busiest)
    in_all, sent = on.exchanged(*busiest)
    within = Estimate.within
    return Prediction(
        metrics=Metrics(
            memory_bytes=within(step.peak_bytes, share=_DOUBT_OF_BYTES),
            communication_bytes=Estimate.exactly(sent),
            communication_seconds=within(in_all, share=DECLARED_DOUBT),
            # Whoever waits for an exchange or for another rank does not compute.
            exposed_communication_seconds=within(
                max(0.0, step.step_seconds - computing), share=DECLARED_DOUBT
            ),
            computation_seconds=_give_or_take(computing, doubt),
            step_seconds=_give_or_take(step.step_seconds, doubt),
        ),
        peak=_peak(step.stages[fullest], fullest),
        flops=on.flops(*busiest),
    )


def _give_or_take(seconds: float, doubt: float) -> Estimate:
    """Steps may take several times as long as predicted, and none takes less than no time."""
    low = seconds * max(0.0, 1 - doubt)
    return Estimate(value=seconds, low=low, high=seconds * (1 + doubt))


def _peak(memory: StageMemory, stage: int) -> PeakMemory:
    held = (
        LiveTensor.of(memory.weight_bytes, "weights", Role.PARAMETER),
        LiveTensor.of(memory.gradient_bytes, "gradients", Role.GRADIENT),
        LiveTensor.of(memory.state_bytes, "optimizer state", Role.STATE),
        LiveTensor.of(memory.activation_bytes, "kept for the backward pass", Role.ACTIVATION),
        LiveTensor.of(memory.workspace_bytes, "made again, or gathered", Role.ACTIVATION),
    )
    return PeakMemory(
        nbytes=memory.nbytes,
        resident_bytes=memory.weight_bytes + memory.state_bytes,
        workspace_bytes=memory.workspace_bytes,
        at=f"the first backward pass of stage {stage}",
        path="",
        line="",
        phase=Phase.BACKWARD,
        alive=tuple(sorted((h for h in held if h.nbytes), key=lambda h: -h.nbytes)),
    )
