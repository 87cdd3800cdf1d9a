"""The plan for a loop counts the loop's own optimizer, and the gradients that the loop keeps."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from steelyard.errors import BadInput, Infeasible
from steelyard.integrations.loop_plan import LoopPlan, budget_of, optimizer_like
from steelyard.plans.budget import Budget
from tests.harness import in_a_hurry


@pytest.fixture(autouse=True)
def _in_a_hurry(costs: Path) -> Iterator[None]:
    with in_a_hurry(costs):
        yield


def mlp() -> nn.Sequential:
    torch.manual_seed(0)
    layers = [m for _ in range(6) for m in (nn.Linear(128, 128), nn.GELU())]
    return nn.Sequential(*layers)


def square(model: nn.Module, batch: Tensor) -> Tensor:
    value: Tensor = model(batch).square().mean()
    return value


def two_groups(model: nn.Module) -> torch.optim.AdamW:
    """Decay weights and not biases, in another order than the model's; the last layer is frozen."""
    last = model.get_submodule("10")
    last.requires_grad_(False)
    trained = [p for p in model.parameters() if p.requires_grad]
    return torch.optim.AdamW(
        [
            {"params": [p for p in trained if p.dim() == 1], "weight_decay": 0.0},
            {"params": [p for p in trained if p.dim() == 2], "lr": 1e-2},
        ],
        lr=1e-3,
        fused=True,
    )


def test_the_models_own_parameters_get_the_loops_own_optimizer() -> None:
    model = mlp()
    optimizer = two_groups(model)
    assert optimizer_like(optimizer, model)(model.parameters()) is optimizer


def test_other_parameters_get_an_optimizer_with_the_same_groups() -> None:
    model, other = mlp(), mlp()
    optimizer = two_groups(model)
    like = optimizer_like(optimizer, model)(other.parameters())
    assert type(like) is torch.optim.AdamW
    assert like is not optimizer
    positions = {id(p): index for index, p in enumerate(other.parameters())}
    own = {id(p): index for index, p in enumerate(model.parameters())}
    for group, expected in zip(like.param_groups, optimizer.param_groups, strict=True):
        assert [positions[id(p)] for p in group["params"]] == [
            own[id(p)] for p in expected["params"]
        ]
        for key in ("lr", "weight_decay", "fused"):
            assert group[key] == expected[key]


def test_stand_ins_for_single_parameters_get_one_group() -> None:
    model = mlp()
    like = optimizer_like(two_groups(model), model)([nn.Parameter(torch.zeros(1))])
    assert [len(group["params"]) for group in like.param_groups] == [1]


def test_a_budget_is_an_amount_or_a_budget() -> None:
    assert budget_of("2 GiB") == Budget(memory="2 GiB")
    assert budget_of(Budget(memory="1 GiB")) == Budget(memory="1 GiB")
    with pytest.raises(BadInput, match="budget= is a NoneType"):
        budget_of(None)  # type: ignore[arg-type]


def plan_of(budget: str, *, keeps_gradients: bool, samples: int = 512) -> LoopPlan:
    model = mlp()
    return LoopPlan(
        model,
        square,
        torch.randn(samples, 512 // samples, 128),
        optimizer=torch.optim.SGD(model.parameters(), lr=1e-3),
        budget=Budget(memory=budget),
        keeps_gradients=keeps_gradients,
    )


@pytest.mark.slow
def test_kept_gradients_are_within_the_budget() -> None:
    loop_plan = plan_of("4 MiB", keeps_gradients=True)
    optimizer = loop_plan.optimizer
    assert optimizer is loop_plan.step.optimizer
    for number in range(8):
        loop_plan.backward(torch.randn(512, 1, 128), 0.5)
        if number % 2:
            optimizer.step()
            optimizer.zero_grad()
    receipt = loop_plan.receipt()
    assert receipt.plan.decisions.budget == Budget(memory="4 MiB")
    assert receipt.measured.memory_bytes is not None
    assert receipt.measured.memory_bytes <= 4 * 2**20
    assert any("gradients kept" in note for note in receipt.measured.notes)


@pytest.mark.slow
def test_a_budget_without_room_for_kept_gradients_is_refused() -> None:
    # Of several samples, the plan makes micro-batches, and then keeps gradients itself.
    roomy = plan_of("4 MiB", keeps_gradients=False, samples=1).planned
    floor = min(point.memory_bytes for point in roomy.frontier)
    budget = f"{int(float(floor)) + 2048} B"
    with pytest.raises(Infeasible, match="gradients that the loop keeps between batches") as error:
        plan_of(budget, keeps_gradients=True, samples=1)
    assert "one larger batch" in error.value.remedy
