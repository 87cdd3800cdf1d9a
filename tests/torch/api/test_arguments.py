"""Arguments of a wrong type are refused in three lines, before anything is captured."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import steelyard as sy
from steelyard.api.planned import Planned
from steelyard.errors import BadInput, BudgetError
from tests.support.sample import PLAN

PLANNED = Planned(None, PLAN)  # type: ignore[arg-type]  # what is refused looks at nothing


def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    value: torch.Tensor = model(batch).sum()
    return value


@pytest.mark.parametrize(
    "given", [{"cluster": 3}, {"on_progress": 3}, {"budget": 3}, {"title": 3}, {"runner": 3}]
)
def test_planning_errors_name_the_argument(given: dict[str, Any]) -> None:
    (name,) = given
    with pytest.raises(BadInput, match=f"{name} is 3") as refused:
        sy.plan(nn.Linear(1, 1), loss, torch.ones(2, 1), **given)
    assert len(str(refused.value).splitlines()) == 3


def test_errors_of_a_plan_name_the_argument() -> None:
    with pytest.raises(BadInput, match="unknown trade 3"):
        PLANNED.why_not(3)  # type: ignore[arg-type]
    with pytest.raises(BadInput, match="path is 3"):
        PLANNED.save(3)  # type: ignore[arg-type]
    with pytest.raises(BadInput, match="path is 3"):
        sy.load(3, nn.Linear(1, 1), loss, torch.ones(2, 1))  # type: ignore[arg-type]
    with pytest.raises(BadInput, match="model is 3"):
        sy.load("x.toml", 3, loss, torch.ones(2, 1))  # type: ignore[arg-type]


@pytest.mark.parametrize("memory", [2.5, "2.5", "1e-1"])
def test_a_fraction_of_a_byte_is_refused_as_a_budget(memory: Any) -> None:
    with pytest.raises(BudgetError, match="not a possible amount"):
        sy.Budget(memory=memory)
    assert sy.Budget(memory=2.0).memory_bytes == 2  # type: ignore[arg-type]
    assert sy.Budget(memory="0.1 KiB").memory_bytes == 102


def test_maximize_without_a_budget_names_the_argument_and_the_option() -> None:
    with pytest.raises(BudgetError, match=r"--memory 2GiB, or budget=Budget\(memory="):
        sy.plan(nn.Linear(1, 1), loss, torch.ones(2, 1), maximize="batch")
