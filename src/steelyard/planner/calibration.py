"""Ratios of whole-step time to the sum of operator times, from steps run on the live model.

Not for timing the steps: see measure/step_calibration.py. Not for applying the ratios to the
costs: see cost_provider.py.
"""

import contextlib
from collections.abc import Callable, Iterator

import torch
from torch import nn

from steelyard import _torch
from steelyard.capture.step import CapturedStep
from steelyard.ir.metrics import Estimate
from steelyard.ir.program import Program
from steelyard.measure.conditions import MeasuringConditions, profiler_error
from steelyard.measure.device_memory import free_bytes, random_devices
from steelyard.measure.operators.memory import is_profiled
from steelyard.measure.step_calibration import Runnable, host_lead, step_time_ratio, whole_step
from steelyard.predict import peak_bytes
from steelyard.predict.cost_table import CostTable
from steelyard.run.codegen import emit
from steelyard.run.compiled.inductor import compile_program
from steelyard.run.step import LiveStep

# Time budget of the calibration against a whole step, and of one calibration for each number of
# micro-batches. If a step takes longer, it is not calibrated.
_CALIBRATION_SECONDS, _SPLIT_CALIBRATION_SECONDS = 12.0, 8.0
_SHARE_OF_FREE_MEMORY = 0.5


def operator_seconds(program: Program, costs: CostTable) -> float:
    """Return the sum of the operator times of a whole step."""
    nodes = program.graph.by_name
    computed = [nodes[i.node] for i in program.instructions if i.sink is None]
    return program.repeats * sum(costs.seconds(node).value for node in computed)


