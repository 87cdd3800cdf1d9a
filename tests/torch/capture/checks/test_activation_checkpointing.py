"""``torch.utils.checkpoint`` in the user's model gives eager PyTorch's results, or is refused."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import LlamaConfig, LlamaForCausalLM

from steelyard.errors import CaptureRefused
from tests.support.stepping import SEED, captured_step, differences, live, source_of
from tests.support.torch_since import torch_since
from tests.zoo import reference

pytestmark = pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")


class Wrapped(nn.Module):
    """A model of two parts, the first of which is checkpointed."""

    def __init__(self, inner: nn.Module, **settings: Any) -> None:
        super().__init__()
        self.before, self.inner, self.after = nn.Linear(6, 6), inner, nn.Linear(6, 6)
        self.settings = settings
        self.passes_on = True

    def forward(self, x: Tensor) -> Tensor:
        x = self.before(x) if self.passes_on else x
        value: Tensor = self.after(checkpoint(self.inner, x, **self.settings))
        return value


def square(model: nn.Module, batch: Any) -> Any:
    return model(batch).square().mean()


def refusal(model: nn.Module, batch: Any, loss: Any = square) -> str:
    with pytest.raises(CaptureRefused) as refused:
        source_of((model, loss, batch)).graph(micro_batches=1)
    return str(refused.value)


def assert_as_eager(model: nn.Module, loss: Callable[..., Any], batch: Any) -> None:
    expected = reference.eager_step(copy.deepcopy(model), loss, batch, SEED)
    actual = captured_step(live(source_of((model, loss, batch))), batch)
    assert differences(expected, actual) == []


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable` is deprecated")
@pytest.mark.parametrize("use_reentrant", [True, False])
def test_transformers_own_checkpointing_trains_as_in_eager_pytorch(use_reentrant: bool) -> None:
    config = LlamaConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        attention_dropout=0.1,
        bos_token_id=None,
        eos_token_id=None,
    )
    model = LlamaForCausalLM(config)
    settings = {"use_reentrant": use_reentrant}
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=settings)
    model.train()
    ids = torch.randint(32, (2, 5))
    assert_as_eager(model, lambda m, b: m(**b).loss, {"input_ids": ids, "labels": ids})


class Counted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls.add_(1)
        return x.tanh() * self.calls


@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize(
    ("inner", "buffer"), [(nn.BatchNorm1d(6), "running_mean|num_batches"), (Counted(), "calls")]
)
def test_a_checkpointed_module_that_writes_a_buffer_is_refused(
    inner: nn.Module, buffer: str, use_reentrant: bool
) -> None:
    said = refusal(Wrapped(inner, use_reentrant=use_reentrant), torch.randn(4, 6))
    first, _, last = said.splitlines()
    assert any(f"buffer inner.{name}" in first for name in buffer.split("|"))
    assert "test_activation_checkpointing.py:" in first
    assert "remove the checkpoint" in last


def test_a_buffer_read_in_a_checkpoint_and_written_later_is_refused() -> None:
    model = Wrapped(nn.Tanh(), use_reentrant=False)
    counted = Counted()
    model.inner, model.after = nn.Sequential(nn.Linear(6, 6), _Plus(counted)), counted
    assert "buffer after.calls" in refusal(model, torch.randn(4, 6))


class _Plus(nn.Module):
    def __init__(self, counted: Counted) -> None:
        super().__init__()
        self.__dict__["counted"] = counted

    def forward(self, x: Tensor) -> Tensor:
        return (x + self.counted.calls).tanh()


def test_batchnorm_that_writes_nothing_may_be_checkpointed() -> None:
    model = Wrapped(nn.BatchNorm1d(6), use_reentrant=False)
    model.inner.eval()
    assert_as_eager(model, square, torch.randn(4, 6))


def test_a_reentrant_checkpoint_without_trained_parameters_is_refused() -> None:
    model = Wrapped(nn.Linear(6, 6), use_reentrant=True)
    assert_as_eager(model, square, torch.randn(4, 6))
    model.passes_on = False
    said = refusal(model, torch.randn(4, 6))
    assert "test_activation_checkpointing.py:" in said.splitlines()[0]
    assert "next: pass use_reentrant=False" in said


@torch_since((2, 12), "torch 2.11 marks checkpoints without gradients as recomputed, too")
def test_without_gradients_there_is_nothing_to_refuse() -> None:
    model = Wrapped(nn.BatchNorm1d(6), use_reentrant=True)

    def loss(model: Any, batch: Any) -> Any:
        with torch.no_grad():
            target = checkpoint(model.inner, batch, use_reentrant=True)
        return (model.after(batch) - target).square().mean()

    assert_as_eager(model, loss, torch.randn(4, 6))


def test_a_random_state_that_is_not_kept_is_refused_where_something_draws() -> None:
    settings = {"use_reentrant": False, "preserve_rng_state": False}
    assert_as_eager(Wrapped(nn.Linear(6, 6), **settings), square, torch.randn(4, 6))
    assert "preserve_rng_state" in refusal(Wrapped(nn.Dropout(), **settings), torch.randn(4, 6))
