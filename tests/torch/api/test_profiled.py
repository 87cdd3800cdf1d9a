"""A user's profiler keeps its events, whatever Steelyard meters or measures in the meantime."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile, schedule

import steelyard as sy
from steelyard.api import Step, Workload, run_workload
from steelyard.api.planning import plan_workload
from steelyard.plans.budget import Budget

profiled = partial(profile, activities=[ProfilerActivity.CPU])


def square(model: nn.Module, batch: Any) -> Tensor:
    value: Tensor = model(batch).square().mean()
    return value


BATCH = torch.ones(8, 32)


@pytest.fixture
def step() -> Step:
    torch.manual_seed(0)
    sgd = partial(torch.optim.SGD, lr=1e-3)
    return sy.plan(nn.Linear(32, 32), square, BATCH, optimizer=sgd).apply()


def test_a_profiler_around_each_step_sees_every_step_alike(step: Step) -> None:
    counts = []
    for _ in range(4):
        with profiled() as seen:
            step(BATCH)
        counts.append(len(seen.events()))
    assert min(counts) > 10
    assert counts[1] == counts[2] == counts[3]
    receipt = step.receipt()
    assert receipt.measured.memory_bytes is None
    said = "no step's memory was measured: a profiler was active in 3 of them"
    assert any(note.startswith(said) for note in receipt.measured.notes)
    step(BATCH)
    receipt = step.receipt()
    assert receipt.measured.memory_bytes == pytest.approx(step.plan.predicted.peak.nbytes, rel=0.01)
    assert not any("no step's memory" in note for note in receipt.measured.notes)


@pytest.mark.parametrize("kind", ["torch.autograd.profiler", "nested in a schedule"])
def test_other_profilers_are_left_alone_too(step: Step, kind: str) -> None:
    counts = []
    plan = schedule(wait=9, warmup=1, active=1)
    outer = profiled(schedule=plan) if kind == "nested in a schedule" else None
    if outer is not None:
        outer.start()
    for _ in range(4):
        with torch.autograd.profiler.profile() as seen:
            step(BATCH)
        counts.append(len(seen.function_events or ()))
    if outer is not None:
        outer.stop()
    assert min(counts) > 10
    assert counts[1] == counts[2] == counts[3]


@pytest.mark.parametrize("wait", [0, 1, 2])
@pytest.mark.parametrize("acc_events", [False, True])
def test_a_scheduled_profiler_gets_all_of_its_cycles(
    step: Step, wait: int, acc_events: bool
) -> None:
    """A second profiler in the warm-up of a first one would end the process."""
    counts: list[int] = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that events of earlier cycles are dropped
        with profiled(
            schedule=schedule(wait=wait, warmup=1, active=2, repeat=2),
            on_trace_ready=lambda seen: counts.append(len(seen.events())),
            acc_events=acc_events,
        ) as seen:
            for _ in range(2 * (wait + 3) + 1):
                step(BATCH)
                seen.step()
    assert len(counts) == 2
    assert counts[1] == (2 if acc_events else 1) * counts[0]
    assert step.receipt().measured.memory_bytes == pytest.approx(
        step.plan.predicted.peak.nbytes, rel=0.01
    )


def test_an_inactive_profiler_has_no_effect(step: Step) -> None:
    never, over = profiled(schedule=schedule(wait=0, warmup=1, active=1)), profiled()
    with over:
        step(BATCH)
    step(BATCH)
    assert step.receipt().measured.memory_bytes is not None
    del never


def test_a_profiler_started_in_a_user_loop_gets_its_steps(step: Step) -> None:
    assert step.optimizer is not None
    counts = []
    for number in range(6):
        if number in (1, 2, 3):
            with profiled() as seen:
                step.backward(BATCH)
                step.optimizer.step()
            counts.append(len(seen.events()))
        else:
            step.backward(BATCH)
            step.optimizer.step()
        step.optimizer.zero_grad()
    assert counts[0] == counts[1] == counts[2] > 10
    assert step.receipt().measured.memory_bytes == pytest.approx(
        step.plan.predicted.peak.nbytes, rel=0.01
    )


class Profiling:
    """Batches that start a profile of the second to the fourth step."""

    def __init__(self) -> None:
        self.counts: list[int] = []

    def __iter__(self) -> Iterator[Tensor]:
        yield BATCH
        for _ in range(3):
            with profiled() as seen:
                yield BATCH
            self.counts.append(len(seen.events()))
        while True:
            yield BATCH


def test_a_run_meters_a_step_behind_the_profiled_ones() -> None:
    torch.manual_seed(0)
    batches = Profiling()
    workload = Workload(nn.Linear(32, 32), square, batches)
    planned = plan_workload(workload, budget=Budget())
    peaks = {}
    receipt = run_workload(
        planned, workload, steps=6, on_step=lambda r: peaks.update({r.step: r.peak_bytes})
    )
    assert batches.counts[0] == batches.counts[1] == batches.counts[2] > 10
    assert [number for number, nbytes in peaks.items() if nbytes] == [5]
    assert receipt.measured.memory_bytes == peaks[5]


def test_planning_measures_nothing_while_a_profiler_is_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Costs that were measured before are known and need no measurement."""
    monkeypatch.setenv("STEELYARD_CACHE", str(tmp_path / "costs.sqlite"))
    model = nn.Linear(32, 32)
    with profiled() as seen:
        torch.ones(8).add(1)
        with pytest.raises(
            sy.SteelyardError, match=r"a profiler is active, but this plan needs \d+ operators"
        ) as error:
            sy.plan(model, square, BATCH)
        torch.ones(8).add(1)
    assert sum(event.name == "aten::add" for event in seen.events()) >= 2
    assert "before the profiler is started" in str(error.value)
    before = sy.plan(model, square, BATCH)
    with profiled():
        after = sy.plan(model, square, BATCH)
    assert after.predicted.memory_bytes == before.predicted.memory_bytes


def test_a_batch_of_another_shape_is_run_while_a_profiler_is_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STEELYARD_CACHE", str(tmp_path / "costs.sqlite"))
    step = sy.plan(nn.Linear(32, 32), square, BATCH).apply()
    with profiled() as seen:
        step(BATCH)
        step(BATCH[:5])
    assert len(seen.events()) > 20
    (note,) = (n for n in step.receipt().measured.notes if n.startswith("also ran"))
    assert "of its operators were not measured" in note
