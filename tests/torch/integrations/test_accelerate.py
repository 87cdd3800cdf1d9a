"""PlannedBackward trains like accelerator.backward."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from torch.utils.data import DataLoader

from steelyard.errors import BadInput
from steelyard.integrations.accelerate import PlannedBackward
from tests.harness import in_a_hurry
from tests.support.tiny_llama import (
    BUDGET,
    BUDGET_BYTES,
    assert_same_weights,
    largest_change,
    loss,
    sentences,
    tiny_llama,
)


@pytest.fixture(autouse=True)
def _in_a_hurry(costs: Path) -> Iterator[None]:
    # accelerate keeps its settings for the process.
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    with in_a_hurry(costs):
        yield
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def trained(
    *, is_planned: bool, precision: str = "no", budget: str = BUDGET, saved: Path | None = None,
    resumed: Path | None = None,
) -> tuple[Any, list[float], PlannedBackward | None]:  # fmt: skip
    accelerator = Accelerator(cpu=True, mixed_precision=precision, gradient_accumulation_steps=2)
    model = tiny_llama().train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.1, total_iters=4)
    loader = DataLoader(sentences(), batch_size=8)  # type: ignore[arg-type]
    wrapped, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
    planned = None
    if is_planned:
        planned = PlannedBackward(
            accelerator, model, loss, next(iter(loader)), optimizer=optimizer, budget=budget
        )
    seen = []
    if resumed:
        accelerator.load_state(str(resumed))
    for number, batch in enumerate(loader):
        if resumed and number < 2:
            continue
        with accelerator.accumulate(wrapped):
            if planned is None:
                value = loss(wrapped, batch)
                accelerator.backward(value)
            else:
                value = planned.backward(batch)
            seen.append(float(value.detach()))
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        if saved and number == 1:
            accelerator.save_state(str(saved))
    return model, seen, planned


@pytest.mark.slow
def test_training_and_resuming_equal_the_plain_loop(tmp_path: Path) -> None:
    plain, expected, _ = trained(is_planned=False)
    model, seen, planned = trained(is_planned=True, saved=tmp_path / "saved")
    assert seen == pytest.approx(expected, abs=1e-5)
    assert_same_weights(plain, model)
    assert largest_change(plain) > 2e-5
    assert planned is not None
    measured = planned.receipt().measured
    assert (measured.steps, measured.passes) == (2, 4)
    assert measured.memory_bytes is not None
    assert measured.memory_bytes <= BUDGET_BYTES

    again, _, _ = trained(is_planned=True, resumed=tmp_path / "saved")
    assert_same_weights(plain, again)


@pytest.mark.slow
def test_bf16_equals_the_plain_loop() -> None:
    plain, expected, _ = trained(is_planned=False, precision="bf16")
    # Micro-batches would round each to bf16. With this budget the plan needs none.
    model, seen, _ = trained(is_planned=True, precision="bf16", budget="6 MiB")
    assert seen == pytest.approx(expected, abs=1e-5)
    assert_same_weights(plain, model)


@pytest.mark.parametrize(
    ("name", "value", "happened"),
    [
        ("mixed_precision", "fp16", "mixed_precision='fp16'"),
        ("num_processes", 2, "accelerate with 2 processes"),
    ],
)
def test_what_a_plan_cannot_honour_is_refused_by_name(
    monkeypatch: pytest.MonkeyPatch, name: str, value: object, happened: str
) -> None:
    accelerator = Accelerator(cpu=True)
    monkeypatch.setattr(Accelerator, name, property(lambda _: value))  # both need more devices
    model = tiny_llama()
    optimizer = torch.optim.SGD(model.parameters())
    with pytest.raises(BadInput, match=happened):
        PlannedBackward(accelerator, model, loss, {}, optimizer=optimizer, budget=BUDGET)
