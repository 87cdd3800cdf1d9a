"""The receipt of a user's own loop, for every combination of who makes and who steps the
optimizer."""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_

import steelyard as sy
from steelyard.api import Step
from steelyard.measure.operators.memory import is_profiled
from steelyard.plans.receipt import RunMeasurement
from steelyard.report.document import tree_of
from steelyard.units import format_bytes

BATCH = torch.randn(64, 128)
adamw = partial(torch.optim.AdamW, lr=1e-3)
sgd = partial(torch.optim.SGD, lr=1e-3)
STATES = 2 * 4 * (128 * 128 + 128) * 4


def square(model: nn.Module, batch: Any) -> Tensor:
    value: Tensor = model(batch).square().mean()
    return value


def planned(optimizer: Callable[..., torch.optim.Optimizer] | None = None) -> Step:
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(128, 128) for _ in range(4)])
    return sy.plan(model, square, BATCH, optimizer=optimizer).apply()


def trained(
    step: Step,
    optimizer: torch.optim.Optimizer,
    *,
    steps: int = 6,
    accumulated: int = 1,
    set_to_none: bool = True,
) -> RunMeasurement:
    for _ in range(steps):
        for _ in range(accumulated):
            step.backward(BATCH, 1 / accumulated)
        clip_grad_norm_(step.live.model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=set_to_none)
    return step.receipt().measured


def note_of(measured: RunMeasurement, start: str) -> str:
    (found,) = (note for note in measured.notes if start in note)
    return found


def test_passes_of_a_user_loop_are_counted_timed_and_measured_like_steps() -> None:
    step = planned()
    measured = trained(step, adamw(step.live.model.parameters()))
    assert (measured.steps, measured.passes) == (6, 6)
    assert measured.memory_bytes == pytest.approx(step.plan.predicted.peak.nbytes, rel=0.01)
    assert measured.first_loss is not None
    assert measured.last_loss is not None
    assert measured.first_loss > measured.last_loss
    assert measured.step_seconds == measured.computation_seconds
    assert measured.step_seconds is not None
    said = note_of(measured, "a call of step.backward")
    assert "from one step to the next" in said
    assert "in steps of AdamW" in said
    kept = note_of(measured, "without optimizer=")
    # The state also has a step counter for each of 8 parameters.
    assert kept.startswith(f"your AdamW holds {format_bytes(STATES + 8 * 4)}")
    assert tree_of(step.receipt().receipt).ran[0] == "6 steps"


def test_the_users_optimizer_state_is_measured_apart_from_the_plan() -> None:
    """The measured state equals the prediction of a plan that knows the optimizer."""
    known = sy.plan(planned().live.model, square, BATCH, optimizer=adamw)
    step = planned()
    measured = trained(step, adamw(step.live.model.parameters()))
    said = note_of(measured, "at the peak of passes and updates")
    assert f"with it, {format_bytes(known.plan.predicted.peak.nbytes)} at" in said


@pytest.mark.parametrize("whose", ["the plan's", "another"])
def test_a_plan_with_an_optimizer_is_compared_with_passes_and_updates(whose: str) -> None:
    step = planned(adamw)
    assert step.optimizer is not None
    other = adamw(step.live.model.parameters())
    measured = trained(step, step.optimizer if whose == "the plan's" else other)
    assert measured.memory_bytes == pytest.approx(step.plan.predicted.peak.nbytes, rel=0.01)
    assert measured.step_seconds is not None
    passes = note_of(measured, "a call of step.backward")
    assert "in steps of AdamW" in passes
    said = [note for note in measured.notes if note.startswith("the optimizer that stepped is")]
    if whose == "another":
        kept = format_bytes(STATES + 8 * 4)
        which = "the optimizer that stepped is a different AdamW than the plan's"
        assert said == [f"{which}; its state, {kept}, is in the memory"]
    else:
        assert said == []


def test_a_manual_update_leaves_the_step_unmeasured_with_a_note() -> None:
    step = planned(adamw)
    for _ in range(4):
        step.backward(BATCH)
        with torch.no_grad():
            for parameter in step.live.model.parameters():
                parameter.sub_(1e-3 * parameter.grad)  # type: ignore[operator]
                parameter.grad = None
    measured = step.receipt().measured
    assert (measured.steps, measured.passes) == (4, 4)
    assert (measured.memory_bytes, measured.step_seconds) == (None, None)
    said = note_of(measured, "no optimizer step was observed")
    assert said.startswith("forward and backward pass took ")


@pytest.mark.parametrize("set_to_none", [True, False])
def test_accumulated_passes_are_one_step(set_to_none: bool) -> None:
    step = planned()
    optimizer = sgd(step.live.model.parameters())
    measured = trained(step, optimizer, steps=4, accumulated=3, set_to_none=set_to_none)
    assert (measured.steps, measured.passes) == (4, 12)
    assert tree_of(step.receipt().receipt).ran[0] == "4 steps (12 calls of step.backward)"
    # The meter counts what stays from pass to pass; only a pass that begins with it can measure
    # that.
    assert measured.memory_bytes is not None
    assert measured.memory_bytes > 1.2 * step.plan.predicted.peak.nbytes
    assert note_of(measured, "gradients kept between steps add")


