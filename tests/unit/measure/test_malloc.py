"""The heap keeps the memory that a step frees.

Each case is a process, because the heap belongs to the whole process.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

# The blocks of a step: blocks of a megabyte, and one that is too large for any process to keep.
_STEPS = """
import ctypes, resource, sys
from steelyard.measure.malloc import is_kept, keep_freed_memory

kept = keep_freed_memory() if sys.argv[1] == "keep" else False
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
for step in range(6):
    if step == 2:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    blocks = [libc.malloc(size << 20) for size in (1, 2, 4, 8, 30, 1)]
    for block, size in zip(blocks, (1, 2, 4, 8, 30, 1)):
        ctypes.memset(block, 1, size << 20)
    for block in blocks:
        libc.free(block)
assert is_kept() == kept
print(kept, resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""
_PAGES_OF_A_STEP = 46 << 8


def said(how: str, **environment: str) -> tuple[bool, int]:
    own = {k: v for k, v in os.environ.items() if not k.startswith(("MALLOC_", "GLIBC_"))}
    done = subprocess.run(
        [sys.executable, "-c", _STEPS, how],
        env={**own, **environment}, capture_output=True, text=True, check=True,
    )  # fmt: skip
    kept, faults = done.stdout.split()
    return kept == "True", int(faults)


@pytest.mark.parametrize("told", [{}, {"MALLOC_ARENA_MAX": "2"}], ids=["nothing", "something else"])
def test_freed_pages_are_not_faulted_in_again(told: dict[str, str]) -> None:
    kept, faults = said("keep", **told)
    assert kept
    assert faults < _PAGES_OF_A_STEP / 10


@pytest.mark.parametrize(
    "told",
    [
        {"MALLOC_TRIM_THRESHOLD_": "0", "MALLOC_MMAP_THRESHOLD_": "65536"},
        {"GLIBC_TUNABLES": "glibc.malloc.trim_threshold=0:glibc.malloc.mmap_threshold=65536"},
    ],
    ids=["variables", "tunables"],
)
def test_malloc_settings_of_the_user_are_kept(told: dict[str, str]) -> None:
    kept, faults = said("keep", **told)
    assert not kept
    assert faults > 4 * _PAGES_OF_A_STEP * 0.9
