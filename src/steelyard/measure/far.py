"""How fast far memory really is: whether it reaches the rate it is declared to keep to.

Not for moving anything: see exchange/far.py.
"""

import time
from statistics import median

import torch

from steelyard.core.amounts import format_bytes
from steelyard.core.cluster import FAR_IN, FAR_OUT, Far, Link
from steelyard.exchange.far import FarMemory, Slots

_SECONDS = 0.25
_FEWEST_BYTES, _MOST_BYTES = 1 << 20, 64 << 20
_SMALL_BYTES, _CALLS = 4096, 20
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
