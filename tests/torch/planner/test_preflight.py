"""Requests that are refused before the step is captured, or before anything is measured."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import steelyard as sy
from steelyard.capture.step import CapturedStep
from steelyard.errors import BadInput, Infeasible
from steelyard.ir.program import Program
from steelyard.planner import calibration
from steelyard.planner import session as session_module
from steelyard.planner.preflight import floor_of
from steelyard.search import Floor, StepSearch
from tests import zoo
from tests.support.torch_since import torch_since

ADAM = partial(torch.optim.AdamW, lr=1e-3)

_HELD_APPLY = torch_since(
    (2, 12), "Dynamo traces an apply of autograd.Function that a module holds since torch 2.12"
)


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    out: Tensor = model(batch)
    return out.square().mean()


def made() -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 64)), torch.randn(8, 64)


def never(what: str) -> Callable[..., Any]:
    def fail(*args: Any, **how: Any) -> Any:
        raise AssertionError(f"{what}, for a budget that nothing fits")

    return fail


@pytest.mark.parametrize("memory", ["40", "1 KiB", "128 KiB"])
def test_a_budget_below_the_weights_is_refused_before_the_capture(
    memory: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CapturedStep, "graph", never("captured"))
    with pytest.raises(Infeasible, match="memory that is resident for the whole step") as refused:
        sy.plan(*_asked(), optimizer=ADAM, budget=sy.Budget(memory=memory))
    assert "parameters 129 KiB, the batch 2.00 KiB" in refused.value.expected


def test_a_budget_below_the_optimizer_state_is_refused_before_anything_is_measured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(session_module, "CostProvider", never("measured"))
    with pytest.raises(Infeasible, match="memory that is resident for the whole step") as refused:
        sy.plan(*_asked(), optimizer=ADAM, budget=sy.Budget(memory="400 KiB"))
    assert "gradients 129 KiB, optimizer state 259 KiB" in refused.value.expected


def test_another_budget_for_the_same_step_is_refused_without_a_search(
    monkeypatch: pytest.MonkeyPatch, costs: Path
) -> None:
    monkeypatch.setenv("STEELYARD_CACHE", str(costs))
    monkeypatch.setattr(calibration, "_CALIBRATION_SECONDS", 1.0)
    planned = sy.plan(*_asked(), optimizer=ADAM)
    monkeypatch.setattr(StepSearch, "find", never("searched"))
    with pytest.raises(Infeasible, match="memory that is resident for the whole step"):
        planned.what_if(memory="400 KiB")


def _asked() -> tuple[nn.Module, Any, Tensor]:
    model, batch = made()
    return model, loss, batch


@pytest.mark.filterwarnings("ignore:LSTM with projections")
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(case.name, marks=_HELD_APPLY if case.name == "edge_autograd_function" else ())
        for case in zoo.OWN + zoo.EDGE[::5]
    ],
)
def test_the_preflight_floor_is_at_most_the_captured_one(name: str) -> None:
    model, their_loss, batch = zoo.case(name).make()
    graph = CapturedStep(model=model, loss=their_loss, batch=batch).graph(micro_batches=1)
    before, after = floor_of(model, batch), Floor.of(Program.plain(graph))
    assert before.parameter_bytes <= after.parameter_bytes
    assert before.buffer_bytes <= after.buffer_bytes
    assert before.batch_bytes <= after.batch_bytes


def test_tensors_that_share_memory_count_once() -> None:
    tied = nn.Linear(64, 64, bias=False)
    other = nn.Linear(64, 64, bias=False)
    other.weight = tied.weight
    wide = torch.zeros(1, 64).expand(1000, 64)
    found = floor_of(nn.ModuleList([tied, other]), {"x": wide, "same": wide, "n": 3})
    assert found.parameter_bytes == 64 * 64 * 4
    assert found.batch_bytes == 64 * 4


def test_offload_memory_larger_than_its_disk_is_refused_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CapturedStep, "graph", never("captured"))
    offload_memory = sy.OffloadMemory(tmp_path, rate="500 MB/s", size="999 TiB")
    with pytest.raises(
        BadInput, match=r"offload memory of 999 TiB was requested in .*, but its disk has .* free"
    ):
        sy.plan(*_asked(), cluster=sy.Cluster.here(offload_memory=offload_memory))
