"""How long something took in all that a step does over and over: of a CPU by the clock, of a GPU by
events, which nobody waits for.

Not for timing one call, nor a step: see measure/clock.py.
"""

import contextlib
import time
from collections import deque
from collections.abc import Iterator

import torch

from steelyard.exchange.devices import CPU


class Stopwatch:
    """On a GPU what is counted is the time from when all that it was told before is done until what
    it is told within is; ``seconds`` are of what is over by now."""

    def __init__(self, device: torch.device = CPU) -> None:
        self._device = device
        self._counted = 0.0
        self._under_way: deque[tuple[torch.cuda.Event, torch.cuda.Event]] = deque()

    @property
    def on_gpu(self) -> bool:
        return self._device.type == "cuda"

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        if not self.on_gpu:
            begin = time.perf_counter()
            yield
            self._counted += time.perf_counter() - begin
            return
        self._count()
        stream = torch.cuda.current_stream(self._device)
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record(stream)
        yield
        last.record(stream)
        self._under_way.append((first, last))

    def add(self, seconds: float) -> None:
        self._counted += seconds

    @property
    def seconds(self) -> float:
        self._count()
        return self._counted

    def _count(self) -> None:
        """What is over; the rest waits to be."""
        while self._under_way and self._under_way[0][1].query():
            first, last = self._under_way.popleft()
            self._counted += first.elapsed_time(last) * 1e-3
