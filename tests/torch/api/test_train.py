"""The receipt of ``steelyard run`` describes the steps that were taken."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from steelyard.api import Planned, Workload, run_workload
from steelyard.api.planning import plan_workload
from steelyard.plans.budget import Budget
from steelyard.report.document import tree_of
from steelyard.report.styled_text import plain
from steelyard.report.text import render


def square(model: nn.Module, batch: Any) -> Tensor:
    value: Tensor = model(batch).square().mean()
    return value


def planned() -> tuple[Planned, Workload]:
    torch.manual_seed(0)
    batches = [torch.randn(8, 16) for _ in range(3)]
    adamw = partial(torch.optim.AdamW, lr=1e-2)
    workload = Workload(nn.Linear(16, 16), square, batches, optimizer=adamw)
    return plan_workload(workload, budget=Budget()), workload


def test_a_resumed_run_reports_its_own_steps_only(tmp_path: Path) -> None:
    losses: dict[int, float] = {}
    said = []
    for steps in (3, 5, 5):
        receipt = run_workload(
            *planned(), steps=steps, checkpoint=tmp_path, resume=steps == 5,
            on_step=lambda report: losses.update({report.step: report.loss}),
        )  # fmt: skip
        lines = plain(render(tree_of(receipt))).splitlines()
        said.append(next(line for line in lines if line.startswith("ran")))
    assert f"ran         3 steps, loss {losses[1]:.6g} to {losses[3]:.6g}," in said[0]
    assert f"ran         2 steps (4 to 5), loss {losses[4]:.6g} to {losses[5]:.6g}," in said[1]
    assert said[2].startswith("ran         0 steps, the whole process")


def test_cold_and_metered_steps_report_no_time() -> None:
    made, workload = planned()
    assert run_workload(made, workload, steps=2).measured.step_seconds is None
    receipt = run_workload(made, workload, steps=3)
    assert receipt.measured.step_seconds is not None
    step = made.apply()
    for expected in (True, True, False):
        step(workload.first_batch())
        assert (step.receipt().measured.step_seconds is None) is expected
    step_row = tree_of(run_workload(made, workload, steps=1)).rows[-1]
    assert (step_row.measured, step_row.is_outside) == ("-", False)
