"""Work beside a run: a forked process of low priority that computes a text, while its parent goes
on training.

The child sees everything as it was when it was forked, weights too, and changes nothing of it: what
it writes are its own copies of pages. It speaks to no other rank and ends with ``os._exit``, so
that nothing of its parent's is closed or flushed twice. On a GPU there is no such thing: CUDA does
not survive a fork. Not for what is computed: see replan.py.
"""

import contextlib
import json
import os
import signal
import threading
import weakref
from collections.abc import Callable

import torch

from steelyard.safe_text import printable

# A tenth of what a process of usual priority gets of a core that both want: enough to end within
# minutes on a core that is never idle, and steps hardly take longer.
_LOW_PRIORITY = 10
_PIECE = 1 << 16


class BackgroundProcess:
    """Computes ``work()`` there; ``answer`` is None until it is known.

    ``failure`` is what went wrong instead, in one line.
    """

    def __init__(self, work: Callable[[], str]) -> None:
        answers, own = os.pipe()
        # Its other end closes with this process, whatever ends it.
        lifeline, held = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            os.close(answers)
            os.close(held)
            _child(work, own, lifeline)
        os.close(own)
        os.close(lifeline)
        os.set_blocking(answers, False)
        self._answers, self._said = answers, b""
        self.answer: str | None = None
        self.failure = ""
        self.end = weakref.finalize(self, _end, self.pid, answers, held)

    def is_done(self) -> bool:
        """True if there is an answer or a failure; never waits."""
        if not self.end.alive:
            return True
        while True:
            try:
                piece = os.read(self._answers, _PIECE)
            except BlockingIOError:
                return False
            if not piece:
                break
            self._said += piece
        self.end()
        self._read()
        return True

    def _read(self) -> None:
        try:
            found = json.loads(self._said)
            self.answer, self.failure = found["answer"], found["failure"]
        except (ValueError, KeyError, TypeError):
            self.failure = "the process that was to find out ended without an answer"


def _child(work: Callable[[], str], own: int, lifeline: int) -> None:
    """Never returns: whatever happens, nothing of the caller's runs on in here."""
    code = 1
    try:
        os.nice(_LOW_PRIORITY)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_DFL)
        threading.Thread(target=_end_with_parent, args=(lifeline,), daemon=True).start()
        nowhere = os.open(os.devnull, os.O_RDWR)
        for stream in (0, 1, 2):
            os.dup2(nowhere, stream)
        # Threads of OpenMP did not come along.
        torch.set_num_threads(1)
        found = {"answer": None, "failure": ""}
        try:
            found["answer"] = work()
        except Exception as error:  # noqa: BLE001 - told to whoever asked
            found["failure"] = printable(f"{type(error).__name__}: {error}", most=200)
        said = memoryview(json.dumps(found).encode())
        while said:
            said = said[os.write(own, said) :]
        code = 0
    finally:
        os._exit(code)


def _end_with_parent(lifeline: int) -> None:
    os.read(lifeline, 1)
    os._exit(1)


def _end(pid: int, *ends: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    with contextlib.suppress(ChildProcessError):
        os.waitpid(pid, 0)
    for end in ends:
        os.close(end)
