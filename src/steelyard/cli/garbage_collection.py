"""Turns Python's garbage collector off while a command starts.

Not for garbage during training: the collector runs as the user has set it.
"""

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def without_collection() -> Iterator[None]:
    """Do not search for garbage while imports create many objects, all of which stay."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
