"""Makes glibc's heap keep the memory that a step frees, for the next step.

By default, glibc returns freed memory to the kernel between steps. Each step then spends time on
getting the same pages again, zeroed. How much is returned depends on what the process freed before,
so one process may take a quarter longer than another for the same step (decision 0027). Not for the
amount of memory: see hardware/host_os.py.
"""

import ctypes
import os
import platform
import threading

# Parameters of glibc's mallopt, and the largest mmap threshold on 64 bits. Blocks larger than this
# return to the kernel when they are freed.
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
_LARGEST_KEPT_BYTES = 32 << 20
_NEVER = -1
_keeps_freed = threading.Event()


def keep_freed_memory() -> bool:
    """Make the heap of this process keep freed memory, unless the user has configured the heap."""
    if is_kept():
        return True
    if platform.libc_ver()[0] != "glibc" or _is_configured_by_user():
        return False
    mallopt = ctypes.CDLL(None).mallopt
    if mallopt(_MMAP_THRESHOLD, _LARGEST_KEPT_BYTES) and mallopt(_TRIM_THRESHOLD, _NEVER):
        _keeps_freed.set()
    return is_kept()


def is_kept() -> bool:
    """True if the heap keeps freed memory, which shortens the steps of this process."""
    return _keeps_freed.is_set()


def _is_configured_by_user() -> bool:
    tunables = os.environ.get("GLIBC_TUNABLES", "")
    return any(
        f"MALLOC_{name}_THRESHOLD_" in os.environ or f"malloc.{name.lower()}_threshold" in tunables
        for name in ("TRIM", "MMAP")
    )
