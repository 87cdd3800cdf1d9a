"""The worker that tests each model of the zoo in a whole run, so that each capture is made once.

Not for what is shared there: see trial_of() in harness.py.
"""

import pytest


def on_its_worker(name: str) -> object:
    """Return the name as a parameter of a test."""
    return pytest.param(name, marks=pytest.mark.xdist_group(name))
