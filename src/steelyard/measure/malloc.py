"""What the C library's heap does with what a step frees: it is kept for the next step.

By itself glibc gives freed memory back to the kernel between steps, and each step pays to have the
same pages again, zeroed; how much it gives back hangs on what the process has freed before, so that
one process takes a quarter longer than another for the same step (decision 0027). Not for how much
memory there is: see hardware/host_os.py.
"""

import ctypes
import os
import platform
import threading

# Of glibc's mallopt; the second's largest value, on 64 bits, beyond which every block is the
# kernel's again when it is freed.
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
_LARGEST_KEPT_BYTES = 32 << 20
_NEVER = -1
_kept = threading.Event()


def keep_freed_memory() -> bool:
    """From now on, in this process; not where the user has said what the heap is to do."""
    if is_kept():
        return True
    if platform.libc_ver()[0] != "glibc" or _is_told():
        return False
    mallopt = ctypes.CDLL(None).mallopt
    if mallopt(_MMAP_THRESHOLD, _LARGEST_KEPT_BYTES) and mallopt(_TRIM_THRESHOLD, _NEVER):
        _kept.set()
    return is_kept()


def is_kept() -> bool:
    """A process's steps take less from then on."""
    return _kept.is_set()


def _is_told() -> bool:
    tunables = os.environ.get("GLIBC_TUNABLES", "")
    return any(
        f"MALLOC_{name}_THRESHOLD_" in os.environ or f"malloc.{name.lower()}_threshold" in tunables
        for name in ("TRIM", "MMAP")
    )
