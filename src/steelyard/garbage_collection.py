"""Turns Python's garbage collector off while many objects are made that stay.

Not for garbage during training: the collector runs as the user has set it.
"""

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def without_collection() -> Iterator[None]:
    """Do not search for garbage while imports or a search create many objects.

    With torch imported there are half a million objects, and each full collection looks at them
    all: a quarter of the time of an import, and of a search.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