def test_steps_of_several_optimizers_count_as_one_update() -> None:
    step = planned()
    model: Any = step.live.model
    first, second = adamw(model[:2].parameters()), sgd(model[2:].parameters(), momentum=0.9)
    for _ in range(5):
        step.backward(BATCH)
        first.step()
        second.step()
        model.zero_grad()
    measured = step.receipt().measured
    assert measured.steps == 5
    assert "in steps of AdamW and SGD" in note_of(measured, "a call of step.backward")


def test_a_closure_that_calls_the_pass_is_no_update_with_a_peak() -> None:
    step = planned()
    optimizer = torch.optim.LBFGS(step.live.model.parameters(), max_iter=2)

    def closure() -> Tensor:
        optimizer.zero_grad()
        return step.backward(BATCH)

    for _ in range(3):
        optimizer.step(closure)
    measured = step.receipt().measured
    assert measured.passes == measured.steps >= 6
    assert measured.memory_bytes == pytest.approx(step.plan.predicted.peak.nbytes, rel=0.01)
    assert "at the peak of passes" in note_of(measured, "your LBFGS holds")
    assert "and updates" not in note_of(measured, "your LBFGS holds")


def test_an_optimizer_of_another_model_is_ignored() -> None:
    step, other = planned(), nn.Linear(8, 8)
    optimizer = adamw(other.parameters())
    for _ in range(4):
        step.backward(BATCH)
        other(torch.ones(2, 8)).sum().backward()
        optimizer.step()
        step.live.model.zero_grad()
    measured = step.receipt().measured
    assert measured.steps == 4
    assert not any("AdamW" in note for note in measured.notes)


def test_an_optimizer_whose_step_fails_leaves_no_profiler_on() -> None:
    step = planned()
    optimizer = adamw(step.live.model.parameters())
    trained(step, optimizer, steps=1)
    step.backward(BATCH)
    optimizer.param_groups[0]["lr"] = None
    with pytest.raises(TypeError):
        optimizer.step()
    step.backward(BATCH)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as seen:
        torch.ones(2).add(1)
    assert any(event.name == "aten::add" for event in seen.events())


def test_optimizer_hooks_are_removed_with_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    removed: list[bool] = []

    class Handle:
        def __init__(self, hook: Callable[..., None]) -> None:
            self.hook = hook

        def remove(self) -> None:
            removed.append(True)

    for which in ("pre", "post"):
        name = f"steelyard.api.user_loop.register_optimizer_step_{which}_hook"
        monkeypatch.setattr(name, Handle)
    step = planned()
    step.backward(BATCH)
    gone = weakref.ref(step)
    assert removed == []
    del step
    gc.collect()
    assert gone() is None
    assert removed == [True, True]


def test_a_batch_of_another_shape_is_not_metered_against_the_plan() -> None:
    step = planned()
    optimizer = sgd(step.live.model.parameters())
    for rows in (64, 32, 32):
        step.backward(BATCH[:rows])
        optimizer.step()
        optimizer.zero_grad()
    measured = step.receipt().measured
    assert measured.memory_bytes is None
    assert note_of(measured, "no step's memory was measured: 2 had another batch shape")
    step.backward(BATCH)
    peak = step.plan.predicted.peak.nbytes
    assert step.receipt().measured.memory_bytes == pytest.approx(peak, rel=0.01)


def test_whole_steps_and_passes_are_counted_together() -> None:
    step = planned(sgd)
    assert step.optimizer is not None
    for _ in range(3):
        step(BATCH)
    trained(step, step.optimizer, steps=2)
    measured = step.receipt().measured
    assert (measured.steps, measured.passes) == (5, 2)


def test_the_receipt_is_a_page_in_a_notebook() -> None:
    step = planned()
    trained(step, sgd(step.live.model.parameters()), steps=3)
    page = step.receipt()._repr_html_()
    assert page.startswith("<!doctype html>")
    assert "Receipt" in page
    assert "3 steps" in page


def test_an_optimizer_step_that_raises_leaves_no_profiler_on() -> None:
    model, batch = nn.Linear(16, 16), torch.randn(8, 16)
    step = sy.plan(model, square, batch).apply()
    own = torch.optim.SGD(model.parameters(), lr=1e-2)
    was_on = []

    def interrupted(*_: Any) -> None:
        was_on.append(is_profiled())
        if was_on[-1]:
            raise KeyboardInterrupt

    own.register_step_pre_hook(interrupted)
    for _ in range(5):
        step.backward(batch)
        with contextlib.suppress(KeyboardInterrupt):
            own.step()
            own.zero_grad()
        assert not is_profiled()
    assert any(was_on)
