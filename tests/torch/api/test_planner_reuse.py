"""A later call of ``plan`` reuses the captured step, unless what it depends on differs."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import nn

import steelyard as sy

SCALE = 1.0
CAPTURED = "capturing the step"


def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return model(batch).square().mean() * SCALE


def made() -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4)), torch.randn(8, 16)


def messages_of(model: nn.Module, batch: torch.Tensor, **options: object) -> list[str]:
    """Plan once more, and return the messages of this call."""
    seen: list[str] = []
    options = {"optimizer": partial(torch.optim.SGD, lr=0.1)} | options
    planned = sy.plan(model, loss, batch, on_progress=seen.append, **options)
    assert planned.predicted.memory_bytes.value > 0
    return seen


def test_a_second_budget_captures_and_measures_nothing() -> None:
    model, batch = made()
    optimizer = partial(torch.optim.SGD, lr=0.1)
    bounded = sy.Budget(memory="1 GiB")
    first = sy.plan(model, loss, batch, optimizer=optimizer, budget=bounded)
    seen = messages_of(model, torch.randn(8, 16), budget=sy.Budget(memory="2 GiB"))
    assert not [what for what in seen if not what.startswith("searching")]
    second = sy.plan(model, loss, batch, optimizer=optimizer, budget=bounded)
    assert second.session is first.session
    assert second.plan.predicted == first.plan.predicted


def _in_eval_mode(model: nn.Module) -> None:
    model.eval()


def _freeze(model: nn.Module) -> None:
    model[0].weight.requires_grad_(False)


def _replace_a_layer(model: nn.Module) -> None:
    model[1] = nn.GELU()


@pytest.mark.parametrize("change", [_in_eval_mode, _freeze, _replace_a_layer])
def test_a_changed_model_is_captured_again(change: Callable[[nn.Module], None]) -> None:
    model, batch = made()
    first = sy.plan(model, loss, batch, optimizer=partial(torch.optim.SGD, lr=0.1))
    change(model)
    assert CAPTURED in messages_of(model, batch)
    del first


def test_a_changed_global_of_the_loss_is_captured_again(monkeypatch: pytest.MonkeyPatch) -> None:
    model, batch = made()
    first = sy.plan(model, loss, batch, optimizer=partial(torch.optim.SGD, lr=0.1))
    monkeypatch.setitem(globals(), "SCALE", 2.0)
    assert CAPTURED in messages_of(model, batch)
    del first


@pytest.mark.parametrize(
    "options",
    [
        {"optimizer": partial(torch.optim.SGD, lr=0.1, momentum=0.9)},
        {"optimizer": partial(torch.optim.Adam, lr=0.1)},
        {"optimizer": None},
        {"title": "another"},
    ],
)
def test_another_request_is_captured_again(options: dict[str, object]) -> None:
    model, batch = made()
    first = sy.plan(model, loss, batch, optimizer=partial(torch.optim.SGD, lr=0.1))
    assert CAPTURED in messages_of(model, batch, **options)
    del first


def test_another_shape_and_other_settings_are_captured_again() -> None:
    model, batch = made()
    first = sy.plan(model, loss, batch, optimizer=partial(torch.optim.SGD, lr=0.1))
    assert CAPTURED in messages_of(model, torch.randn(4, 16))
    threads = torch.get_num_threads()
    torch.set_num_threads(threads + 1)
    try:
        assert CAPTURED in messages_of(model, batch)
    finally:
        torch.set_num_threads(threads)
    del first


def test_a_model_is_freed_with_its_last_plan() -> None:
    model, batch = made()
    planned = sy.plan(model, loss, batch, optimizer=partial(torch.optim.SGD, lr=0.1))
    freed = weakref.ref(model)
    del model, planned
    gc.collect()
    assert freed() is None


def test_a_quick_search_neither_checks_nor_captures_micro_batches() -> None:
    torch.manual_seed(0)
    layers = [layer for _ in range(6) for layer in (nn.Linear(32, 32), nn.GELU())]
    model, batch = nn.Sequential(*layers), torch.randn(512, 32)
    optimizer = partial(torch.optim.SGD, lr=0.1)
    whole = sy.plan(model, loss, batch, optimizer=optimizer)
    most = 0.8 * whole.predicted.memory_bytes.value
    limit = sy.Budget(memory=int(most))
    seen: list[str] = []
    quick = sy.plan(
        *(model, loss, batch), optimizer=optimizer, budget=limit, effort="quick",
        on_progress=seen.append,
    )  # fmt: skip
    assert quick.predicted.memory_bytes.value <= most
    assert [t.trade for t in quick.plan.taken]
    assert any("a quick search" in note for note in quick.plan.notes)
    assert [what for what in seen if "micro-batches" in what] == []
    assert quick.session.source._splitting is None


def test_an_unknown_effort_is_refused() -> None:
    model, batch = made()
    with pytest.raises(sy.SteelyardError, match="effort") as refusal:
        sy.plan(model, loss, batch, effort="hard")
    assert "quick or normal or full" in str(refusal.value)


def _nested(x: torch.Tensor) -> torch.Tensor:
    return torch.nested.nested_tensor([*x])


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("made_batch", [torch.Tensor.to_sparse, _nested])
def test_a_batch_without_strides_is_refused_as_before(
    made_batch: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    model, batch = made()
    first = sy.plan(model, loss, batch)
    with pytest.raises(sy.SteelyardError, match=r"nested tensor|layout"):
        sy.plan(model, loss, made_batch(batch))
    del first
