"""How many bytes the allocator held at the peak of one call, and how many the call left behind.

On the CPU from the profiler's memory events, on CUDA from the allocator's own statistics. Not for
the process as the operating system sees it: see process.py.
"""

import gc
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from steelyard import _torch

# The first severity at which libkineto (torch 2.13) prints nothing for each start and stop; it
# reads the variable when the first profiler of the process starts.
_QUIET = ("KINETO_LOG_LEVEL", "6")


@dataclass(frozen=True, slots=True, kw_only=True)
class Metered:
    """Bytes above what was held when the call began.

    ``freed_bytes`` were held before and freed inside. More than zero means the level was not
    clean (old gradients, an old loss): the peak then says what the call allocated, which is more
    than what it added.
    """

    peak_bytes: int
    left_bytes: int
    freed_bytes: int = 0

    @property
    def is_clean(self) -> bool:
        return self.freed_bytes == 0


def meter(
    call: Callable[[], object], *, device: torch.device | None = None, warmups: int = 1
) -> Metered:
    """Meter ``call`` after ``warmups`` of it; begin from the level one would begin a step from.

    What only a first call allocates (kernels' caches, packed weights, gradients that live on) is
    not metered, and what a warm-up left and ``call`` then frees is reported as freed.
    """
    for _ in range(warmups):
        # Under the meter too: only of a block it saw allocated can it report that it was freed.
        meter_once(call, device=device)
    gc.collect()
    return meter_once(call, device=device)


def meter_once(call: Callable[[], object], *, device: torch.device | None = None) -> Metered:
    """Meter one call as it comes, without a warm-up. Not while ``is_profiled()``."""
    end = begin_metering(device=device)
    try:
        result = call()
    except BaseException:
        end()
        raise
    metered = end()
    del result  # held until here, so that what it returns counts as left behind
    return metered


def begin_metering(*, device: torch.device | None = None) -> Callable[[], Metered]:
    """Begin here and now; what is returned ends it, and must be called. Not while
    ``is_profiled()``."""
    if device is not None and device.type == "cuda":
        return _begin_on_cuda(device)
    profiler = _quiet_profiler()
    profiler.__enter__()

    def end() -> Metered:
        profiler.__exit__(None, None, None)
        return replay(_memory_events(profiler))

    return end


def is_profiled(device: torch.device | None = None, *, is_quick: bool = False) -> bool:
    """A profiler of somebody else's is on, which metering on ``device`` would take events from."""
    return (device is None or device.type == "cpu") and _torch.profiler_is_on(is_quick=is_quick)


def replay(events: Iterable[tuple[int, int]]) -> Metered:
    """(address, signed bytes) in order of time -> the level they describe. What a thread of gloo's
    frees is in no event; what lies at an address then tells that nothing else does any more."""
    born: dict[int, int] = {}
    level = peak = freed = 0
    for address, nbytes in events:
        if nbytes > 0:
            level += nbytes - born.get(address, 0)
            born[address] = nbytes
            peak = max(peak, level)
        elif address in born:
            level -= born.pop(address)
        else:
            freed -= nbytes
    return Metered(peak_bytes=peak, left_bytes=level, freed_bytes=freed)


def _memory_events(profiler: Any) -> list[tuple[int, int]]:
    found: list[tuple[int, int, int]] = []
    for event in _every(profiler.profiler.kineto_results.experimental_event_tree()):
        if event.tag.name == "Allocation":
            fields = event.extra_fields
            found.append((event.start_time_ns, fields.ptr, fields.alloc_size))
    found.sort(key=lambda e: e[0])
    return [(address, nbytes) for _, address, nbytes in found]


def _every(events: Iterable[Any]) -> Iterator[Any]:
    stack = list(reversed(list(events)))
    while stack:
        event = stack.pop()
        yield event
        stack += reversed(event.children)


def _quiet_profiler() -> Any:
    name, level = _QUIET
    if name not in os.environ:
        os.environ[name] = level
    return profile(activities=[ProfilerActivity.CPU], profile_memory=True)


def _begin_on_cuda(device: torch.device) -> Callable[[], Metered]:
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_stats(device)

    def end() -> Metered:
        torch.cuda.synchronize(device)
        level = torch.cuda.memory_allocated(device) - before["allocated_bytes.all.current"]
        peak = torch.cuda.max_memory_allocated(device) - before["allocated_bytes.all.current"]
        # The statistics say how far the level fell, not which block fell: a lower bound.
        return Metered(peak_bytes=peak, left_bytes=max(level, 0), freed_bytes=max(-level, 0))

    return end
