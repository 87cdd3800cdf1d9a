"""Planned for Inductor: priced as the program that Inductor makes, run, and within the budget."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

import steelyard as sy
from steelyard import _torch
from steelyard.core.errors import Infeasible
from tests import zoo
from tests.harness import in_a_hurry

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(_torch.cpp_compiler() is None, reason="needs a C++ compiler"),
]


@pytest.fixture(scope="module", autouse=True)
def _in_a_hurry(costs: Path) -> Iterator[None]:
    with in_a_hurry(costs):
        yield


@pytest.mark.parametrize("name", ["convnet_bn"])
def test_the_measured_peak_is_within_the_budget(name: str) -> None:
    model, loss, batch = zoo.case(name).make()
    make = partial(torch.optim.SGD, lr=1e-2)
    look = sy.plan(model, loss, batch, optimizer=make, runner="inductor")
    unplanned = look.plan.unplanned.peak
    with pytest.raises(Infeasible) as refused:
        look.what_if(memory=unplanned.resident_bytes)
    least = refused.value.least_bytes
    assert least is not None
    budget = max(least, (least + unplanned.nbytes) // 2)
    step = look.what_if(memory=budget).apply()
    losses = [float(step(batch)) for _ in range(3)]
    measured = step.receipt().measured.memory_bytes
    assert measured is not None
    assert measured <= budget
    # A convolution lays its arguments out anew inside, which is metered with them as they lie.
    assert measured == pytest.approx(step.plan.predicted.peak.nbytes, rel=0.001)
    assert losses[-1] < losses[0]


def test_each_point_of_the_curve_is_what_inductor_makes_of_its_rules() -> None:
    layers = [layer for _ in range(4) for layer in (nn.Linear(32, 32), nn.Tanh(), nn.Sigmoid())]
    batch = torch.randn(512, 32)
    look = sy.plan(
        nn.Sequential(*layers), lambda m, b: m(b).square().mean(), batch, runner="inductor"
    )
    points = look.frontier
    assert len(points) >= 2
    assert [p.memory_bytes for p in points] == sorted({p.memory_bytes for p in points})
    seconds = [p.step_seconds for p in points]
    assert seconds == sorted(seconds, reverse=True)
    assert points[-1].memory_bytes == look.plan.unplanned.peak.nbytes
    assert points[-1].rules == ()
    within = look.what_if(memory=points[1].memory_bytes).plan
    assert within.predicted.peak.nbytes <= points[1].memory_bytes
