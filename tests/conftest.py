"""What the workers of a whole run begin with. Not for what some tests share: see harness.py."""

import gc
import importlib
import os

if "PYTEST_XDIST_WORKER" in os.environ:
    # They come to import these in any case, 400 thousand objects that live as long as the process.
    # To look through all of them took a third of a second for each full collection, of which there
    # are several in a capture and in a metered step. Caches of test modules are still looked
    # through, as a user's are: capture empties those that it has filled.
    for name in ("steelyard.api", "transformers"):
        importlib.import_module(name)
    gc.collect()
    gc.freeze()
