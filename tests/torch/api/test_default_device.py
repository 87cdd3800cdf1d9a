"""The user may set the default device: Steelyard's tensors are on the model's device."""

from __future__ import annotations

import copy
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

import steelyard as sy
from tests.harness import in_a_hurry
from tests.support.torch_since import torch_since


@torch_since((2, 13), "Adam keeps its step count on the CPU since torch 2.13 (torch/optim/adam.py)")
def test_a_step_is_planned_and_run_where_the_model_is(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Dropout(0.1), nn.Linear(64, 16))
    batch, twin = torch.randn(32, 16), copy.deepcopy(model)

    def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = model(batch).square().mean()
        return result

    optimizer = partial(torch.optim.AdamW, lr=1e-2)
    with in_a_hurry(tmp_path / "costs.sqlite"), torch.device("meta"):
        planned = sy.plan(model, loss, batch, optimizer=optimizer)
        step = planned.apply()
        torch.manual_seed(1)
        losses = [float(step(batch)) for _ in range(4)]
        receipt = step.receipt()
    assert not any("not measured" in note for note in planned.plan.notes), planned.plan.notes
    torch.manual_seed(1)
    plain, expected = optimizer(twin.parameters()), []
    for _ in range(4):
        plain.zero_grad()
        value = loss(twin, batch)
        value.backward()
        plain.step()
        expected.append(float(value.detach()))
    assert losses == pytest.approx(expected, rel=1e-6)
    said = planned.plan.predicted.peak.nbytes
    assert receipt.measured.memory_bytes == pytest.approx(said, rel=1e-3)
