"""What ``steelyard run`` does: a plan, a workload, a number of steps, a receipt.

Not for one's own loop: that is a Step, see step.py.
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
    """``adapt`` is the plan's file, beside which those are written that take its place while it
    runs; None where it stays. ``losses`` is the plan's file, beside which the loss of each step is
    written, by the first rank."""
    if adapt is not None:
        # What it compares while training runs is measured before, on a machine that is idle.
        planned.session.pricing.checked  # noqa: B018 measures
    step: Step = planned.apply(workload.model)
    if checkpoint is not None and planned.plan.decisions.target.hosts > 1:
        check_seen_by_all(checkpoint, step.ranks.coordinator)
    if step.ranks.channels:
        keep_to_own_cores()
    log = _Log(step)

    def noted(note: str) -> None:
        log.notes.append(note)
        on_note(note)

    if step.stands_in:
        on_note(f"runs {step.stands_in}")
    written_losses = None
    if losses is not None and step.ranks.coordinator.saves:
        written_losses = Losses(losses, noted)
    adapting = None if adapt is None else Replanner(step, planned.session, adapt, noted)

    def seen(report: StepReport) -> None:
        log.add(report)
        if written_losses is not None:
            optimizer = step.optimizer
            written_losses.add(
                step=report.step, loss=report.loss, seconds=report.seconds, lr=_lr_of(optimizer)
            )
        on_step(report)
        if adapting is not None:
            is_other = adapting.after(report.step, report.seconds)
            log.begin_behind(anew=is_other)

    checkpoints = None
    if checkpoint is not None:
        checkpoints = Checkpoints(
            folder=checkpoint,
            every=checkpoint_every,
            plan=planned.plan.decisions.name,
            resume=resume or False,
        )
    with contextlib.ExitStack() as until_then:
        for closed in (written_losses, adapting):
            if closed is not None:
                until_then.enter_context(contextlib.closing(closed))
        finished = train(
            step.live,
            workload.batches,
            steps=steps,
            seed=seed,
            checkpoints=checkpoints,
            on_step=seen,
            on_note=noted,
            meter=step.meter,
            may_meter=step.may_meter,
            predicted_bytes=planned.plan.predicted.peak.nbytes,
            coordinator=step.ranks.coordinator,
        )
    if finished.stopped_by == "SIGINT":
        raise KeyboardInterrupt
    log.notes += step.notes
    written = None if adapting is None else adapting.written
    return Receipt(plan=step.plan, measured=log.measured(finished.step), written=written)


def _lr_of(optimizer: torch.optim.Optimizer | None) -> float | list[float] | None:
    """Of all groups of parameters; one number where it is the same."""
    if optimizer is None:
        return None
    rates = [float(group["lr"]) for group in optimizer.param_groups if "lr" in group]
    if len(set(rates)) > 1:
        return rates
    return rates[0] if rates else None


class _Log:
    """What the steps reported, for the receipt."""

    def __init__(self, step: Step) -> None:
        self._step = step
        self._traffic = [step.traffic()]
        self.notes: list[str] = []
        self._steps = 0
        self._seconds: list[float] = []
        self._peak_bytes: int | None = None
        self._first: float | None = None
        self._last: float | None = None

    def add(self, report: StepReport) -> None:
        traffic = self._step.traffic()
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

    def begin_behind(self, *, anew: bool) -> None:
        """What was sent between two steps is of neither; and figures are of the plan that runs."""
        if anew:
            self._seconds.clear()
            self._peak_bytes = None
            self._traffic = [self._step.traffic()]
        self._traffic[-1] = self._step.traffic()

    def _of_all(self, nbytes: int | None) -> int | None:
        """Of the rank that held most; one that stood by may know of nothing."""
        most = self._step.ranks.coordinator.most(-1 if nbytes is None else nbytes)
        return most if most >= 0 else None

    def _least(self, seconds: float) -> float:
        """Of the rank that waited least, and so worked longest: that one is predicted."""
        return -self._step.ranks.coordinator.most(-round(seconds * 1e9)) / 1e9

    def measured(self, steps: int) -> RunMeasurement:
        # The first step pays for what is made once: state, caches, first touches of memory.
        seconds = median(self._seconds[1:]) if self._seconds[1:] else None
        busy, waited, sent = self._step.exchanged(self._traffic)
        # Of ranks, some may have metered no step: see Step.may_meter.
        held = self._step.ranks.coordinator.each(
            -1 if self._peak_bytes is None else self._peak_bytes
        )
        sent = self._of_all(sent)
        if self._step.are_unequal:
            waited = self._least(waited)
        self.notes += self._step.notes_on_ranks(waited, sent)
        self.notes += self._step.notes_on_codes(self._traffic)
        return RunMeasurement(
            steps=steps,
            first_step=steps - self._steps + 1,
            memory_bytes=max((n for n in held if n >= 0), default=None),
            rss_bytes=rss_peak_bytes(),
            communication_bytes=sent,
            communication_seconds=busy,
            computation_seconds=None if seconds is None else max(0.0, seconds - waited),
            step_seconds=seconds,
            first_loss=self._first,
            last_loss=self._last,
            ranks=self._step.memory_of_ranks(held),
            stands_in=self._step.stands_in,
            notes=(*self.notes, *self._step.notes_on_metering(is_metered=max(held) >= 0)),
        )
