"""Time and memory of a training loop that the user wrote around ``step.backward``.

A pass is one call of ``step.backward``. A pass begins a new training step if weights or gradients
were changed before it; passes whose gradients accumulate therefore belong to one step. The
optimizer is the user's: its steps are observed through torch's hooks, for any optimizer that holds
the model's parameters. Not for whole steps, ``step(batch)``: see step.py.
"""

import contextlib
import weakref
from collections.abc import Callable, Iterator
from statistics import median
from typing import Any

import torch
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from steelyard import _torch
from steelyard.measure.operators.memory import Metered, begin_metering, is_profiled
from steelyard.measure.operators.timer import Laps
from steelyard.run.step import LiveStep
from steelyard.units import format_bytes, format_seconds


class UserLoop:
    """Measures the passes and optimizer steps of a user's loop.

    ``resident`` returns the bytes that are resident for a whole step, as the plan counts them.
    """

    def __init__(
        self, live: LiveStep, *, device: torch.device, resident: Callable[[], int]
    ) -> None:
        self._live = live
        self._parameters = [p for p in live.model.parameters() if p.requires_grad]
        self.passes = self.steps = 0
        self.updates = _Updates(
            self._parameters, planned=live.optimizer, device=device, resident=resident
        )
        self._passes = Laps(device)
        self._gaps = Laps(device)
        # One entry for each gap between two passes: True if it is between two training steps.
        self._is_step_gap: list[bool] = []
        self._end_gap_timer: Callable[[], None] | None = None
        self._mark: list[object] = []
        # By the presence of accumulated gradients: the peak of such a pass, and the bytes of
        # optimizer state at that time.
        self._peaks: dict[bool, tuple[int, int]] = {}

    @contextlib.contextmanager
    def wrap_pass(self) -> Iterator[bool]:
        """Wrap one pass, which counts unless it raises; yield True if it begins a step."""
        is_new_step = self._mark != self._current_mark()
        updated = self.updates.end_gap()
        if self._end_gap_timer is not None and updated is not None:
            self._end_gap_timer()
            self._is_step_gap.append(is_new_step)
        self._end_gap_timer = None
        self.updates.is_in_pass = True
        try:
            yield is_new_step
        finally:
            self.updates.is_in_pass = False
        self.passes += 1
        self.steps += is_new_step
        self._mark = self._current_mark()
        self._end_gap_timer = self._gaps.begin()

    def start_timer(self) -> Callable[[], None]:
        """Start the timer of a pass; the returned function stops it."""
        return self._passes.begin()

    def needs_peak(self, *, has_gradients: bool) -> bool:
        return self.passes > 0 and has_gradients not in self._peaks

    def note_peak(self, nbytes: int, *, has_gradients: bool) -> None:
        self._peaks[has_gradients] = (nbytes, self._states_bytes())

    def passes_bytes(self) -> int | None:
        """Return the peak of forward and backward pass with the plan's optimizer state present."""
        states = self._states_bytes()
        return max(
            (n + max(0, states - states_then) for n, states_then in self._peaks.values()),
            default=None,
        )

    def peak_bytes(self, *, has_update: bool) -> int | None:
        """Return the peak to compare with the plan, or None if it is unknown.

        It is unknown if no pass was metered, or if the plan ``has_update`` and no optimizer step
        was metered.
        """
        passes = self.passes_bytes()
        if not has_update or passes is None:
            return passes
        return None if self.updates.peak_bytes is None else self._with_updates(passes)

    @property
    def pass_seconds(self) -> float | None:
        # The first pass also allocates state, fills caches and touches memory for the first time.
        return _median(self._passes.seconds[1:])

    def step_seconds(self, *, has_update: bool) -> float | None:
        """Return the time of a pass, plus the optimizer's step if the plan has one.

        None if that optimizer step was not observed.
        """
        seconds = self.pass_seconds
        if not has_update or seconds is None:
            return seconds
        update = self.updates.seconds
        return None if update is None else seconds + update

    @property
    def between_seconds(self) -> float | None:
        """The time between the last pass of a step and the first pass of the next one."""
        pairs = zip(self._gaps.seconds, self._is_step_gap)
        return _median([seconds for seconds, between in pairs if between][1:])

    def notes(self, *, has_update: bool) -> tuple[str, ...]:
        """Return notes for the receipt; the plan ``has_update`` if it counts an optimizer step."""
        return (*self._notes_on_time(), *self._notes_on_memory(has_update))

    def _notes_on_time(self) -> list[str]:
        seconds, between = self.pass_seconds, self.between_seconds
        if seconds is None:
            return []
        note = f"{format_seconds(seconds)} a call of step.backward (forward and backward pass)"
        if between is None:
            return [note]
        seconds_in_steps = self.updates.seconds
        steps_text = (
            f", {format_seconds(seconds_in_steps)} of it in steps of {self.updates.names}"
            if seconds_in_steps
            else ""
        )
        return [f"{note}, and {format_seconds(between)} from one step to the next{steps_text}"]

    def _notes_on_memory(self, has_update: bool) -> list[str]:
        passes, names = self.passes_bytes(), self.updates.names
        if passes is None:
            return []
        if has_update and self.updates.peak_bytes is None:
            why = (
                f"no step of {names} was metered yet"
                if names
                else "no optimizer step was observed (it may be compiled, or not torch.optim's)"
            )
            passes_text = f"forward and backward pass took {format_bytes(passes)}"
            return [f"{passes_text}; the plan's memory includes an update, but {why}"]
        if has_update:
            return self._note_on_other_optimizer()
        state_bytes = self.updates.foreign_bytes
        if not state_bytes and self.updates.peak_bytes is None:
            return []
        of = "passes" if self.updates.peak_bytes is None else "passes and updates"
        peak_text = f"with it, {format_bytes(self._with_updates(passes))} at the peak of {of}"
        not_in = "which a plan without optimizer= does not count"
        return [f"your {names} holds {format_bytes(state_bytes)}, {not_in}: {peak_text}"]

    def _note_on_other_optimizer(self) -> list[str]:
        other, planned = self.updates.foreign_class, type(self._live.optimizer).__name__
        if not other:
            return []
        which = (
            f"a different {other} than the plan's"
            if other == planned
            else f"{other}, not {planned}"
        )
        state_text = format_bytes(self.updates.foreign_bytes)
        return [f"the optimizer that stepped is {which}; its state, {state_text}, is in the memory"]

    def _with_updates(self, passes_bytes: int) -> int:
        return max(passes_bytes + self.updates.foreign_bytes, self.updates.peak_bytes or 0)

    def _states_bytes(self) -> int:
        return 0 if self._live.optimizer is None else _states_bytes(self._live.optimizer)

    def _current_mark(self) -> list[object]:
        """A value that changes when an optimizer steps, or gradients are zeroed, scaled or
        dropped.
        """
        gradients = [p.grad for p in self._parameters if p.grad is not None]
        if not gradients:
            return [object()]  # unequal to any such value: the next pass begins a step
        return [
            list(map(id, gradients)), _torch.versions(gradients), _torch.versions(self._parameters)
        ]  # fmt: skip


