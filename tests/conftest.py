"""Sets up the workers of a whole run, frees what they leave behind, and shares their measured
costs. Not for what some tests share: see harness.py."""

import functools
import gc
import importlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

if "PYTEST_XDIST_WORKER" in os.environ:
    # Each worker imports these modules anyway: 400 thousand objects that live as long as the
    # process. Scanning them took a third of a second per full collection, and a capture and a
    # metered step do several. Caches of test modules are still scanned, as a user's are: capture
    # empties those that it has filled.
    gc.disable()
    for name in ("steelyard.api", "torch._functorch.aot_autograd", "transformers"):
        importlib.import_module(name)
    gc.collect()
    gc.freeze()
    gc.enable()
    # Tests that meter memory call gc.collect() first. Collecting everything as often as Python does
    # by default took a tenth of the time of the capture tests.
    gc.set_threshold(700, 10, 100)


@pytest.fixture(scope="module", autouse=True)
def _let_go(request: pytest.FixtureRequest) -> Iterator[None]:
    """Free what tests of one file cache for each other, and torch's fake tensors.

    At the end of a whole run these are a million objects, which each full collection would scan.
    """
    yield
    for kept in vars(request.module).values():
        if (
            isinstance(kept, functools._lru_cache_wrapper)
            and kept.__module__ == request.module.__name__
        ):
            kept.cache_clear()
    if fakes := sys.modules.get("torch._subclasses.fake_tensor"):
        fakes.FakeTensorMode.cache_clear()


@pytest.fixture(scope="session")
def costs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One cache of measured costs for both workers, as a user has one for all models."""
    base = tmp_path_factory.getbasetemp()
    shared = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    return shared / "costs.sqlite"
