"""What the workers of a whole run begin with, and the costs that they share.

Not for what some tests share: see harness.py.
"""

import gc
import importlib
import os
from pathlib import Path

import pytest

if "PYTEST_XDIST_WORKER" in os.environ:
    # They come to import these in any case, 400 thousand objects that live as long as the process.
    # To look through all of them took a third of a second for each full collection, of which there
    # are several in a capture and in a metered step. Caches of test modules are still looked
    # through, as a user's are: capture empties those that it has filled.
    for name in ("steelyard.api", "transformers"):
        importlib.import_module(name)
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def costs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One list of measured costs for both workers, as a user has one for all models."""
    base = tmp_path_factory.getbasetemp()
    shared = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    return shared / "costs.sqlite"
