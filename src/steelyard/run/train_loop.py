"""The training loop: steps, checkpoints, resuming to the same bits, stopping cleanly.

Not for schedulers or anything else around a step; users who need that write their own loop around
``step`` and ``step.backward``.
"""

import contextlib
import math
import shlex
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from steelyard.errors import CheckpointError, NonFinite, then
from steelyard.ir.graph import OutputKind
from steelyard.run.binding import live_tensors
from steelyard.run.checkpoint import state
from steelyard.run.checkpoint.directory import CheckpointFolder, step_of, verify
from steelyard.run.checkpoint.state import Position
from steelyard.run.data_feed import Batches, Feed
from steelyard.run.finite_check import Blamed, blamed
from steelyard.run.launch.coordination import Alone, Coordinator
from steelyard.run.rng_state import random_state, seed_everything, set_random_state
from steelyard.run.step import LiveStep

# Runs a callable once and returns the allocator's peak in bytes.
Meter = Callable[[Callable[[], None]], int]
# True if the step with this batch may be metered.
MayMeter = Callable[[Any], bool]

_SINGLE_RANK = Alone()


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    """The result of one step. A metered step has ``peak_bytes`` but no seconds, because metering
    slows it.
    """

    step: int
    steps: int
    loss: float
    seconds: float | None
    peak_bytes: int | None
    predicted_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoints:
    """The checkpoint folder, the number of steps between saves, and the number of checkpoints to
    keep. ``resume`` is a checkpoint, or True for the latest one.
    """

    folder: Path
    every: int
    keep: int = 3
    plan: str = ""
    resume: Path | bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """The result of a run; ``stopped_by`` names the signal that stopped it, if one did."""

    step: int
    loss: float | None
    stopped_by: str
    exit_code: int
    checkpoint: Path | None


def train(
    step: LiveStep,
    batches: Batches,
    *,
    steps: int,
    seed: int | None = None,
    checkpoints: Checkpoints | None = None,
    on_step: Callable[[StepReport], None] | None = None,
    on_note: Callable[[str], None] | None = None,
    meter: Meter | None = None,
    may_meter: MayMeter = lambda _: True,
    predicted_bytes: int = 0,
    coordinator: Coordinator = _SINGLE_RANK,
) -> Finished:
    """Run until ``steps`` steps are done, counting those of a resumed run.

    If a save fails during training (because the disk is full, for example), a note says so and
    training continues, with the earlier checkpoints untouched. A failed save at the end is an
    error. A batch that cannot be loaded or used is an error too, and the steps before it are saved.
    SIGTERM and Ctrl-C let the step finish, save and return; a second Ctrl-C does not wait.
    ``coordinator`` connects the ranks that train together: one saves, and a signal to any of them
    stops all after the same step.
    """
    if seed is not None:
        seed_everything(seed)
    run = _TrainingRun(step, Feed(batches), checkpoints, on_note, coordinator)
    stopped_by = ""
    with run.folder_locked(), run.counting_updates(), _Signals() as signals:
        run.begin()
        first, warm_up = run.step, step.guard.warm_up if step.guard else 0
        if first >= steps:
            run.tell(f"no step was taken: the checkpoint is at step {first} of {steps}")
        while run.step < steps and not (stopped_by := coordinator.stopping(signals.received)):
            step_meter = meter if run.step >= first + 1 + warm_up else None
            report = _one_step(run, step_meter, may_meter, steps, predicted_bytes)
            if report.peak_bytes is not None:
                meter = None
            run.save_if_due()
            if on_step is not None:
                on_step(report)
        # A signal during the last step must be reported too.
        stopped_by = stopped_by or signals.received
        run.save_last()
    return Finished(
        step=run.step,
        loss=run.loss,
        stopped_by=stopped_by,
        exit_code=128 + signal.Signals[stopped_by] if stopped_by else 0,
        checkpoint=run.saved,
    )


