"""A search of fewer trials, for tests that do not depend on how good a plan is. Not a test."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from unittest import mock


@contextlib.contextmanager
def looking_less_far() -> Iterator[None]:
    """Search with fewer trials and fewer numbers of micro-batches, each of which is a capture.

    This is for tests that do not depend on how good a plan is. The finest split is still tried, so
    that the least memory stays the same.
    """
    module = "steelyard.search.single"
    with (
        mock.patch.multiple(f"{module}.explore", _LIMITS=8, _KICKING_WORK=0, _EFFORTS=(250,)),
        mock.patch.multiple(f"{module}.multi_recompute", _FEWEST=100),
        mock.patch.multiple(f"{module}.granularity", _COARSEST=2, _FINER=1),
    ):
        yield
