"""How fast offload memory really is: whether it reaches the rate it is declared to keep to.

Not for moving anything: see offload/tier.py.
"""

import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch

from steelyard.hardware.cluster import FAR_IN, FAR_OUT, Link, OffloadMemory
from steelyard.measure.cache import CostCache
from steelyard.offload.activations import Slots
from steelyard.offload.tier import OffloadFile
from steelyard.units import format_bytes

_SECONDS = 0.25
# No larger at once: a plan is also loaded where there is no more memory than its step needs.
_FEWEST_BYTES, _MOST_BYTES = 1 << 20, 4 << 20
_SMALL_BYTES, _CALLS = 4096, 20
_ROUNDS, _WHILE_SECONDS = 24, 0.04
# Disks are shared: what was reached once is reached again within this share.
_DOUBT = 0.1
_REACHED = 0.9
# What is remembered is above zero.
_NEXT_TO_NONE = 1e-12


def measured_links(
    offload_memory: OffloadMemory, *, cache: CostCache | None = None
) -> tuple[dict[str, Link], tuple[str, ...]]:
    """The links there and back; a note where the declared rate is not reached.

    Measured once for a folder and a rate: two plans of a step, and its run, say the same of it.
    """
    memory = OffloadFile(offload_memory)  # which refuses what cannot be used, each time
    try:
        folder = Path(offload_memory.folder).resolve()
        context = f"offload memory in {folder} at {offload_memory.bytes_per_second} B/s"
        found = cache.read_rates(context) if cache else {}
        if not found.keys() >= _FIGURES:
            found = _measured(memory)
            if cache:
                # Another process may have been first.
                found = {**found, **cache.read_rates(context)}
                cache.write_rates(context, found)
    finally:
        memory.close()
    links, notes = {}, []
    for axis in (FAR_OUT, FAR_IN):
        rate, reached = offload_memory.bytes_per_second, found[f"{axis} reached"]
        if reached < _REACHED * rate:
            way = "written" if axis == FAR_OUT else "read"
            notes.append(
                f"offload memory in {offload_memory.folder} is {way} at "
                f"{format_bytes(reached)}/s, not at "
                f"the {format_bytes(rate)}/s declared: predicted with what was measured"
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
    for axis in (FAR_OUT, FAR_IN)
    for what in ("reached", "latency", "call", "disturbs")
}


def _measured(memory: OffloadFile) -> dict[str, float]:
    """Bytes a second, seconds of a small one, seconds that a call takes, the share it slows."""
    offload_memory = memory.offload_memory
    nbytes = int(min(max(offload_memory.bytes_per_second * _SECONDS, _FEWEST_BYTES), _MOST_BYTES))
    nbytes = min(nbytes, offload_memory.size_bytes) // _SMALL_BYTES * _SMALL_BYTES or _SMALL_BYTES
    # Two under way may lie in the same place: what they say is nobody's.
    slots = Slots(memory, memory.kept([nbytes]) * 2)
    large = torch.zeros(nbytes, dtype=torch.uint8, device="cpu")
    small = large[:_SMALL_BYTES]
    _trip(slots, large)  # the first touches the buffers and the file
    trips = [_trip(slots, small) for _ in range(_CALLS)]
    times = max(1, round(offload_memory.bytes_per_second * _SECONDS / nbytes))
    whole = [_trip(slots, large) for _ in range(times)]
    found: dict[str, float] = {}
    for axis, way in ((FAR_OUT, 0), (FAR_IN, 1)):
        latency = max(
            0.0, median(t[way] for t in trips) - _SMALL_BYTES / offload_memory.bytes_per_second
        )
        found |= {
            f"{axis} latency": max(latency, _NEXT_TO_NONE),
            f"{axis} reached": times * nbytes / max(1e-9, sum(t[way] - latency for t in whole)),
            f"{axis} call": max(median(t[2] for t in trips) / 2, _NEXT_TO_NONE),
            f"{axis} disturbs": max(_slowed(slots, large, is_sent=axis == FAR_OUT), _NEXT_TO_NONE),
        }
    return found


def _trip(slots: Slots, x: torch.Tensor) -> tuple[float, float, float]:
    """Seconds there, seconds back, and those that this thread itself spent."""
    own = time.thread_time()
    begin = time.perf_counter()
    slots.sent(0, slots.send(0, x), x)
    there = time.perf_counter()
    slots.fetched(0, slots.fetch(0, None))
    back = time.perf_counter()
    return there - begin, back - there, time.thread_time() - own


def _slowed(slots: Slots, x: torch.Tensor, *, is_sent: bool) -> float:
    """By what share operators slow down beside a transfer: cores and the way to memory are shared
    with the thread that moves it. Each short while beside one is compared with those before and
    after it, since a machine is not as fast from one tenth of a second to the next."""
    shares = []
    before = _pace()
    for _ in range(_ROUNDS):
        busy = _Busy(slots, x, is_sent=is_sent)
        beside = _pace(busy.go_on)
        busy.stop()
        after = _pace()
        shares.append(1 - 2 * beside / (before + after))
        before = after
    return median(shares)


class _Busy:
    """A link with always one transfer under way and one waiting."""

    def __init__(self, slots: Slots, x: torch.Tensor, *, is_sent: bool) -> None:
        self._slots, self._x, self._is_sent = slots, x, is_sent
        self._under_way = [self._begun(slot) for slot in (0, 1)]

    def _begun(self, slot: int) -> Any:
        return self._slots.send(slot, self._x) if self._is_sent else self._slots.fetch(slot, None)

    def _is_over(self, slot: int) -> bool:
        if self._is_sent:
            return bool(self._under_way[slot].done())
        return self._slots.has_arrived(slot)

    def _end(self, slot: int) -> None:
        if self._is_sent:
            self._slots.sent(slot, self._under_way[slot], self._x)
        else:
            self._slots.fetched(slot, self._under_way[slot])

    def go_on(self) -> None:
        """What has arrived is followed by another."""
        for slot in (0, 1):
            if self._is_over(slot):
                self._end(slot)
                self._under_way[slot] = self._begun(slot)

    def stop(self) -> None:
        for slot in (0, 1):
            self._end(slot)


def _pace(also: Callable[[], None] = lambda: None) -> float:
    """How often a second a product and a pass over memory are done."""
    matrix = torch.ones(256, 256, dtype=torch.float32, device="cpu")
    vector = torch.ones(1 << 20, dtype=torch.float32, device="cpu")
    begin, count = time.perf_counter(), 0
    while count == 0 or time.perf_counter() < begin + _WHILE_SECONDS:
        torch.mm(matrix, matrix)
        torch.mul(vector, 2.0)
        also()
        count += 1
    return count / (time.perf_counter() - begin)
