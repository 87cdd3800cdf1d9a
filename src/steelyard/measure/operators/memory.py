"""Peak allocator bytes of one call, and the bytes that the call leaves allocated.

On the CPU, the profiler's memory events give these bytes; on CUDA, the allocator's statistics do.
Not for the process as the operating system sees it: see measure/process.py.
"""

import gc
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from steelyard import _torch
from steelyard.torch_version import minor_version

# The lowest severity at which libkineto (torch 2.13) does not print a line for each start and stop.
# It reads the variable when the first profiler of the process starts.
_QUIET = ("KINETO_LOG_LEVEL", "6")


@dataclass(frozen=True, slots=True, kw_only=True)
class Metered:
    """Bytes above the level that was allocated at the beginning of the call.

    ``freed_bytes`` were allocated before the call and freed inside it. If it is not zero, the
    initial level was not clean (old gradients, an old loss). The peak then counts all allocations
    of the call, which is more than the call added.
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
    """Meter ``call`` after ``warmups`` calls, starting from the level at which a step starts.

    Allocations that only a first call makes (kernel caches, packed weights, gradients that persist)
    are not metered. Memory that a warm-up leaves and ``call`` then frees is reported as freed.
    """
    for _ in range(warmups):
        # Warm-ups are metered too, because a block is reported as freed only if its allocation was
        # seen.
        meter_once(call, device=device)
    gc.collect()
    return meter_once(call, device=device)


def meter_once(call: Callable[[], object], *, device: torch.device | None = None) -> Metered:
    """Meter one call without a warm-up. Must not run while ``is_profiled()``."""
    end = begin_metering(device=device)
    try:
        result = call()
    except BaseException:
        end()
        raise
    metered = end()
    del result  # alive until here, so that the result counts as left allocated
    return metered


def begin_metering(*, device: torch.device | None = None) -> Callable[[], Metered]:
    """Begin metering and return the function that ends it, which must be called.

    Must not run while ``is_profiled()``.
    """
    if device is not None and device.type == "cuda":
        return _begin_on_cuda(device)
    profiler = _quiet_profiler()
    profiler.__enter__()

    def end() -> Metered:
        profiler.__exit__(None, None, None)
        return replay(event[1:] for event in _memory_events(profiler))

    return end


def trace(call: Callable[[], object]) -> list[tuple[float, int]]:
    """Return the times of allocations and frees on the CPU during the call, with the level after
    each.

    Seconds count from the first such event, bytes from the level at the beginning of the call. The
    profiler makes the call slower. Must not run while ``is_profiled()``.
    """
    gc.collect()
    with _quiet_profiler() as profiler:
        call()
    events = _memory_events(profiler)
    levels = zip(events, _levels(event[1:] for event in events), strict=True)
    return [((when - events[0][0]) / 1e9, level) for (when, *_), (level, _) in levels]


def is_profiled(device: torch.device | None = None, *, is_quick: bool = False) -> bool:
    """True if another profiler is active whose events metering on ``device`` would take away."""
    return (device is None or device.type == "cpu") and _torch.profiler_is_on(is_quick=is_quick)


def replay(events: Iterable[tuple[int, int]]) -> Metered:
    """Return the memory levels that a time-ordered series of (address, signed bytes) describes."""
    levels = list(_levels(events)) or [(0, 0)]
    level, freed = levels[-1]
    peak = max(0, *(level for level, _ in levels))
    return Metered(peak_bytes=peak, left_bytes=level, freed_bytes=freed)


def _levels(events: Iterable[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """Yield the level after each event, and how many bytes from before the first event were freed.

    If a gloo thread frees memory, there is no event. So a new allocation at an address means that
    the previous block there was freed.
    """
    born: dict[int, int] = {}
    level = freed = 0
    for address, nbytes in events:
        if nbytes > 0:
            level += nbytes - born.get(address, 0)
            born[address] = nbytes
        elif address in born:
            level -= born.pop(address)
        else:
            freed -= nbytes
        yield level, freed


def _memory_events(profiler: Any) -> list[tuple[int, int, int]]:
    """Return the nanoseconds, address and signed bytes of each allocation and free, by time."""
    found: list[tuple[int, int, int]] = []
    for event in _flatten(profiler.profiler.kineto_results.experimental_event_tree()):
        if event.tag.name == "Allocation":
            fields = event.extra_fields
            found.append((event.start_time_ns, fields.ptr, fields.alloc_size))
    return sorted(found, key=lambda e: e[0])


def _flatten(events: Iterable[Any]) -> Iterator[Any]:
    stack = list(reversed(list(events)))
    while stack:
        event = stack.pop()
        yield event
        stack += reversed(event.children)


def _quiet_profiler() -> Any:
    name, level = _QUIET
    if name not in os.environ:
        os.environ[name] = level
    # Before torch 2.13, a profiler without acc_events warns about later cycles; this one has no
    # later cycles.
    warns = minor_version(torch.__version__) < (2, 13)
    return profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=warns)


def _begin_on_cuda(device: torch.device) -> Callable[[], Metered]:
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_stats(device)

    def end() -> Metered:
        torch.cuda.synchronize(device)
        level = torch.cuda.memory_allocated(device) - before["allocated_bytes.all.current"]
        peak = torch.cuda.max_memory_allocated(device) - before["allocated_bytes.all.current"]
        # The statistics show how far the level fell, but not which block was freed. The result is
        # therefore a lower bound.
        return Metered(peak_bytes=peak, left_bytes=max(level, 0), freed_bytes=max(-level, 0))

    return end
