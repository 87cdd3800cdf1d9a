"""How fast far memory really is: whether it reaches the rate it is declared to keep to.

Not for moving anything: see exchange/far.py.
"""

import time
from collections.abc import Callable
from statistics import median

import torch

from steelyard.core.amounts import format_bytes
from steelyard.core.cluster import FAR_IN, FAR_OUT, Far, Link
from steelyard.exchange.far import FarMemory, Slots

_SECONDS = 0.25
_FEWEST_BYTES, _MOST_BYTES = 1 << 20, 64 << 20
_SMALL_BYTES, _CALLS = 4096, 20
_ROUNDS = 5
# Disks are shared: what was reached once is reached again within this share.
_DOUBT = 0.1
_REACHED = 0.9


def measured_links(far: Far) -> tuple[dict[str, Link], tuple[str, ...]]:
    """The links there and back; a note where the declared rate is not reached."""
    memory = FarMemory(far)
    try:
        nbytes = int(min(max(far.bytes_per_second * _SECONDS, _FEWEST_BYTES), _MOST_BYTES))
        nbytes = min(nbytes, far.size_bytes) // _SMALL_BYTES * _SMALL_BYTES or _SMALL_BYTES
        slots = memory.slots([nbytes])
        large = torch.zeros(nbytes, dtype=torch.uint8)
        small = large[:_SMALL_BYTES]
        _trip(slots, large)  # the first touches the buffers and the file
        trips = [_trip(slots, small) for _ in range(_CALLS)]
        whole = _trip(slots, large)
        disturbs = [
            max(0.0, median(_slowed(slots, large, is_sent=is_sent) for _ in range(_ROUNDS)))
            for is_sent in (True, False)
        ]
    finally:
        memory.close()
    links, notes = {}, []
    for axis, way in ((FAR_OUT, 0), (FAR_IN, 1)):
        latency = max(0.0, median(t[way] for t in trips) - _SMALL_BYTES / far.bytes_per_second)
        reached = nbytes / max(1e-9, whole[way] - latency)
        rate = far.bytes_per_second
        if reached < _REACHED * rate:
            way_name = "written" if axis == FAR_OUT else "read"
            notes.append(
                f"far memory in {far.folder} is {way_name} at {format_bytes(reached)}/s, not at "
                f"the {format_bytes(rate)}/s declared: predicted with what was measured"
            )
            rate = reached
        links[axis] = Link(
            kind="far memory",
            latency_seconds=latency,
            bytes_per_second=rate,
            doubt=_DOUBT,
            call_seconds=median(t[2] for t in trips) / 2,
            disturbs=disturbs[way],
        )
    return links, tuple(notes)


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
    with the thread that moves it."""
    end = time.perf_counter() + _SECONDS / 2
    alone = _pace(lambda: time.perf_counter() >= end)
    if is_sent:
        sending = slots.send(0, x)
        beside = _pace(sending.done)
        slots.sent(0, sending, x)
    else:
        back = slots.fetch(0, None)
        beside = _pace(lambda: slots.has_arrived(0))
        slots.fetched(0, back)
    return 1 - beside / alone


def _pace(is_over: Callable[[], bool]) -> float:
    """How often a second a product and a pass over memory are done, until it is over."""
    matrix, vector = torch.ones(256, 256), torch.ones(1 << 20)
    begin, count = time.perf_counter(), 0
    while count == 0 or not is_over():
        torch.mm(matrix, matrix)
        torch.mul(vector, 2.0)
        count += 1
    return count / (time.perf_counter() - begin)
