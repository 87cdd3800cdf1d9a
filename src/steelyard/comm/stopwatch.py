"""How long something took in all that a step does over and over: of a CPU by the clock, of a GPU by
events, which nobody waits for.

Not for timing one call, nor a step: see measure/operators/timer.py.
"""

import contextlib
import time
from collections import deque
from collections.abc import Iterator
from typing import NamedTuple

import torch

from steelyard.comm.devices import CPU


class Stopwatch:
    """On a GPU what is counted is the time from when all that it was told before is done until what
    it is told within is; ``seconds`` are of what is over by now."""

    def __init__(self, device: torch.device = CPU) -> None:
        self._device = device
        self._counted = 0.0
        self._under_way: deque[tuple[_Span, list[_Span]]] = deque()
        # Of what runs now, what is not to be counted.
        self._apart: list[_Span] | None = None

    @property
    def on_gpu(self) -> bool:
        return self._device.type == "cuda"

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        if not self.on_gpu:
            with self._clocked(+1):
                yield
            return
        self._count()
        span, apart = self._begun(), list[_Span]()
        self._apart = apart
        try:
            yield
        finally:
            self._apart = None
        self._end(span)
        self._under_way.append((span, apart))

    @contextlib.contextmanager
    def stopped(self) -> Iterator[None]:
        """Within ``running`` what is not counted."""
        if not self.on_gpu:
            with self._clocked(-1):
                yield
            return
        assert self._apart is not None, "it does not run"
        span = self._begun()
        yield
        self._end(span)
        self._apart.append(span)

    @contextlib.contextmanager
    def _clocked(self, sign: int) -> Iterator[None]:
        """Whatever ends it, so that what is taken away was counted."""
        begin = time.perf_counter()
        try:
            yield
        finally:
            self._counted += sign * (time.perf_counter() - begin)

    def _begun(self) -> "_Span":
        span = _Span(*(torch.cuda.Event(enable_timing=True) for _ in range(2)))
        span.first.record(torch.cuda.current_stream(self._device))
        return span

    def _end(self, span: "_Span") -> None:
        span.last.record(torch.cuda.current_stream(self._device))

    @property
    def seconds(self) -> float:
        self._count()
        return self._counted

    def _count(self) -> None:
        """What is over; the rest waits to be."""
        while self._under_way and self._under_way[0][0].last.query():
            span, apart = self._under_way.popleft()
            self._counted += span.seconds - sum(each.seconds for each in apart)


class _Span(NamedTuple):
    first: torch.cuda.Event
    last: torch.cuda.Event

    @property
    def seconds(self) -> float:
        return float(self.first.elapsed_time(self.last)) * 1e-3