class StepCalibration:
    """The calibration of one machine.

    The cache keeps each ratio, so that two plans of a step and its run agree. A ratio is None if
    the step cannot be run in reasonable time.
    """

    def __init__(
        self, conditions: MeasuringConditions, *, on_progress: Callable[[str], None]
    ) -> None:
        self._conditions = conditions
        self._on_progress = on_progress

    def whole_ratio(self, source: CapturedStep, base: Program, costs: CostTable) -> Estimate | None:
        """Return the ratio of the undivided step."""
        if not self._can_run(source, base, costs):
            return None
        return self._calibrated(
            source,
            base.graph.fingerprint,
            "calibrating them with a whole step",
            lambda: self._whole_step(self._runnable(source, base, costs)),
            operators=operator_seconds(base, costs),
            scale=self._conditions.host_speed,
        )

    def compiled_ratio(
        self, source: CapturedStep, base: Program, lowered: Program, costs: CostTable
    ) -> Estimate | None:
        """Return the ratio of the compiled step; the compiler lowered ``base`` to ``lowered``."""
        if not self._can_run(source, lowered, costs):
            return None
        return self._calibrated(
            source,
            f"{base.graph.fingerprint} compiled",
            "compiling a whole step and calibrating them with it",
            lambda: self._whole_step(self._runnable(source, base, costs, lowered=lowered)),
            operators=operator_seconds(lowered, costs),
            scale=self._conditions.host_speed,
        )

    def split_ratio(
        self, source: CapturedStep, cut: Program, base: Program, costs: CostTable
    ) -> Estimate | None:
        """Return the ratio of the step in micro-batches, divided by that of the whole step."""
        if not self._can_run(source, cut, costs):
            return None
        return self._calibrated(
            source,
            _name_of_split(cut, base),
            f"calibrating them with a step in {cut.repeats} micro-batches",
            lambda: step_time_ratio(
                self._runnable(source, cut, costs),
                self._runnable(source, base, costs),
                seconds_budget=_SPLIT_CALIBRATION_SECONDS,
                device=self._conditions.torch_device,
            ),
            operators=operator_seconds(cut, costs) / operator_seconds(base, costs),
        )

    def is_split_known(self, cut: Program, base: Program) -> bool:
        """True if the cache has the ratio of the step in micro-batches."""
        with self._conditions.threads_of_rank():
            context = self._conditions.context()
            found = self._conditions.cache.read_whole(context, _name_of_split(cut, base))
        return found is not None and bool(found.low)

    def host_lead(self, source: CapturedStep, base: Program, costs: CostTable) -> Estimate | None:
        """Return the seconds by which the host runs ahead of the GPU in a whole step."""
        run = self._runnable(source, base, costs).run
        return self._calibrated(
            source,
            f"lead of the host in {base.graph.fingerprint}",
            "measuring how far the host runs ahead",
            lambda: host_lead(run, device=self._conditions.torch_device),
            operators=1.0,
        )

    def _whole_step(self, runnable: Runnable) -> Estimate | None:
        return whole_step(
            runnable, seconds_budget=_CALIBRATION_SECONDS, device=self._conditions.torch_device
        )

    def _calibrated(
        self,
        source: CapturedStep,
        name: str,
        doing: str,
        run: Callable[[], Estimate | None],
        *,
        operators: float,
        scale: float = 1.0,
    ) -> Estimate | None:
        """Return the ratio of whole-step time to the sum of operator times, scaled by ``scale``.

        ``run`` measures the ratio once, and the cache keeps it, so that two plans of a step and its
        run use the same ratio. The cache stores the step time itself, because more of the
        ``operators`` may be measured the next time.
        """
        with self._conditions.threads_of_rank():
            context = self._conditions.context()
            found = self._conditions.cache.read_whole(context, name)
            if found is None or not found.low:
                if is_profiled(is_quick=True):
                    raise profiler_error("a whole step")
                self._on_progress(doing)
                with (
                    _restored(source.model, self._conditions.torch_device),
                    self._conditions.load.at_work(),
                ):
                    ratio = run()
                if ratio is None:
                    return None
                found = self._conditions.cache.settle_whole(context, name, ratio.scaled(operators))
        return found.scaled(scale / operators)

    def _can_run(self, source: CapturedStep, program: Program, costs: CostTable) -> bool:
        """True if a step can run on the live model without leaving any changes."""
        return (
            not source.is_imagined
            and not source.captured().is_grown
            and not _torch.any_hooks(list(source.model.parameters()))
            and operator_seconds(program, costs) > 0
            and peak_bytes(program, costs)
            < _SHARE_OF_FREE_MEMORY * free_bytes(self._conditions.torch_device)
        )

    def _runnable(
        self,
        source: CapturedStep,
        program: Program,
        costs: CostTable,
        *,
        lowered: Program | None = None,
    ) -> Runnable:
        """Return the step on the user's model, to be run within ``_restored``; compiled if
        lowered.
        """
        parts = program.repeats
        step = LiveStep(
            source.model,
            program,
            constants=source.constants(micro_batches=parts),
            batch=source.batch,
            reduction=source.reduction().value if parts > 1 else "mean",
            runner=compile_program if lowered else emit,
        )

        def run() -> None:
            step.backward(source.batch)
            step.zero_grad()

        return Runnable(run=run, operator_seconds=operator_seconds(lowered or program, costs))


def _name_of_split(cut: Program, base: Program) -> str:
    return f"{cut.repeats} x {cut.graph.fingerprint} beside {base.graph.fingerprint}"


@contextlib.contextmanager
def _restored(model: nn.Module, torch_device: torch.device) -> Iterator[None]:
    """Restore gradients, buffers and the random state at the end of the context."""
    gradients = [(p, p.grad) for p in model.parameters()]
    buffers = [(b, b.detach().clone()) for b in model.buffers()]
    for parameter, _ in gradients:
        parameter.grad = None
    try:
        with torch.random.fork_rng(devices=random_devices(torch_device)):
            yield
    finally:
        for parameter, gradient in gradients:
            parameter.grad = gradient
        with torch.no_grad():
            for buffer, saved in buffers:
                buffer.copy_(saved)
