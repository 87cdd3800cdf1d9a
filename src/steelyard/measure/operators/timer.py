"""Time one call on a device, so that what else the machine does counts as little as can be.

Not for deciding what to call, or how often: see benchmark.py and measure/step_calibration.py.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from steelyard import _torch
from steelyard.ir.metrics import Estimate

Seconds = float
# Half a millisecond of a GPU at 2 GHz: to tell it of an operator takes a tenth of that.
_BUSY_CYCLES = 10**6


@dataclass(frozen=True, slots=True)
class Clock:
    """``seconds(call)``; the result is dropped within the time, as a step drops its values. A GPU
    ``is_told_ahead`` where it has other work until it was told all of the call, as in the middle
    of a step."""

    device: torch.device
    is_told_ahead: bool = False

    def seconds(self, call: Callable[[], object]) -> Seconds:
        if self.device.type == "cuda":
            return self._on_cuda(call)
        # On one thread the time this thread computed is what the wall clock would say on a
        # machine that does nothing else; several threads also wait for each other.
        now = time.thread_time_ns if torch.get_num_threads() == 1 else time.perf_counter_ns
        begin = now()
        call()
        return (now() - begin) * 1e-9

    def _on_cuda(self, call: Callable[[], object]) -> Seconds:
        with torch.cuda.device(self.device):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            if self.is_told_ahead:
                _torch.keep_busy(_BUSY_CYCLES)
            begin.record()
            call()
            end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) * 1e-3


def lead_seconds(call: Callable[[], object], device: torch.device) -> Seconds:
    """What a GPU still has to do when the host has told it all of ``call``; of a CPU nothing."""
    if device.type != "cuda":
        return 0.0
    torch.cuda.synchronize(device)
    call()
    told = time.perf_counter()
    torch.cuda.synchronize(device)
    return time.perf_counter() - told


class Laps:
    """What steps took, one after another; a GPU is not waited for before somebody asks."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._taken: list[Seconds] = []
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    def begin(self) -> Callable[[], None]:
        """To be called at the end of what counts."""
        if self._device.type != "cuda":
            start = time.perf_counter()
            return lambda: self._taken.append(time.perf_counter() - start)
        with torch.cuda.device(self._device):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()

        def over() -> None:
            with torch.cuda.device(self._device):
                end.record()
            self._events.append((begin, end))

        return over

    def clear(self) -> None:
        self._taken.clear()
        self._events.clear()

    @property
    def seconds(self) -> list[Seconds]:
        if self._events:
            torch.cuda.synchronize(self._device)
            self._taken += [begin.elapsed_time(end) * 1e-3 for begin, end in self._events]
            self._events.clear()
        return self._taken


def spread(samples: list[float]) -> Estimate:
    """The median, between the tenth and the ninetieth percentile as far as there are samples."""
    ordered = sorted(samples)
    last = len(ordered) - 1
    tenth = round(0.1 * last)
    middle = (
        ordered[last // 2] if last % 2 == 0 else (ordered[last // 2] + ordered[last // 2 + 1]) / 2
    )
    return Estimate(value=middle, low=ordered[tenth], high=ordered[last - tenth])
