"""Answers "will it fit": the peak of an eager step on a device, and what would make it fit.

The step is measured on fake tensors; no graph is captured. Not for planning: see planner.py.
"""

from collections.abc import Callable
from dataclasses import replace

from steelyard.hardware.device import Device
from steelyard.planner.fit.candidates import Levers, StepVariant
from steelyard.planner.fit.step_memory import FitStep, MeasuredStep
from steelyard.plans.memory_fit import Capacity, Fit, FitVerdict, without_needless


def fit_step(
    step: FitStep,
    device: Device,
    *,
    title: str,
    devices: int = 1,
    variants: tuple[StepVariant, ...] = (),
    on_verdict: Callable[[Fit], None] = lambda _: None,
    on_progress: Callable[[str], None] = lambda _: None,
) -> Fit:
    """Return the verdict for a step on a device and, if it does not fit, what would.

    Several ``devices`` of a kind shard weights, gradients and state, and divide the batch.
    ``on_verdict`` gets the verdict before the changes are tried. ``variants`` are changes that only
    the caller can make, such as another precision of the model.
    """
    capacity = Capacity.of(device, count=devices)
    on_progress("measuring the step on fake tensors")
    plain = MeasuredStep.of(step.of_each(devices) if devices > 1 else step, capacity)
    found = Fit(title=title, capacity=capacity, need=plain.need, samples=plain.step.num_samples)
    on_verdict(found)
    if found.fits:
        return found
    levers = Levers(
        whole=step, plain=plain, device=device, variants=variants, on_progress=on_progress
    )
    tried = list(levers.tried())
    fitting = [l for l in tried if capacity.verdict(l.nbytes) is FitVerdict.FITS]
    least = None if fitting else min(tried, key=lambda lever: lever.nbytes, default=None)
    return replace(found, levers=without_needless(fitting), least=least)
