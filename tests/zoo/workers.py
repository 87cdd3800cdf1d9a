"""Which worker of a whole run has a model of the zoo: what is captured of it is captured once.

Not for what is shared there: see trial_of() in harness.py.
"""

import pytest


def on_its_worker(name: str) -> object:
    """The name as a parameter of a test."""
    return pytest.param(name, marks=pytest.mark.xdist_group(name))
