"""A finished plan is read with its stored predictions; invalid ones are predicted again."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import steelyard as sy
from steelyard.planner import session as session_module
from tests.harness import in_a_hurry

ADAM = partial(torch.optim.AdamW, lr=1e-3)
pytestmark = pytest.mark.xdist_group("stored")


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    out: Tensor = model(batch)
    return out.square().mean()


def made() -> tuple[nn.Module, Any, Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 64))
    return model, loss, torch.randn(64, 64)


@pytest.fixture(scope="module", autouse=True)
def _in_a_hurry(costs: Path) -> Iterator[None]:
    with in_a_hurry(costs):
        yield


@pytest.fixture(scope="module")
def planned() -> sy.Planned:
    return sy.plan(*made(), optimizer=ADAM, budget=sy.Budget(memory="1 MiB"))


@pytest.fixture
def path(planned: sy.Planned, tmp_path: Path) -> Path:
    planned.save(found := tmp_path / "train.plan.toml")
    return found


@pytest.fixture
def told() -> list[str]:
    return []


@pytest.fixture
def unmeasured(monkeypatch: pytest.MonkeyPatch) -> None:
    def measured(*args: Any, **how: Any) -> Any:
        raise AssertionError("something is measured to start a finished plan")

    monkeypatch.setattr(session_module, "CostProvider", measured)


@pytest.mark.usefixtures("unmeasured")
def test_a_finished_plan_starts_and_trains_with_nothing_measured(
    planned: sy.Planned, path: Path
) -> None:
    again = sy.load(path, *made(), optimizer=ADAM)
    assert again.plan.decisions == planned.plan.decisions
    assert again.plan.predicted.metrics == planned.plan.predicted.metrics
    assert again.plan.before.metrics == planned.plan.before.metrics
    assert again.plan.unplanned.peak == planned.plan.unplanned.peak
    model, _, batch = made()
    step = again.apply(model)
    first, *_, last = [float(step(batch)) for _ in range(4)]
    assert last < first
    measured = step.receipt().measured.memory_bytes
    assert measured is not None
    assert measured <= 1 << 20


@pytest.mark.usefixtures("unmeasured")
def test_another_learning_rate_needs_the_same_memory_and_time(path: Path) -> None:
    sy.load(path, *made(), optimizer=partial(torch.optim.AdamW, lr=3e-4))


def test_later_questions_are_measured_when_asked(planned: sy.Planned, path: Path) -> None:
    again = sy.load(path, *made(), optimizer=ADAM)
    assert again.simulated()
    assert again.what_if(memory="1 MiB").plan.decisions.rules == planned.plan.decisions.rules


def test_missing_predictions_are_made_again(path: Path, told: list[str]) -> None:
    path.with_suffix(".json").unlink()
    again = sy.load(path, *made(), optimizer=ADAM, on_progress=told.append)
    assert "predicting again: the plan file has no predictions file beside it" in told
    assert again.plan.predicted.peak.nbytes > 0


def test_damaged_predictions_are_made_again(path: Path, told: list[str]) -> None:
    path.with_suffix(".json").write_text("{}")
    sy.load(path, *made(), optimizer=ADAM, on_progress=told.append)
    assert any("cannot be used" in said for said in told)


def test_predictions_below_the_programs_memory_are_made_again(
    planned: sy.Planned, path: Path, told: list[str]
) -> None:
    peak = planned.plan.predicted.peak.nbytes
    beside = path.with_suffix(".json")
    text = beside.read_text()
    beside.write_text(text.replace(f'"nbytes":{peak},', f'"nbytes":{peak // 2},'))
    assert beside.read_text() != text
    again = sy.load(path, *made(), optimizer=ADAM, on_progress=told.append)
    assert any(said.startswith("predicting again") for said in told)
    assert again.plan.predicted.peak.nbytes == peak


def test_another_optimizer_is_predicted_again(path: Path, told: list[str]) -> None:
    sgd = partial(torch.optim.SGD, lr=0.1)
    again = sy.load(path, *made(), optimizer=sgd, on_progress=told.append)
    assert any("another step, machine or optimizer" in said for said in told)
    fresh = sy.load(path, *made(), optimizer=sgd, predict_anew=True)
    assert again.plan.predicted.peak == fresh.plan.predicted.peak


def test_an_edited_plan_is_predicted_again(path: Path, told: list[str]) -> None:
    path.write_text(path.read_text().replace('memory = "1 MiB"', 'memory = "2 MiB"'))
    sy.load(path, *made(), optimizer=ADAM, on_progress=told.append)
    assert "predicting again: the plan was edited after it was predicted" in told
