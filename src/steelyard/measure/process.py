"""This process as the operating system sees it: resident bytes, their peak, and CPU time.

Resident bytes include libraries and the C heap, unlike the allocator's figures. Not for bounding
memory, because the heap also keeps unused pages: see measure/operators/memory.py.
"""

import resource
import sys
from pathlib import Path


def rss_bytes() -> int:
    return _status_bytes("VmRSS") or rss_peak_bytes()


def rss_peak_bytes() -> int:
    """Return the peak resident bytes of this process."""
    peak = _status_bytes("VmHWM")
    if peak is None:
        used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        peak = used if sys.platform == "darwin" else used * 1024
    return peak


def cpu_seconds() -> float:
    """Return the CPU seconds of all threads of this process, in user mode and in system mode."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def _status_bytes(field: str) -> int | None:
    """Return a field of /proc/self/status in bytes; None without /proc."""
    try:
        lines = Path("/proc/self/status").read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return None
    for line in lines:
        name, _, rest = line.partition(":")
        if name == field:
            return int(rest.split()[0]) * 1024
    return None
