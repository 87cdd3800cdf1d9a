"""The search for the largest size, on steps with artificial memory."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import steelyard as sy
from steelyard.errors import CaptureRefused, Infeasible
from steelyard.hardware.cluster import Cluster
from steelyard.ir.graph import Graph
from steelyard.planner import max_size as largest_module
from steelyard.planner.max_size import largest
from steelyard.planner.session import PlanRequest
from steelyard.plans.budget import Budget, Maximize
from tests.harness import in_a_hurry
from tests.support.sample import PLAN

NOTHING = Graph(nodes=(), storages=(), outputs=(), decomposition="python-1")


@pytest.mark.parametrize(
    ("power", "possible", "answer"),
    [
        (1, 100, 100),
        (1, 97, 97),
        (1, 10_000, 467),
        (1, 30_000, 467),
        (2, 100, 100),
        (2, 10_000, 149),
    ],
)
def test_few_sizes_are_tried(
    monkeypatch: pytest.MonkeyPatch, power: int, possible: int, answer: int
) -> None:
    """The memory is 48 MB at a length of 48 and grows with it; longer sequences may be
    impossible."""
    budget = 467_500_000
    tried: list[int] = []

    def capture_and_price(request: PlanRequest) -> Any:
        size = request.batch.shape[1]
        tried.append(size)
        if size > possible:
            raise CaptureRefused(f"no row {size}", expected="rows", remedy="shorten it")
        least = int(48_000_000 * (size / 48) ** power)
        search = SimpleNamespace(least_bytes=lambda *, enough_bytes: least)
        return SimpleNamespace(base=SimpleNamespace(graph=NOTHING), search=search)

    monkeypatch.setattr(PlanRequest, "capture_and_price", capture_and_price)
    monkeypatch.setattr(largest_module, "Planner", lambda _: SimpleNamespace(plan=lambda _: PLAN))
    request = PlanRequest(
        model=nn.Linear(1, 1), loss=lambda *_: torch.zeros(()), optimizer=None, title="",
        batch=torch.zeros(2, 48, dtype=torch.long), cluster=Cluster.here(), runner="python",
        budget=Budget(memory=budget), on_progress=lambda _: None,
    )  # fmt: skip
    said = largest(request, Maximize.SEQUENCE)[1].largest
    assert said.startswith(f"largest sequence that fits without splitting: {answer} (now 48)")
    assert (f"{answer + 1} is not possible: no row" in said) == (answer == possible)
    assert len(tried) == len(set(tried)) <= 14, tried


def test_if_no_batch_fits_the_least_memory_is_reported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def capture_and_price(request: PlanRequest) -> Any:
        size = request.batch.shape[0]
        if size < 2:
            raise CaptureRefused("one sample has no variance", expected="more", remedy="more")
        search = SimpleNamespace(least_bytes=lambda *, enough_bytes: size << 20)
        return SimpleNamespace(base=SimpleNamespace(graph=NOTHING), search=search)

    monkeypatch.setattr(PlanRequest, "capture_and_price", capture_and_price)
    request = PlanRequest(
        model=nn.Linear(1, 1), loss=lambda *_: torch.zeros(()), optimizer=None, title="",
        batch=torch.zeros(8, 3), cluster=Cluster.here(), runner="python",
        budget=Budget(memory="1 MiB"), on_progress=lambda _: None,
    )  # fmt: skip
    with pytest.raises(Infeasible, match="not even a batch of 4 fits") as refusal:
        largest(request, Maximize.BATCH)
    assert "1 is not possible: one sample has no variance" in refusal.value.happened
    assert refusal.value.expected == "at least ~4.00 MiB for 4"
    assert refusal.value.least_bytes == 4 << 20


def squares(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    out: Tensor = model(batch["x"])
    return out.square().mean()


def test_the_plan_of_the_largest_batch_trains_such_batches(costs: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(m for _ in range(4) for m in (nn.Linear(64, 64), nn.Tanh())))
    limit = 3 << 20
    with in_a_hurry(costs):
        planned = sy.plan(
            model, squares, {"x": torch.randn(16, 8, 64)}, budget=sy.Budget(memory=limit),
            maximize="batch",
        )  # fmt: skip
    shape = planned.plan.decisions.target.batch[0].shape
    assert shape[0] > 2 * 16
    step, batch = planned.apply(), {"x": torch.randn(shape)}
    for _ in range(3):
        assert torch.equal(step(batch), squares(model, batch).detach())
    measured = step.receipt().measured.memory_bytes
    assert measured is not None
    assert 0.9 * limit < measured <= limit
