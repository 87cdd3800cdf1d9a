"""The captured steps in tests/unit/graphs are those that capture makes today.

If one fails after an intended change, ``python -m tests.unit.graphs.record`` writes all anew.
"""

from __future__ import annotations

import pytest
import torch

from tests.unit.graphs import record, stored

_ANEW = "capture has changed: run python -m tests.unit.graphs.record"

pytestmark = pytest.mark.skipif(
    not torch.__version__.startswith("2.13."), reason="the files hold what torch 2.13 traces"
)


# One graph of each kind that record.py makes: with parts and an update, with BatchNorm statistics,
# with a template for any number of samples, and of one tensor-parallel rank.
_QUICK = ("zoo-mlp", "norms", "deep-gpt", "published-gpt-on-2")


@pytest.mark.parametrize("name", _QUICK)
def test_a_step_captured_again_is_the_stored_one(name: str) -> None:
    assert record.record(name) == stored.read(name), _ANEW


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(record.RECORDED.keys() - set(_QUICK)))
def test_every_other_step_captured_again_is_the_stored_one(name: str) -> None:
    assert record.record(name) == stored.read(name), _ANEW


def test_the_stored_schedules_are_those_of_torch() -> None:
    assert record.orders() == stored.stored_orders(), _ANEW


def test_every_file_is_of_a_recorded_step() -> None:
    assert set(stored.names()) == record.RECORDED.keys()


def test_a_stored_step_is_equal_after_reading_and_writing() -> None:
    assert stored.encoded(stored.stored("zoo-mlp")) == stored.read("zoo-mlp")
