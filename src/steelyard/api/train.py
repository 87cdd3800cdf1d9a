"""The loop of ``steelyard run``: trains a workload with a plan for some steps, returns a receipt.

Not for the user's own loop: that calls a Step, see step.py.
"""

import contextlib
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch

from steelyard.api.planned import Planned
from steelyard.api.rank_context import keep_to_own_cores
from steelyard.api.replan import Replanner
from steelyard.api.step import Step
from steelyard.api.workload import Workload
from steelyard.measure.process import rss_peak_bytes
from steelyard.planner.multi_host import check_seen_by_all
from steelyard.plans.receipt import Receipt, RunMeasurement
from steelyard.run.loss_log import Losses
from steelyard.run.train_loop import Checkpoints, StepReport, train

OnStep = Callable[[StepReport], None]


def run_workload(
    planned: Planned,
    workload: Workload,
    *,
    steps: int,
    seed: int | None = 0,
    checkpoint: Path | None = None,
    checkpoint_every: int = 100,
    resume: Path | bool | None = None,
    adapt: Path | None = None,
    losses: Path | None = None,
    on_step: OnStep = lambda _: None,
    on_note: Callable[[str], None] = lambda _: None,
) -> Receipt:
    """Train with the plan and return the receipt.

    ``adapt`` is the path of the plan file if the plan may be replaced during the run; new plans are
    written to the same folder. ``losses`` is the path of the plan file if the first rank should
    write the loss of each step to a file next to it.
    """
    if adapt is not None:
        # The costs that replanning compares are measured now, while the machine is idle.
        planned.session.pricing.checked  # noqa: B018 measures
    step: Step = planned.apply(workload.model)
    if checkpoint is not None and planned.plan.decisions.target.hosts > 1:
        check_seen_by_all(checkpoint, step.ranks.coordinator)
    if step.ranks.channels:
        keep_to_own_cores()
    log = _Log(step)

    def add_note(note: str) -> None:
        log.notes.append(note)
        on_note(note)

    if step.stands_in:
        on_note(f"runs {step.stands_in}")
    written_losses = None
    if losses is not None and step.ranks.coordinator.saves:
        written_losses = Losses(losses, add_note)
    replanner = None if adapt is None else Replanner(step, planned.session, adapt, add_note)

    def report_step(report: StepReport) -> None:
        log.add(report)
        if written_losses is not None:
            optimizer = step.optimizer
            written_losses.add(
                step=report.step, loss=report.loss, seconds=report.seconds, lr=_lr_of(optimizer)
            )
        on_step(report)
        if replanner is not None:
            has_new_plan = replanner.after_step(report.step, report.seconds)
            log.start_next_step(has_new_plan=has_new_plan)

    checkpoints = None
    if checkpoint is not None:
        checkpoints = Checkpoints(
            folder=checkpoint,
            every=checkpoint_every,
            plan=planned.plan.decisions.name,
            resume=resume or False,
        )
    with contextlib.ExitStack() as stack:
        for resource in (written_losses, replanner):
            if resource is not None:
                stack.enter_context(contextlib.closing(resource))
        finished = train(
            step.live,
            workload.batches,
            steps=steps,
            seed=seed,
            checkpoints=checkpoints,
            on_step=report_step,
            on_note=add_note,
            meter=step.memory_meter.peak_bytes,
            may_meter=step.memory_meter.may_meter,
            predicted_bytes=planned.plan.predicted.peak.nbytes,
            coordinator=step.ranks.coordinator,
        )
    if finished.stopped_by == "SIGINT":
        raise KeyboardInterrupt
    log.notes += step.notes
    written = None if replanner is None else replanner.written
    return Receipt(plan=step.plan, measured=log.measured(finished.step), written=written)


def _lr_of(optimizer: torch.optim.Optimizer | None) -> float | list[float] | None:
    """Return the learning rate of all parameter groups, as one number if they agree."""
    if optimizer is None:
        return None
    rates = [float(group["lr"]) for group in optimizer.param_groups if "lr" in group]
    if len(set(rates)) > 1:
        return rates
    return rates[0] if rates else None


class _Log:
    """Collects the measurements of the steps, for the receipt."""

    def __init__(self, step: Step) -> None:
        self._step = step
        self._traffic = [step.traffic_counter.total()]
        self.notes: list[str] = []
        self._steps = 0
        self._seconds: list[float] = []
        self._peak_bytes: int | None = None
        self._first: float | None = None
        self._last: float | None = None

    def add(self, report: StepReport) -> None:
        traffic = self._step.traffic_counter.total()
        self._steps += 1
        if report.seconds is not None and self._step.is_as_planned:
            self._seconds.append(report.seconds)
            self._traffic.append(traffic)
        else:
            self._traffic[-1] = traffic
        if report.peak_bytes is not None:
            self._peak_bytes = report.peak_bytes
        self._first = report.loss if self._first is None else self._first
        self._last = report.loss

    def start_next_step(self, *, has_new_plan: bool) -> None:
        """Start the next step; bytes that were sent since the last one are not counted.

        With ``has_new_plan``, the figures so far are dropped.
        """
        if has_new_plan:
            self._seconds.clear()
            self._peak_bytes = None
            self._traffic = [self._step.traffic_counter.total()]
        self._traffic[-1] = self._step.traffic_counter.total()

    def _max_over_ranks(self, nbytes: int | None) -> int | None:
        """Return the maximum over all ranks; a rank that stood by may have no value."""
        most = self._step.ranks.coordinator.most(-1 if nbytes is None else nbytes)
        return most if most >= 0 else None

    def _min_over_ranks(self, seconds: float) -> float:
        """Return the step time of the rank that waited least.

        That rank worked longest, and the prediction is for it.
        """
        return -self._step.ranks.coordinator.most(-round(seconds * 1e9)) / 1e9

    def measured(self, steps: int) -> RunMeasurement:
        # The first step also allocates state, fills caches and touches memory for the first time.
        seconds = median(self._seconds[1:]) if self._seconds[1:] else None
        busy, waited, sent = self._step.traffic_counter.median_exchange(self._traffic)
        # Some ranks may not have metered a step: see MemoryMeter.may_meter.
        peaks = self._step.ranks.coordinator.each(
            -1 if self._peak_bytes is None else self._peak_bytes
        )
        sent = self._max_over_ranks(sent)
        if self._step.are_unequal:
            waited = self._min_over_ranks(waited)
        self.notes += self._step.notes_on_exchange(self._traffic, waited=waited, sent=sent)
        return RunMeasurement(
            steps=steps,
            first_step=steps - self._steps + 1,
            memory_bytes=max((n for n in peaks if n >= 0), default=None),
            rss_bytes=rss_peak_bytes(),
            communication_bytes=sent,
            communication_seconds=busy,
            computation_seconds=None if seconds is None else max(0.0, seconds - waited),
            step_seconds=seconds,
            first_loss=self._first,
            last_loss=self._last,
            ranks=self._step.memory_of_ranks(peaks),
            stands_in=self._step.stands_in,
            notes=(*self.notes, *self._step.memory_meter.notes(is_metered=max(peaks) >= 0)),
        )
