"""Ctrl-C, also where somebody swallows it: importing torch does in places.

Not for what is said about it: see exit_codes.py.
"""

import signal
import threading
from types import FrameType, TracebackType

_seen = False


def was_pressed() -> bool:
    return _seen


def handle_interrupts() -> None:
    """Stop here if Ctrl-C was pressed and nothing came of it."""
    if _seen:
        raise KeyboardInterrupt


class InterruptHandler:
    """While this stands, every Ctrl-C is remembered; what handled it before does so afterwards."""

    def __enter__(self) -> None:
        global _seen
        _seen = False
        self._before = signal.getsignal(signal.SIGINT)
        self._ours = (
            self._before is signal.default_int_handler
            and threading.current_thread() is threading.main_thread()
        )
        if self._ours:
            signal.signal(signal.SIGINT, _remember)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._ours:
            signal.signal(signal.SIGINT, self._before)


def _remember(_signum: int, _frame: FrameType | None) -> None:
    global _seen
    _seen = True
    raise KeyboardInterrupt
