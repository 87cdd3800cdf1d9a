"""A planned step in a loop of plain PyTorch, with everything such a loop has, and with PEFT."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn

import steelyard as sy
from tests.harness import in_a_hurry
from tests.support.tiny_llama import (
    BUDGET,
    BUDGET_BYTES,
    assert_same_weights,
    loss,
    sentences,
    tiny_llama,
)
from tests.support.torch_since import torch_since


@pytest.fixture(autouse=True)
def _in_a_hurry(costs: Path) -> Iterator[None]:
    with in_a_hurry(costs):
        yield


def batches() -> list[dict[str, torch.Tensor]]:
    data = sentences(16)
    return [{k: torch.stack([x[k] for x in data[i : i + 8]]) for k in data[0]} for i in (0, 8)]


def adamw(parameters: Any) -> torch.optim.AdamW:
    return torch.optim.AdamW([p for p in parameters if p.requires_grad], lr=1e-4)


def trained(model: nn.Module, backward: Callable[[Any], torch.Tensor]) -> dict[str, Any]:
    """Train with warm-up, clipping, an average of the weights, and an evaluation in between."""
    optimizer = adamw(model.parameters())
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.1, total_iters=4)
    average = torch.optim.swa_utils.AveragedModel(
        model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9)
    )
    first, second = batches()
    seen, saved = [], None
    for number, batch in enumerate((first, second) * 3):
        optimizer.zero_grad()
        seen.append(float(backward(batch)))
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        schedule.step()
        average.update_parameters(model)
        if number % 2:
            model.eval()
            with torch.no_grad():
                seen.append(float(loss(model, first)))
            model.train()
        if number == 3:
            saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
        if number == 4:  # back to the state that was saved
            assert saved is not None
            model.load_state_dict(saved[0])
            optimizer.load_state_dict(saved[1])
    return {"seen": seen, "average": average.module}


def plainly(model: nn.Module) -> dict[str, Any]:
    def backward(batch: Any) -> torch.Tensor:
        value = loss(model, batch)
        value.backward()
        return value.detach()

    return trained(model, backward)


@pytest.mark.slow
def test_scheduler_clipping_average_evaluation_and_state_dicts_are_the_users() -> None:
    plain, model = tiny_llama(), tiny_llama()
    expected = plainly(plain)
    plan = sy.plan(model, loss, batches()[0], optimizer=adamw, budget=sy.Budget(memory=BUDGET))
    step = plan.apply(model)
    found = trained(model, step.backward)
    assert found["seen"] == pytest.approx(expected["seen"], abs=1e-5)
    assert_same_weights(plain, model)
    assert_same_weights(expected["average"], found["average"])
    measured = step.receipt().measured
    assert measured.memory_bytes is not None
    assert measured.memory_bytes <= BUDGET_BYTES


def with_adapters() -> Any:
    config = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], lora_dropout=0.0)
    model = get_peft_model(tiny_llama(), config)
    # For reentrant checkpoints; harmless without.
    model.enable_input_require_grads()
    return model.train()


# peft 0.21 asks transformers 5 by its old name.
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
@torch_since((2, 12), "Dynamo traces requires_grad_() of intermediate tensors since torch 2.12")
@pytest.mark.slow
def test_adapters_of_peft_train_as_in_plain_pytorch(tmp_path: Path) -> None:
    plain, model = with_adapters(), with_adapters()
    expected = plainly(plain)
    plan = sy.plan(model, loss, batches()[0], optimizer=adamw, budget=sy.Budget(memory="1800 KiB"))
    step = plan.apply(model)
    found = trained(model, step.backward)
    assert found["seen"] == pytest.approx(expected["seen"], abs=1e-5)
    assert_same_weights(plain, model)
    measured = step.receipt().measured
    assert measured.memory_bytes is not None
    assert measured.memory_bytes <= 1800 * 1024

    model.save_pretrained(tmp_path)
    again = with_adapters()
    again.load_adapter(tmp_path, "default")
    assert_same_weights(model, again)
