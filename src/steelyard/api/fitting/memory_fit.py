"""Answers whether a step fits a device: of a model, of a script, or of a configuration.

Not for planning: see api/planning.py.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch import nn

from steelyard.api.argument_checks import check
from steelyard.api.fitting.config_workload import ConfigRequest
from steelyard.api.workload import Workload, load_workload
from steelyard.capture.tracing.joint_graph import Loss
from steelyard.capture.tracing.optimizer import OptimizerFactory
from steelyard.hardware.cluster import Cluster, Device
from steelyard.planner.fit.candidates import StepVariant
from steelyard.planner.fit.step_memory import FitStep
from steelyard.planner.memory_fit import fit_step
from steelyard.plans.memory_fit import Fit

_MOST_DEVICES = 1024


def fit(
    model: nn.Module,
    loss: Loss,
    batch: Any,
    *,
    optimizer: OptimizerFactory | None = None,
    gpu: str,
    gpus: int = 1,
) -> Fit:
    """Return whether the eager step fits a GPU, such as ``"RTX-4090"``, and what would make it fit.

    The arguments are those of ``plan``. The model may be on the meta device. Several ``gpus`` shard
    weights, gradients and optimizer state, and divide the batch.
    """
    fine = type(gpus) is int and 1 <= gpus <= _MOST_DEVICES
    check("gpus", gpus, fine=fine, expected=f"a whole number from 1 to {_MOST_DEVICES}")
    step = FitStep(model=model, loss=loss, batch=batch, optimizer=optimizer)
    return fit_step(step, Cluster.gpu(gpu).device, title=type(model).__name__, devices=gpus)


def fit_script(
    script: str,
    device: Device,
    *,
    devices: int,
    title: str,
    on_verdict: Callable[[Fit], None],
    on_progress: Callable[[str], None],
) -> Fit:
    on_progress(f"loading {script}")
    return fit_step(
        _step(load_workload(script)),
        device,
        devices=devices,
        title=title,
        on_verdict=on_verdict,
        on_progress=on_progress,
    )


def fit_config(
    request: ConfigRequest,
    device: Device,
    *,
    devices: int,
    title: str,
    on_verdict: Callable[[Fit], None],
    on_progress: Callable[[str], None],
) -> Fit:
    on_progress(f"reading {request.path}")
    return fit_step(
        _step(request.workload()),
        device,
        devices=devices,
        title=title,
        variants=tuple(_variants(request)),
        on_verdict=on_verdict,
        on_progress=on_progress,
    )


def _variants(request: ConfigRequest) -> list[StepVariant]:
    """Return the changes that only a configuration allows: another precision, adapters, length."""

    def changed(**settings: Any) -> Callable[[], FitStep]:
        return lambda: _step(replace(request, **settings).workload())

    found: list[StepVariant] = []
    if request.precision in ("fp32", "bf16-mixed", "fp16-mixed"):
        costs = "weights, gradients and state are rounded to 8 bits of mantissa"
        make = changed(precision="bf16")
        found.append(StepVariant(name="weights in bf16", pays=costs, make=make))
    if request.sequence > 1:
        half = request.sequence // 2
        make = changed(sequence=half)
        name = f"{half} tokens"
        found.append(StepVariant(name=name, pays="shorter samples", make=make, keeps_model=True))
    if request.lora is None and _has_peft():
        costs = "only adapters are trained"
        found.append(StepVariant(name="LoRA of rank 16", pays=costs, make=changed(lora=16)))
    return found


def _has_peft() -> bool:
    from importlib.util import find_spec

    return find_spec("peft") is not None


def _step(workload: Workload) -> FitStep:
    return FitStep(
        model=workload.model,
        loss=workload.loss,
        batch=workload.first_batch(),
        optimizer=workload.optimizer,
    )