def _one_step(
    run: "_TrainingRun", meter: Meter | None, may_meter: MayMeter, steps: int, predicted_bytes: int
) -> StepReport:
    losses: list[torch.Tensor] = []
    peak_bytes = seconds = None
    with run.saving_on_failure():
        batch = run.feed.next()
        if meter is not None and may_meter(batch):
            # Gradients of an earlier step would be counted into this peak.
            run.live.zero_grad()
            peak_bytes = meter(lambda: losses.append(run.live(batch)))
            loss = float(losses.pop())
        else:
            start = time.perf_counter()
            loss = float(run.live(batch))
            seconds = time.perf_counter() - start
    run.record(loss)
    return StepReport(
        step=run.step,
        steps=steps,
        loss=loss,
        seconds=seconds,
        peak_bytes=peak_bytes,
        predicted_bytes=predicted_bytes,
    )


class _TrainingRun:
    """The mutable state of a run, and its checkpoints."""

    def __init__(
        self,
        live: LiveStep,
        feed: Feed,
        settings: Checkpoints | None,
        note: Callable[[str], None] | None,
        coordinator: Coordinator,
    ) -> None:
        self.live = live
        self.feed = feed
        self.step = 0
        self.loss: float | None = None
        self.saved: Path | None = None
        self._note = note
        self._coordinator = coordinator
        self._settings = settings
        self._folder = CheckpointFolder(settings.folder, keep=settings.keep) if settings else None
        self._first = 0
        self._updates = 0
        outputs = live.program.graph.outputs
        tensors = live_tensors(live.model, {})
        written = {o.target for o in outputs if o.kind is OutputKind.UPDATE}
        self._written = [tensors[name] for name in sorted(written & tensors.keys())]

    def folder_locked(self) -> contextlib.AbstractContextManager[None]:
        saves = self._folder is not None and self._coordinator.saves
        return self._folder.locked() if self._folder and saves else contextlib.nullcontext()

    def begin(self) -> None:
        settings, folder = self._settings, self._folder
        if settings is None or folder is None:
            return
        state.check_savable(self.live.model)
        if settings.resume is not False:
            self._resume(self._checkpoint_to_resume(settings.resume, folder), folder)
        elif folder.checkpoints():
            raise CheckpointError(
                f"{folder.path} holds checkpoints of an earlier run",
                expected="an empty folder for a new run",
                remedy="resume it with --resume, or give another folder",
            )

    @contextlib.contextmanager
    def counting_updates(self) -> Iterator[None]:
        """Count optimizer steps when they begin; before that, no weight has changed."""
        optimizer = self.live.optimizer
        if optimizer is None:
            yield
            return

        def count(*_: object) -> None:
            self._updates += 1

        hook = optimizer.register_step_pre_hook(count)
        try:
            yield
        finally:
            hook.remove()

    @contextlib.contextmanager
    def saving_on_failure(self) -> Iterator[None]:
        """Run a step in this context: if it fails before it changes a weight, save the steps before
        it.
        """
        # Sharded state is gathered from all ranks, one of which may have failed.
        if self._folder is None or not self._coordinator.saves or self.live.needs_all_ranks:
            yield
            return
        before = self._position()
        buffers = [buffer.clone() for buffer in self._written]
        try:
            yield
        except (Exception, SystemExit) as error:
            if self.live.optimizer is None or self._updates == self.step - self._first:
                with torch.no_grad():
                    for buffer, value in zip(self._written, buffers, strict=True):
                        buffer.copy_(value)
                self._rescue(before, error)
            raise

    def _rescue(self, before: Position, error: BaseException) -> None:
        try:
            self.save_last(before)
        except CheckpointError as unsaved:
            then(error, unsaved.happened)
        else:
            if self.saved is not None:
                folder = shlex.quote(str(self.saved.parent))
                then(error, f"step {self.step} is saved; continue with --resume {folder}")

    def record(self, loss: float) -> None:
        self.step += 1
        self.loss = loss
        if not math.isfinite(loss):
            raise self._non_finite_error(loss)

    def _non_finite_error(self, loss: float) -> NonFinite:
        """Return the error that names the rank with the first non-finite value before any
        exchange.
        """
        finite, first = self.live.finite, Blamed()
        if finite is not None:
            codes = self._coordinator.each(finite.code)
            first = blamed(codes, offset=self.step - finite.step)
        resume = f"resume from {self.saved}" if self.saved else "start again"
        repair = "lower the learning rate or clip gradients"
        if first.is_batch:
            repair = "look for non-finite values in the data"
        origin = f"; first not finite: {first.words}" if first.words else ""
        return NonFinite(
            f"the loss is {loss} at step {self.step}{origin}",
            expected="a finite loss; nothing was saved after it",
            remedy=f"{repair}, then {resume}",
            rank=first.rank,
        )

    def save_if_due(self) -> None:
        if self._settings is None or self.step % self._settings.every:
            return
        try:
            self._save_gathered(is_due=self._coordinator.saves)
        except CheckpointError as error:
            if not isinstance(error.__cause__, OSError):
                raise
            self.tell(f"{error.happened}; training continues; {error.remedy}")

    def save_last(self, position: Position | None = None) -> None:
        if self._folder is None or self.step == 0:
            return
        is_saved = self.saved is not None and self.saved.name == f"step-{self.step:06d}"
        self._save_gathered(position, is_due=self._coordinator.saves and not is_saved)

    def _save_gathered(self, position: Position | None = None, *, is_due: bool) -> None:
        """Save on the rank whose turn it is; sharded state is first gathered from all ranks."""
        if self.live.needs_all_ranks and not self._coordinator.same(is_due):
            return
        with self.live.whole():
            residuals = self.live.residual_state()
            if is_due:
                self._save(position, residuals)

    def _position(self) -> Position:
        return Position(
            step=self.step,
            epoch=self.feed.epoch,
            taken=self.feed.taken,
            now=random_state(self.feed.generators),
            began=self.feed.began,
        )

    def _save(self, position: Position | None, lost: Mapping[str, torch.Tensor]) -> None:
        assert self._folder is not None
        assert self._settings is not None
        write = partial(
            state.save,
            model=self.live.model,
            optimizer=self.live.optimizer,
            position=position or self._position(),
            plan=self._settings.plan,
            lost=lost,
        )
        with self.live.states_readable():
            self.saved = self._folder.add(self.step, write)

    def tell(self, text: str) -> None:
        if self._note is not None:
            self._note(text)

    def _checkpoint_to_resume(self, resume: Path | bool, folder: CheckpointFolder) -> Path:
        """Return the checkpoint to resume from; without a path, this is the one that the first rank
        finds.
        """
        if isinstance(resume, Path):
            return resume
        latest = folder.latest() if self._coordinator.saves else folder.path
        return folder.path / f"step-{self._coordinator.same(step_of(latest)):06d}"

    def _resume(self, chosen: Path, folder: CheckpointFolder) -> None:
        try:
            verify(chosen)
        except CheckpointError as error:
            before = folder.before(chosen)
            if before is not None:
                error = CheckpointError(
                    error.happened,
                    expected=error.expected,
                    remedy="resume from the previous checkpoint: --resume "
                    f"{shlex.quote(str(before))}",
                )
            raise error from None
        with self.live.whole(), self.live.states_loading() as allocator_for:
            position = state.load(
                chosen,
                model=self.live.model,
                optimizer=self.live.optimizer,
                allocator_for=allocator_for,
                note=self.tell,
            )
        if unrestored := self.live.restore_residuals(state.residuals_in(chosen)):
            self.tell(
                f"the error feedback of {len(unrestored)} gradients is dropped: under this plan no "
                "rank holds them whole"
            )
        self.feed.go_to(epoch=position.epoch, taken=position.taken, began=position.began)
        set_random_state(position.now, self.feed.generators)
        # The saved random state is that of the first rank and of its GPU.
        self._coordinator.draw_equally(self.live.device)
        self.step = self._first = self.live.taken = position.step
        self.saved = chosen
        for path in folder.go_on_from(chosen) if self._coordinator.saves else ():
            self.tell(f"renamed {path.name}, because it is later than {chosen.name}")


class _Signals:
    """Defers SIGTERM and Ctrl-C to the end of a step; a second Ctrl-C does not wait.

    Only the main thread may install handlers; elsewhere signals keep their previous effect.
    """

    def __init__(self) -> None:
        self.received = ""
        self._before: dict[int, Any] = {}

    def __enter__(self) -> "_Signals":
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                self._before[number] = signal.signal(number, self._receive)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _receive(self, number: int, _: FrameType | None) -> None:
        if self.received and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.received = signal.Signals(number).name


__all__ = ["Checkpoints", "Finished", "Meter", "StepReport", "train"]
