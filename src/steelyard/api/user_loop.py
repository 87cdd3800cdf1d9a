"""A loop of the user's own around ``step.backward``: what its passes took and held.

A pass is one call of ``step.backward``. A step begins with a pass before which weights or gradients
were changed, so that passes whose gradients add up are one step. The optimizer is the user's: its
steps are observed through torch's hooks, whichever optimizer holds the model's parameters.
Not for whole steps, ``step(batch)``: see step.py.
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
    """``resident`` says how many bytes stay for a whole step, by the plan's reckoning."""

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
        self._between = Laps(device)
        # Of each time between two passes, whether it lay between two steps.
        self._is_between_steps: list[bool] = []
        self._end_between: Callable[[], None] | None = None
        self._marks: list[object] = []
        # Of a pass without and with gradients of earlier ones: its peak, and what the optimizer
        # kept then.
        self._peaks: dict[bool, tuple[int, int]] = {}

    @contextlib.contextmanager
    def a_pass(self) -> Iterator[bool]:
        """Around each, which counts if it ends well; whether a step begins with it."""
        is_new_step = self._marks != self._marked()
        updated = self.updates.end_gap()
        if self._end_between is not None and updated is not None:
            self._end_between()
            self._is_between_steps.append(is_new_step)
        self._end_between = None
        self.updates.is_in_pass = True
        try:
            yield is_new_step
        finally:
            self.updates.is_in_pass = False
        self.passes += 1
        self.steps += is_new_step
        self._marks = self._marked()
        self._end_between = self._between.begin()

    def timed(self) -> Callable[[], None]:
        """Begins the time of a pass; what is returned ends it."""
        return self._passes.begin()

    def lacks_peak(self, *, kept: bool) -> bool:
        return self.passes > 0 and kept not in self._peaks

    def note_peak(self, nbytes: int, *, kept: bool) -> None:
        self._peaks[kept] = (nbytes, self._states_bytes())

    def passes_bytes(self) -> int | None:
        """At the peak of forward and backward pass, when the plan's optimizer has its state."""
        states = self._states_bytes()
        return max((n + max(0, states - then) for n, then in self._peaks.values()), default=None)

    def peak_bytes(self, *, has_update: bool) -> int | None:
        """What compares with the plan, which ``has_update`` or not; None where that is not known:
        no pass was metered, or no optimizer's step that the plan has."""
        passes = self.passes_bytes()
        if not has_update or passes is None:
            return passes
        return None if self.updates.peak_bytes is None else self._with_updates(passes)

    @property
    def pass_seconds(self) -> float | None:
        # The first pass pays for what is made once.
        return _median(self._passes.seconds[1:])

    def step_seconds(self, *, has_update: bool) -> float | None:
        """A pass, and the optimizer's step where the plan has one; None where that one was not
        observed."""
        seconds = self.pass_seconds
        if not has_update or seconds is None:
            return seconds
        update = self.updates.seconds
        return None if update is None else seconds + update

    @property
    def between_seconds(self) -> float | None:
        """The time between the last pass of a step and the first pass of the next one."""
        pairs = zip(self._between.seconds, self._is_between_steps)
        return _median([seconds for seconds, between in pairs if between][1:])

    def notes(self, *, has_update: bool) -> tuple[str, ...]:
        """Notes for the receipt; ``has_update`` says that the plan counts an optimizer's step."""
        return (*self._notes_on_time(), *self._notes_on_memory(has_update))

    def _notes_on_time(self) -> list[str]:
        seconds, between = self.pass_seconds, self.between_seconds
        if seconds is None:
            return []
        said = f"{format_seconds(seconds)} a call of step.backward (forward and backward pass)"
        if between is None:
            return [said]
        own = self.updates.seconds
        within = f", {format_seconds(own)} of it in steps of {self.updates.names}" if own else ""
        return [f"{said}, and {format_seconds(between)} from one step to the next{within}"]

    def _notes_on_memory(self, has_update: bool) -> list[str]:
        passes, names = self.passes_bytes(), self.updates.names
        if passes is None:
            return []
        if has_update and self.updates.peak_bytes is None:
            why = (
                f"no step of {names} was metered yet"
                if names
                else "no optimizer's step was observed (it may be compiled, or not torch.optim's)"
            )
            held = f"forward and backward pass held {format_bytes(passes)}"
            return [f"{held}; the plan's memory has an update too, and {why}"]
        if has_update:
            return self._note_on_other_optimizer()
        kept = self.updates.foreign_bytes
        if not kept and self.updates.peak_bytes is None:
            return []
        of = "passes" if self.updates.peak_bytes is None else "passes and updates"
        whole = f"with it, {format_bytes(self._with_updates(passes))} at the peak of {of}"
        not_in = "which a plan without optimizer= does not count"
        return [f"{format_bytes(kept)} kept by your {names}, {not_in}: {whole}"]

    def _note_on_other_optimizer(self) -> list[str]:
        other, planned = self.updates.foreign, type(self._live.optimizer).__name__
        if not other:
            return []
        which = (
            f"another {other} than the plan's" if other == planned else f"{other}, not {planned}"
        )
        kept = format_bytes(self.updates.foreign_bytes)
        return [f"the optimizer that stepped is {which}; what it keeps, {kept}, is in the memory"]

    def _with_updates(self, passes_bytes: int) -> int:
        return max(passes_bytes + self.updates.foreign_bytes, self.updates.peak_bytes or 0)

    def _states_bytes(self) -> int:
        return 0 if self._live.optimizer is None else _states_bytes(self._live.optimizer)

    def _marked(self) -> list[object]:
        """A mark that changes when an optimizer steps, or gradients are zeroed, scaled, dropped."""
        gradients = [p.grad for p in self._parameters if p.grad is not None]
        if not gradients:
            return [object()]  # equal to nothing: what follows adds to nothing
        return [
            list(map(id, gradients)), _torch.versions(gradients), _torch.versions(self._parameters)
        ]  # fmt: skip


