"""A background process: a low-priority fork that computes a text while its parent keeps training.

The child sees the memory of the parent as it was at the fork, including weights. It cannot change
that memory: its writes go to its own copies of the pages. It communicates with no other rank and
ends with ``os._exit``, so that nothing of the parent is closed or flushed twice. There is no
background process on a GPU: CUDA does not survive a fork. Not for the computation itself: see
replan.py.
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

# A process with a niceness of 10 gets about a tenth of a core that a normal process also uses. On a
# busy core this is enough to end within minutes, and steps take hardly any longer.
_LOW_PRIORITY = 10
_PIECE = 1 << 16


class BackgroundProcess:
    """Computes ``work()`` in a fork; ``answer`` is None until the result is known.

    If the work fails, ``failure`` is the error in one line.
    """

    def __init__(self, work: Callable[[], str]) -> None:
        answers, answers_of_child = os.pipe()
        # The child ends when this process ends for any reason, because that closes the other end of
        # the pipe.
        lifeline, parent_end = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            os.close(answers)
            os.close(parent_end)
            _child(work, answers_of_child, lifeline)
        os.close(answers_of_child)
        os.close(lifeline)
        os.set_blocking(answers, False)
        self._answers, self._received = answers, b""
        self.answer: str | None = None
        self.failure = ""
        self.end = weakref.finalize(self, _end, self.pid, answers, parent_end)

    def is_done(self) -> bool:
        """True if there is an answer or a failure; never blocks."""
        if not self.end.alive:
            return True
        while True:
            try:
                piece = os.read(self._answers, _PIECE)
            except BlockingIOError:
                return False
            if not piece:
                break
            self._received += piece
        self.end()
        self._read()
        return True

    def _read(self) -> None:
        try:
            found = json.loads(self._received)
            self.answer, self.failure = found["answer"], found["failure"]
        except (ValueError, KeyError, TypeError):
            self.failure = "the background search process ended without an answer"


def _child(work: Callable[[], str], answers: int, lifeline: int) -> None:
    """Run the work and exit; never returns into the parent's code."""
    code = 1
    try:
        os.nice(_LOW_PRIORITY)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_DFL)
        threading.Thread(target=_end_with_parent, args=(lifeline,), daemon=True).start()
        devnull = os.open(os.devnull, os.O_RDWR)
        for stream in (0, 1, 2):
            os.dup2(devnull, stream)
        # A fork does not copy the threads of OpenMP.
        torch.set_num_threads(1)
        found = {"answer": None, "failure": ""}
        try:
            found["answer"] = work()
        except Exception as error:  # noqa: BLE001 - told to whoever asked
            found["failure"] = printable(f"{type(error).__name__}: {error}", most=200)
        unsent = memoryview(json.dumps(found).encode())
        while unsent:
            unsent = unsent[os.write(answers, unsent) :]
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
