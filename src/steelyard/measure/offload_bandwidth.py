"""Measures the real speed of offload memory, and compares it with the declared rate.

Not for moving values: see offload/tier.py.
"""

import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch

from steelyard.hardware.cluster import OFFLOAD_IN, OFFLOAD_OUT, Link, OffloadMemory
from steelyard.measure.cache import CostCache
from steelyard.offload.activations import Slots
from steelyard.offload.tier import OffloadFile
from steelyard.units import format_bytes

_SECONDS = 0.25
# Transfers are not larger than this: a plan may be loaded where memory is only as large as its step
# needs.
_FEWEST_BYTES, _MOST_BYTES = 1 << 20, 4 << 20
_SMALL_BYTES, _CALLS = 4096, 20
_ROUNDS, _INTERVAL_SECONDS = 24, 0.04
# Disks are shared, so a measured rate counts as reached again within this share.
_DOUBT = 0.1
_REACHED = 0.9
# The cache stores only values above zero.
_ALMOST_ZERO = 1e-12


def measured_links(
    offload_memory: OffloadMemory, *, cache: CostCache | None = None
) -> tuple[dict[str, Link], tuple[str, ...]]:
    """Return the links to and from offload memory, with notes on declared rates that are not
    reached.

    Each folder and rate is measured only once, so that two plans of a step, and its run, use the
    same figures.
    """
    memory = OffloadFile(offload_memory)  # raises an error on each call if the memory is unusable
    try:
        folder = Path(offload_memory.folder).resolve()
        context = f"offload memory in {folder} at {offload_memory.bytes_per_second} B/s"
        found = cache.read_rates(context) if cache else {}
        if not found.keys() >= _FIGURES:
            found = _measured(memory)
            if cache:
                # Another process may already have stored its figures.
                found = {**found, **cache.read_rates(context)}
                cache.write_rates(context, found)
    finally:
        memory.close()
    links, notes = {}, []
    for axis in (OFFLOAD_OUT, OFFLOAD_IN):
        rate, reached = offload_memory.bytes_per_second, found[f"{axis} reached"]
        if reached < _REACHED * rate:
            verb = "written" if axis == OFFLOAD_OUT else "read"
            notes.append(
                f"offload memory in {offload_memory.folder} is {verb} at "
                f"{format_bytes(reached)}/s, not at the declared {format_bytes(rate)}/s; "
                "predictions use the measured rate"
            )
            rate = reached
        links[axis] = Link(
            kind="offload memory",
            latency_seconds=found[f"{axis} latency"],
            bytes_per_second=rate,
            doubt=_DOUBT,
            call_seconds=found[f"{axis} call"],
            disturbs=found[f"{axis} disturbs"],
        )
    return links, tuple(notes)


_FIGURES = {
    f"{axis} {what}"
    for axis in (OFFLOAD_OUT, OFFLOAD_IN)
    for what in ("reached", "latency", "call", "disturbs")
}


def _measured(memory: OffloadFile) -> dict[str, float]:
    """Return the rate, latency, call seconds and operator slowdown of each direction."""
    offload_memory = memory.offload_memory
    nbytes = int(min(max(offload_memory.bytes_per_second * _SECONDS, _FEWEST_BYTES), _MOST_BYTES))
    nbytes = min(nbytes, offload_memory.size_bytes) // _SMALL_BYTES * _SMALL_BYTES or _SMALL_BYTES
    # Two concurrent transfers may use the same slot: their data is never read.
    slots = Slots(memory, memory.reserve_permanent([nbytes]) * 2)
    large = torch.zeros(nbytes, dtype=torch.uint8, device="cpu")
    small = large[:_SMALL_BYTES]
    _round_trip(slots, large)  # the first transfer touches the buffers and the file
    small_trips = [_round_trip(slots, small) for _ in range(_CALLS)]
    times = max(1, round(offload_memory.bytes_per_second * _SECONDS / nbytes))
    large_trips = [_round_trip(slots, large) for _ in range(times)]
    found: dict[str, float] = {}
    for axis, direction in ((OFFLOAD_OUT, 0), (OFFLOAD_IN, 1)):
        latency = max(
            0.0,
            median(t[direction] for t in small_trips)
            - _SMALL_BYTES / offload_memory.bytes_per_second,
        )
        found |= {
            f"{axis} latency": max(latency, _ALMOST_ZERO),
            f"{axis} reached": times
            * nbytes
            / max(1e-9, sum(t[direction] - latency for t in large_trips)),
            f"{axis} call": max(median(t[2] for t in small_trips) / 2, _ALMOST_ZERO),
            f"{axis} disturbs": max(
                _slowdown_share(slots, large, is_sent=axis == OFFLOAD_OUT), _ALMOST_ZERO
            ),
        }
    return found


def _round_trip(slots: Slots, x: torch.Tensor) -> tuple[float, float, float]:
    """Return the seconds of writing and of reading back, and the CPU seconds of this thread."""
    cpu_begin = time.thread_time()
    begin = time.perf_counter()
    slots.sent(0, slots.send(0, x), x)
    written = time.perf_counter()
    slots.fetched(0, slots.fetch(0, None))
    read_back = time.perf_counter()
    return written - begin, read_back - written, time.thread_time() - cpu_begin


def _slowdown_share(slots: Slots, x: torch.Tensor, *, is_sent: bool) -> float:
    """Return the share by which a transfer slows down concurrent operators.

    Operators share cores and memory bandwidth with the thread that moves the data. Each short
    interval with a transfer is compared with the intervals before and after it, because the speed
    of a machine may change within a tenth of a second.
    """
    shares = []
    before = _rounds_per_second()
    for _ in range(_ROUNDS):
        link = _BusyLink(slots, x, is_sent=is_sent)
        during = _rounds_per_second(link.refill)
        link.stop()
        after = _rounds_per_second()
        shares.append(1 - 2 * during / (before + after))
        before = after
    return median(shares)


class _BusyLink:
    """A link that always has one transfer in flight and one queued."""

    def __init__(self, slots: Slots, x: torch.Tensor, *, is_sent: bool) -> None:
        self._slots, self._x, self._is_sent = slots, x, is_sent
        self._in_flight = [self._start(slot) for slot in (0, 1)]

    def _start(self, slot: int) -> Any:
        return self._slots.send(slot, self._x) if self._is_sent else self._slots.fetch(slot, None)

    def _is_complete(self, slot: int) -> bool:
        if self._is_sent:
            return bool(self._in_flight[slot].done())
        return self._slots.has_arrived(slot)

    def _end(self, slot: int) -> None:
        if self._is_sent:
            self._slots.sent(slot, self._in_flight[slot], self._x)
        else:
            self._slots.fetched(slot, self._in_flight[slot])

    def refill(self) -> None:
        """Replace each completed transfer with a new one."""
        for slot in (0, 1):
            if self._is_complete(slot):
                self._end(slot)
                self._in_flight[slot] = self._start(slot)

    def stop(self) -> None:
        for slot in (0, 1):
            self._end(slot)


def _rounds_per_second(each_round: Callable[[], None] = lambda: None) -> float:
    """Return how many times per second a matrix product and a pass over memory complete."""
    matrix = torch.ones(256, 256, dtype=torch.float32, device="cpu")
    vector = torch.ones(1 << 20, dtype=torch.float32, device="cpu")
    begin, count = time.perf_counter(), 0
    while count == 0 or time.perf_counter() < begin + _INTERVAL_SECONDS:
        torch.mm(matrix, matrix)
        torch.mul(vector, 2.0)
        each_round()
        count += 1
    return count / (time.perf_counter() - begin)
