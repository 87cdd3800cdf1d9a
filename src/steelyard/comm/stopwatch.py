"""Accumulates the time of an operation that a step repeats. A CPU uses the clock; a GPU uses
events, for which the host does not wait.

Not for timing single calls or steps: see measure/operators/timer.py.
"""

import contextlib
import time
from collections import deque
from collections.abc import Iterator
from typing import NamedTuple

import torch

from steelyard.comm.devices import CPU


class Stopwatch:
    """A stopwatch for one device. A GPU interval begins when all work launched before it is
    complete, and ends when the work launched within it is complete. ``seconds`` counts the
    intervals that are complete by now.
    """

    def __init__(self, device: torch.device = CPU) -> None:
        self._device = device
        self._total = 0.0
        self._pending: deque[tuple[_Span, list[_Span]]] = deque()
        # The excluded parts of the current interval.
        self._excluded: list[_Span] | None = None

    @property
    def on_gpu(self) -> bool:
        return self._device.type == "cuda"

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        if not self.on_gpu:
            with self._clocked(+1):
                yield
            return
        self._collect()
        span, excluded = self._begin(), list[_Span]()
        self._excluded = excluded
        try:
            yield
        finally:
            self._excluded = None
        self._end(span)
        self._pending.append((span, excluded))

    @contextlib.contextmanager
    def stopped(self) -> Iterator[None]:
        """Exclude a part of ``running`` from the time."""
        if not self.on_gpu:
            with self._clocked(-1):
                yield
            return
        assert self._excluded is not None, "the stopwatch is running"
        span = self._begin()
        yield
        self._end(span)
        self._excluded.append(span)

    @contextlib.contextmanager
    def _clocked(self, sign: int) -> Iterator[None]:
        """Add the elapsed time even if an error ends the block, so that ``stopped`` never subtracts
        time that was not added.
        """
        begin = time.perf_counter()
        try:
            yield
        finally:
            self._total += sign * (time.perf_counter() - begin)

    def _begin(self) -> "_Span":
        span = _Span(*(torch.cuda.Event(enable_timing=True) for _ in range(2)))
        span.first.record(torch.cuda.current_stream(self._device))
        return span

    def _end(self, span: "_Span") -> None:
        span.last.record(torch.cuda.current_stream(self._device))

    @property
    def seconds(self) -> float:
        self._collect()
        return self._total

    def _collect(self) -> None:
        """Add the intervals that are complete; later ones stay pending."""
        while self._pending and self._pending[0][0].last.query():
            span, excluded = self._pending.popleft()
            self._total += span.seconds - sum(part.seconds for part in excluded)


class _Span(NamedTuple):
    first: torch.cuda.Event
    last: torch.cuda.Event

    @property
    def seconds(self) -> float:
        return float(self.first.elapsed_time(self.last)) * 1e-3
