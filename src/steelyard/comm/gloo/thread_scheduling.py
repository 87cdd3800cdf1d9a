"""How gloo's threads share a core with what computes there.

One of them listens for what arrives (torch 2.13: ``gloo_tcp_loop``). Where it finds a connection's
lock taken it asks again at once, until the kernel takes the core away; with one core to a rank,
whoever holds the lock cannot go on meanwhile. Not for what is exchanged.
"""

import contextlib
import os
import time
from pathlib import Path

LISTENER = "gloo_tcp_loop"
_TASKS = Path("/proc/self/task")
# How often who computes gives way, and how many times as long as others then took it computes.
_EVERY_SECONDS = 1e-4
_TIMES = 4


def give_way() -> None:
    """Before something is sent: those threads hear who waits for it by now, and it goes at once."""
    os.sched_yield()


class ThreadScheduling:
    """Called again and again by what computes while something is on its way: gives way now and
    then, and the more seldom the longer it does not get the core back. So where another program
    is at work there, that one has a fifth of it from here, and not all."""

    def __init__(self) -> None:
        self._next = 0.0

    def __call__(self) -> None:
        begin = time.perf_counter()
        if begin >= self._next:
            give_way()
            end = time.perf_counter()
            self._next = end + max(_EVERY_SECONDS, _TIMES * (end - begin))


def take_turns() -> None:
    """Those threads no longer cut in on the one that runs when they wake; as a batch job does not.

    Eight exchanges of 1 KiB at once took 16 ms between two ranks with a core each, and take 1 ms. A
    hint: where the kernel knows or allows none, all is as it was.
    """
    for task in _TASKS.iterdir() if _TASKS.exists() else ():
        with contextlib.suppress(OSError):  # it may have ended just now
            if (task / "comm").read_text().strip() == LISTENER:
                os.sched_setscheduler(int(task.name), os.SCHED_BATCH, os.sched_param(0))
