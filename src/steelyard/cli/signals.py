"""Ctrl-C handling that works even if a library swallows the KeyboardInterrupt, as importing torch
does.

Not for printing it: see exit_codes.py.
"""

import signal
import threading
from types import FrameType, TracebackType

_seen = False


def was_pressed() -> bool:
    return _seen


def handle_interrupts() -> None:
    """Raise KeyboardInterrupt if Ctrl-C was pressed and something swallowed the exception."""
    if _seen:
        raise KeyboardInterrupt


class InterruptHandler:
    """Records every Ctrl-C within the context, and restores the previous handler afterwards."""

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