class _Metering:
    """Meters one optimizer step that starts with ``held_bytes`` in memory; it ends only once."""

    def __init__(self, held_bytes: int, end: Callable[[], Metered]) -> None:
        self._held_bytes = held_bytes
        self._end: Callable[[], Metered] | None = end

    def peak_bytes(self) -> int | None:
        """The peak of the step; None if the metering was discarded before."""
        end, self._end = self._end, None
        return None if end is None else self._held_bytes + end().peak_bytes

    def discard(self) -> None:
        self.peak_bytes()


class _Updates:
    """Observes the steps of all optimizers that hold parameters of the model."""

    def __init__(
        self,
        parameters: list[torch.nn.Parameter],
        *,
        planned: Optimizer | None,
        device: torch.device,
        resident: Callable[[], int],
    ) -> None:
        self.is_in_pass = False
        self._planned = planned
        self.peak_bytes: int | None = None
        self._ids = {id(p) for p in parameters}
        self._device, self._resident = device, resident
        self._laps = Laps(device)
        # The number of timed optimizer steps in the current gap between passes, and in each earlier
        # gap.
        self._in_gap, self._num_in_gaps = 0, list[int]()
        self._was_metered = False
        self._num_steps: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()
        self._unrelated: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._metered: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._end: Callable[[], None] | None = None
        self.metering: _Metering | None = None
        self.names = ""
        hooks = _register_hooks(weakref.ref(self))
        weakref.finalize(self, lambda: [hook.remove() for hook in hooks])

    @property
    def seconds(self) -> float | None:
        """The median time of all optimizer steps between two training steps."""
        laps, sums = iter(self._laps.seconds), list[float]()
        for number in self._num_in_gaps:
            sums.append(sum(next(laps) for _ in range(number)))
        return _median([s for s, n in zip(sums, self._num_in_gaps) if n][1:])

    @property
    def foreign_bytes(self) -> int:
        """The bytes of state in optimizers other than the plan's."""
        return sum(_states_bytes(one) for one in list(self._num_steps) if one is not self._planned)

    @property
    def foreign_class(self) -> str:
        """The class of an optimizer other than the plan's, if one has stepped."""
        others = (type(one).__name__ for one in list(self._num_steps) if one is not self._planned)
        return next(others, "")

    def end_gap(self) -> bool | None:
        """End the interval before a pass; return True if an optimizer stepped in it.

        Return None if a step was metered, because metering slows it.
        """
        self._stop()  # a step that raised, or one whose closure calls this pass
        number, metered = self._in_gap, self._was_metered
        self._in_gap, self._was_metered = 0, False
        self._num_in_gaps.append(number)
        return None if metered else number > 0

    def begin(self, optimizer: Optimizer, *, has_closure: bool) -> None:
        if not self._is_ours(optimizer):
            return
        self._stop()
        count = self._num_steps.get(optimizer, 0)
        self._num_steps[optimizer] = count + 1
        if not count:
            kinds = dict.fromkeys(type(one).__name__ for one in list(self._num_steps))
            self.names = " and ".join(kinds)
        if self.is_in_pass or has_closure:
            return
        if count and optimizer not in self._metered and not is_profiled(self._device):
            self._metered.add(optimizer)
            self._was_metered = True
            held = self._resident() + self.foreign_bytes
            self.metering = _Metering(held, begin_metering(device=self._device))
        else:
            self._end = self._laps.begin()

    def end(self, optimizer: Optimizer) -> None:
        if self._is_ours(optimizer):
            self._stop(is_whole=True)

    def _stop(self, *, is_whole: bool = False) -> None:
        metering, self.metering = self.metering, None
        if metering is not None:
            nbytes = metering.peak_bytes()
            if is_whole and nbytes is not None:
                self.peak_bytes = max(self.peak_bytes or 0, nbytes)
        if self._end is not None and is_whole:
            self._end()
            self._in_gap += 1
        self._end = None

    def _is_ours(self, optimizer: Optimizer) -> bool:
        if optimizer in self._num_steps:
            return True
        if optimizer in self._unrelated:
            return False
        groups = optimizer.param_groups
        if any(id(p) in self._ids for group in groups for p in group["params"]):
            return True
        self._unrelated.add(optimizer)
        return False


