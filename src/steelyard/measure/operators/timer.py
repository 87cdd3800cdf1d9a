"""Times single calls on a device, with little influence of other load on the machine.

Not for choosing the calls or their number: see benchmark.py and measure/step_calibration.py.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from steelyard import _torch
from steelyard.ir.metrics import Estimate

Seconds = float
# Half a millisecond of a GPU at 2 GHz; enqueueing an operator takes a tenth of this.
_BUSY_CYCLES = 10**6


@dataclass(frozen=True, slots=True)
class Clock:
    """A timer for one device: ``seconds(call)``.

    The result is dropped within the timed span, as a step drops its values. With
    ``is_enqueued_ahead`` a GPU is kept busy until the host has enqueued the whole call, as in the
    middle of a step.
    """

    device: torch.device
    is_enqueued_ahead: bool = False

    def seconds(self, call: Callable[[], object]) -> Seconds:
        if self.device.type == "cuda":
            return self._on_cuda(call)
        # With one thread, its CPU time equals the wall time of an idle machine. Several threads
        # also wait for each other.
        now = time.thread_time_ns if torch.get_num_threads() == 1 else time.perf_counter_ns
        begin = now()
        call()
        return (now() - begin) * 1e-9

    def _on_cuda(self, call: Callable[[], object]) -> Seconds:
        with torch.cuda.device(self.device):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            if self.is_enqueued_ahead:
                _torch.keep_busy(_BUSY_CYCLES)
            begin.record()
            call()
            end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) * 1e-3


def backlog_seconds(call: Callable[[], object], device: torch.device) -> Seconds:
    """Return the GPU seconds left once the host has enqueued ``call``; zero on a CPU."""
    if device.type != "cuda":
        return 0.0
    torch.cuda.synchronize(device)
    call()
    enqueued = time.perf_counter()
    torch.cuda.synchronize(device)
    return time.perf_counter() - enqueued


class Laps:
    """Durations of consecutive steps; a GPU is only synchronized when ``seconds`` is read."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._taken: list[Seconds] = []
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    def begin(self) -> Callable[[], None]:
        """Start a lap and return the function that ends it."""
        if self._device.type != "cuda":
            start = time.perf_counter()
            return lambda: self._taken.append(time.perf_counter() - start)
        with torch.cuda.device(self._device):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()

        def end_lap() -> None:
            with torch.cuda.device(self._device):
                end.record()
            self._events.append((begin, end))

        return end_lap

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
    """Return the median, with the tenth and ninetieth percentiles of the samples as its
    interval.
    """
    ordered = sorted(samples)
    last = len(ordered) - 1
    tenth = round(0.1 * last)
    middle = (
        ordered[last // 2] if last % 2 == 0 else (ordered[last // 2] + ordered[last // 2 + 1]) / 2
    )
    return Estimate(value=middle, low=ordered[tenth], high=ordered[last - tenth])
