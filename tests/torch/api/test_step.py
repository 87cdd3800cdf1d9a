"""Notes of a step in a user's own loop."""

from __future__ import annotations

import copy
import re
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import steelyard as sy
from steelyard.errors import BadInput, Mismatch
from steelyard.ir.rule import of_kind
from steelyard.ir.rule_kinds import MicroBatches
from steelyard.predict import kept_gradients_bytes
from steelyard.units import format_bytes


def square(model: nn.Module, batch: Any) -> Tensor:
    value: Tensor = model(batch).square().mean()
    return value


@pytest.mark.parametrize("set_to_none", [True, False])
def test_kept_gradients_are_measured_and_noted(set_to_none: bool) -> None:
    model = nn.Sequential(*[nn.Linear(128, 128) for _ in range(4)])
    batch = torch.randn(8, 128)
    planned = sy.plan(model, square, batch)
    step = planned.apply()
    step.backward(batch)
    model.zero_grad(set_to_none=set_to_none)
    measured = step.memory_meter.peak_bytes(lambda: step.backward(batch))
    predicted = planned.predicted.memory_bytes.value
    program, costs = step.live.program, planned.session.prices.costs
    more = kept_gradients_bytes(program, costs)
    assert more > predicted // 20
    assert measured == pytest.approx(predicted + (0 if set_to_none else more), rel=0.001)
    said = f"gradients kept between steps add ~{format_bytes(more)} to the plan"
    assert (said in str(step.receipt())) == (not set_to_none)
    assert kept_gradients_bytes(program.repeated(2), costs) == 0, "parts add into them anyway"


def test_the_default_dtype_is_that_of_the_capture_and_not_of_apply() -> None:
    model, batch = nn.Linear(4, 4), torch.randn(6, 4)
    planned = sy.plan(model, lambda m, b: square(m, b) * torch.ones(()), batch)
    torch.set_default_dtype(torch.float64)
    try:
        with pytest.raises(sy.SteelyardError, match=r"expected: torch\.float32"):
            planned.apply()
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.isfinite(planned.apply().backward(batch))


def test_tensors_read_by_the_loss_are_measured() -> None:
    model, table = nn.Linear(64, 64), torch.randn(64, 2048)
    planned = sy.plan(model, lambda m, b: (m(b) @ table).square().mean(), torch.randn(4, 64))
    step = planned.apply()
    step.backward(torch.randn(4, 64))
    step.live.zero_grad()
    measured = step.memory_meter.peak_bytes(lambda: step.backward(torch.randn(4, 64)))
    assert measured > table.nbytes
    assert measured == pytest.approx(planned.predicted.memory_bytes.value, rel=0.01)


def test_a_last_batch_of_another_size_is_split_differently() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 256), nn.Tanh(), nn.Linear(256, 16))
    plain = copy.deepcopy(model)
    whole, last = torch.randn(32, 16), torch.randn(7, 16)
    session = sy.plan(model, square, whole)
    unplanned = session.plan.unplanned.peak
    added = unplanned.nbytes - unplanned.resident_bytes
    planned = session.what_if(memory=unplanned.resident_bytes + added // 2)
    parts = max(r.micro_batches for r in of_kind(planned.plan.decisions.rules, MicroBatches))
    assert parts > 1
    step = planned.apply()
    for batch in (whole, last):
        model.zero_grad()
        plain.zero_grad()
        value = square(plain, batch)
        value.backward()
        torch.testing.assert_close(step.backward(batch), value.detach())
        for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(ours.grad, theirs.grad)
    assert re.search(r"also ran batches of \[7, 16\]", str(step.receipt()))


def test_arguments_of_a_wrong_type_are_named() -> None:
    batch = torch.ones(4, 4)
    model = nn.Linear(4, 4)

    def loss(model: nn.Module, batch: Any) -> Any:
        return model(batch).sum()

    kinds: Any = nn.Linear
    with pytest.raises(BadInput, match=r"^model is <class .*Linear'>"):
        sy.plan(kinds, loss, batch)
    with pytest.raises(BadInput, match=r"^model is <class .*Linear'>"):
        sy.plan(model, loss, batch).apply(kinds)
    swapped: Any = batch
    with pytest.raises(BadInput, match=r"^loss is tensor"):
        sy.plan(model, swapped, loss)


def test_a_plan_for_one_rank_is_refused_in_a_process_group_of_several() -> None:
    """Otherwise no gradient would be summed over the ranks of a script for
    DistributedDataParallel."""
    model, batch = nn.Linear(4, 4), torch.randn(6, 4)
    planned = sy.plan(model, square, batch)
    alone = planned.apply()
    with (
        mock.patch.object(dist, "is_initialized", return_value=True),
        mock.patch.object(dist, "get_world_size", return_value=2),
    ):
        with pytest.raises(Mismatch, match="one of 2 ranks of a process group") as refused:
            planned.apply()
        assert "sy.Cluster.here(ranks=2)" in refused.value.remedy
        for run in (alone, alone.backward):
            with pytest.raises(Mismatch, match="the plan is for one"):
                run(batch)
        step = planned.apply(sums_gradients=True)
        assert torch.isfinite(step.backward(batch))
    assert torch.isfinite(alone.backward(batch))