class _Arguments(tuple[Any, ...]):
    """The arguments of one optimizer step; metering ends when the step releases them.

    If a step raises, torch 2.13 calls no hook after it, and a profiler that stays active would
    block all others. ``ended`` does nothing if the step has ended normally.
    """

    ended: Callable[[], None] = staticmethod(lambda: None)

    def __del__(self) -> None:
        self.ended()


def _register_hooks(updates: "weakref.ref[_Updates]") -> list[Any]:
    def before(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if torch.compiler.is_compiling():
            return None
        if (observer := updates()) is None:
            return None
        observer.begin(optimizer, has_closure=any(map(callable, (*args[1:], *kwargs.values()))))
        if observer.metering is None:
            return None
        arguments = _Arguments(args)
        arguments.ended = observer.metering.discard
        return arguments, kwargs

    def after(optimizer: Optimizer, args: Any, kwargs: Any) -> None:  # noqa: ARG001 - torch's
        if torch.compiler.is_compiling():
            return
        if (observer := updates()) is not None:
            observer.end(optimizer)

    return [register_optimizer_step_pre_hook(before), register_optimizer_step_post_hook(after)]


def _states_bytes(optimizer: Optimizer) -> int:
    states = [v for state in list(optimizer.state.values()) for v in _state_values(state)]
    tensors = [v for v in states if isinstance(v, torch.Tensor)]
    return sum({_torch.storage_key(t): t.untyped_storage().nbytes() for t in tensors}.values())


def _state_values(state: Any) -> list[Any]:
    return list(state.values()) if isinstance(state, dict) else []


def _median(seconds: list[float]) -> float | None:
    return median(seconds) if seconds else None
