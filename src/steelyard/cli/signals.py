"""Ctrl-C handling that works even if a library swallows the KeyboardInterrupt, as importing torch
does.

Not for printing it: see exit_codes.py.
"""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType

from steelyard.plans.stop_request import StopRequest

_seen = False
# The search that the first Ctrl-C ends with the best plan so far, if it has one.
_search: StopRequest | None = None


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


@contextmanager
def search_stops_first() -> Iterator[StopRequest]:
    """Let the first Ctrl-C within the context end the search, once a plan is known.

    The second one interrupts as usual.
    """
    global _search
    _search = StopRequest()
    try:
        yield _search
    finally:
        _search = None


def _remember(_signum: int, _frame: FrameType | None) -> None:
    global _seen
    if _search is not None and _search.is_possible and not _search.is_made:
        _search.is_made = True
        return
    _seen = True
    raise KeyboardInterrupt