class _Metering:
    """One optimizer step that is being metered, on top of what was held before; ends once."""

    def __init__(self, held_bytes: int, end: Callable[[], Metered]) -> None:
        self._held_bytes = held_bytes
        self._end: Callable[[], Metered] | None = end

    def peak_bytes(self) -> int | None:
        """The peak of the step; None if it was discarded before."""
        end, self._end = self._end, None
        return None if end is None else self._held_bytes + end().peak_bytes

    def discard(self) -> None:
        self.peak_bytes()


class _Updates:
    """Steps of the optimizers that hold the model's parameters."""

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
        # Steps of optimizers in each time between two passes, of those that were timed.
        self._in_gap, self._num_in_gaps = 0, list[int]()
        self._was_metered = False
        self._seen: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()
        self._others: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._metered: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._end: Callable[[], None] | None = None
        self.metering: _Metering | None = None
        self.names = ""
        hooks = _hooks_of(weakref.ref(self))
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
        """The state of the optimizers that are not the plan's."""
        return sum(_states_bytes(one) for one in list(self._seen) if one is not self._planned)

    @property
    def foreign(self) -> str:
        """The kind of one that is not the plan's, if any stepped."""
        others = (type(one).__name__ for one in list(self._seen) if one is not self._planned)
        return next(others, "")

    def end_gap(self) -> bool | None:
        """Whether an optimizer stepped since the last pass; None where one was metered, which is
        slow."""
        self._stop()  # one whose step raised, or is still under way: it calls the pass
        number, metered = self._in_gap, self._was_metered
        self._in_gap, self._was_metered = 0, False
        self._num_in_gaps.append(number)
        return None if metered else number > 0

    def begin(self, optimizer: Optimizer, *, has_closure: bool) -> None:
        if not self._is_ours(optimizer):
            return
        self._stop()
        count = self._seen.get(optimizer, 0)
        self._seen[optimizer] = count + 1
        if not count:
            kinds = dict.fromkeys(type(one).__name__ for one in list(self._seen))
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
        if optimizer in self._seen:
            return True
        if optimizer in self._others:
            return False
        groups = optimizer.param_groups
        if any(id(p) in self._ids for group in groups for p in group["params"]):
            return True
        self._others.add(optimizer)
        return False


class _Arguments(tuple[Any, ...]):
    """The arguments of one optimizer step, which end its metering when the step lets go of them.

    A step that raises calls no hook (torch 2.13), and a profiler left on would stand in the way of
    all others. ``ended`` does nothing where the step has ended well.
    """

    ended: Callable[[], None] = staticmethod(lambda: None)

    def __del__(self) -> None:
        self.ended()


def _hooks_of(updates: "weakref.ref[_Updates]") -> list[Any]:
    def before(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if torch.compiler.is_compiling():
            return None
        if (held := updates()) is None:
            return None
        held.begin(optimizer, has_closure=any(map(callable, (*args[1:], *kwargs.values()))))
        if held.metering is None:
            return None
        arguments = _Arguments(args)
        arguments.ended = held.metering.discard
        return arguments, kwargs

    def behind(optimizer: Optimizer, args: Any, kwargs: Any) -> None:  # noqa: ARG001 - torch's
        if torch.compiler.is_compiling():
            return
        if (held := updates()) is not None:
            held.end(optimizer)

    return [register_optimizer_step_pre_hook(before), register_optimizer_step_post_hook(behind)]


def _states_bytes(optimizer: Optimizer) -> int:
    states = [v for state in list(optimizer.state.values()) for v in _values(state)]
    tensors = [v for v in states if isinstance(v, torch.Tensor)]
    return sum({_torch.storage_key(t): t.untyped_storage().nbytes() for t in tensors}.values())


def _values(state: Any) -> list[Any]:
    return list(state.values()) if isinstance(state, dict) else []


def _median(seconds: list[float]) -> float | None:
    return median(seconds) if seconds else None
