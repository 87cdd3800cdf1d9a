"""Time one call on a device, so that what else the machine does counts as little as can be.

Not for deciding what to call, or how often: see operators.py and whole_step.py.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from steelyard.core.quad import Estimate

Seconds = float


@dataclass(frozen=True, slots=True)
class Clock:
    """``seconds(call)``; the result is dropped within the time, as a step drops its values."""

    device: torch.device

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
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        call()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) * 1e-3


def spread(samples: list[float]) -> Estimate:
    """The median, between the tenth and the ninetieth percentile as far as there are samples."""
    ordered = sorted(samples)
    last = len(ordered) - 1
    tenth = round(0.1 * last)
    middle = (
        ordered[last // 2] if last % 2 == 0 else (ordered[last // 2] + ordered[last // 2 + 1]) / 2
    )
    return Estimate(value=middle, low=ordered[tenth], high=ordered[last - tenth])
