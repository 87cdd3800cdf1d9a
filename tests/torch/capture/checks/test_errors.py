"""What cannot be captured is refused with its true reason, and a remedy that works."""

from __future__ import annotations

import copy
import random
import re
from collections import UserDict
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.attention.flex_attention import flex_attention
from torch.utils.checkpoint import checkpoint

from steelyard.capture.checks.errors import shortened
from steelyard.errors import CaptureRefused, Mismatch
from tests.support.stepping import SEED, captured_step, differences, live, source_of
from tests.support.torch_since import torch_since
from tests.zoo import reference

GENERATOR = torch.Generator()


@pytest.mark.parametrize("is_made_inside", [True, False])
def test_a_custom_generator_is_named(is_made_inside: bool) -> None:
    def loss(model: nn.Module, batch: Any) -> Any:
        x = model(batch)
        generator = torch.Generator() if is_made_inside else GENERATOR
        return (x + torch.rand(x.shape, generator=generator)).mean()

    with pytest.raises(CaptureRefused, match="drawn from a separate generator") as refused:
        source_of((nn.Linear(2, 2), loss, torch.randn(3, 2))).graph(micro_batches=1)
    assert "next: remove generator=, or draw before the step" in str(refused.value)


@dataclass
class Pair:
    x: torch.Tensor


@pytest.mark.parametrize(
    ("batch", "remedy"),
    [
        (Pair(torch.ones(3, 2)), r"register_dataclass\(Pair\), once"),
        (UserDict(x=torch.ones(3, 2)), r"dict\(batch\)"),
        ({"x": {1, 2}}, "torch.as_tensor"),
    ],
)
def test_a_batch_of_an_unknown_type_is_refused_with_a_remedy(batch: Any, remedy: str) -> None:
    with pytest.raises(CaptureRefused, match=r"batch.* is a \w+") as refused:
        source_of((nn.Linear(2, 2), lambda m, b: m(b.x).sum(), batch)).graph(micro_batches=1)
    assert re.search(f"next: .*{remedy}", str(refused.value))


def test_a_python_error_keeps_its_name() -> None:
    def loss(model: nn.Module, batch: Any) -> Any:
        return model(batch["x"]).sum() + batch["target"].sum()

    with pytest.raises(CaptureRefused, match=r"test_errors\.py:\d+: KeyError: 'target'"):
        source_of((nn.Linear(2, 2), loss, {"x": torch.ones(3, 2)})).graph(micro_batches=1)


def nested(layout: torch.layout) -> torch.Tensor:
    rows = [torch.randn(2, 6), torch.randn(3, 6)]
    return torch.nested.nested_tensor(rows, layout=layout)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested", "ignore:Sparse CSR tensor support")
@pytest.mark.parametrize(
    ("made", "said", "remedy"),
    [
        (lambda: nested(torch.strided), "a nested tensor", "to_padded_tensor"),
        (lambda: nested(torch.jagged), "a nested tensor", "to_padded_tensor"),
        (lambda: torch.randn(4, 6).to_sparse(), r"of layout torch\.sparse_coo", "to_dense"),
        (lambda: torch.randn(4, 6).to_sparse_csr(), r"of layout torch\.sparse_csr", "to_dense"),
    ],
)
def test_a_batch_that_is_not_dense_is_refused_now_and_later(
    made: Any, said: str, remedy: str
) -> None:
    def loss(model: nn.Module, batch: Any) -> Any:
        return model(batch["x"]).square().mean()

    model, batch = nn.Linear(6, 6), {"x": made()}
    with pytest.raises(CaptureRefused, match=rf"^batch\['x'\] is {said}") as refused:
        source_of((model, loss, batch)).graph(micro_batches=1)
    assert remedy in refused.value.remedy
    step = live(source_of((model, loss, {"x": torch.randn(4, 6)})))
    with pytest.raises(Mismatch, match=rf"^batch:\['x'\] is {said}") as later:
        step.backward(batch)
    assert remedy in later.value.remedy


def hooked() -> nn.Module:
    criterion = nn.MSELoss()
    criterion.register_full_backward_hook(lambda module, into, out: None)
    return criterion


CRITERION = hooked()
Normal = torch.distributions.Normal
LOSSES: dict[str, tuple[Any, str, str]] = {
    "a criterion with a hook": (
        lambda m, b: CRITERION(m(b), b),
        "a module that the loss calls has a backward hook",
        "remove it",
    ),
    "a shape that Python draws": (
        lambda m, b: m(b)[:, random.randint(0, 3) :].mean(),
        "a random number drawn by Python or numpy",
        "draw before the step",
    ),
    "a factor that Python draws": (
        lambda m, b: m(b).mean() * random.random(),
        "a random number drawn by Python or numpy",
        "draw before the step",
    ),
    "a distribution": (
        # This is torch's default, unless torch.compile was used in this process before.
        lambda m, b: Normal(m(b), 1.0, validate_args=True).rsample().mean(),
        "a number is read from a tensor",
        "validate_args=False",
    ),
}


@pytest.mark.parametrize("name", LOSSES)
def test_an_unsupported_loss_is_refused_at_its_line_with_a_remedy(name: str) -> None:
    loss, said, remedy = LOSSES[name]
    with pytest.raises(CaptureRefused, match=rf"cannot be captured.*: {said}") as refused:
        source_of((nn.Linear(6, 6), loss, torch.randn(4, 6))).graph(micro_batches=1)
    assert remedy in refused.value.remedy


def test_a_distribution_without_argument_validation_trains_as_in_plain_pytorch() -> None:
    def loss(model: nn.Module, batch: Any) -> Any:
        return Normal(model(batch), 1.0, validate_args=False).rsample().mean()

    model, batch = nn.Linear(6, 6), torch.randn(4, 6)
    expected = reference.eager_step(copy.deepcopy(model), loss, batch, SEED)
    actual = captured_step(live(source_of((model, loss, batch))), batch)
    assert differences(expected, actual) == []


def test_an_uninitialized_lazy_layer_is_refused() -> None:
    model, batch = nn.Sequential(nn.Linear(6, 6), nn.LazyLinear(2)), torch.randn(4, 6)
    source = source_of((model, lambda m, b: m(b).square().mean(), batch))
    with pytest.raises(CaptureRefused, match=r"^1\.weight has no shape yet") as refused:
        source.graph(micro_batches=1)
    assert "run the model once" in refused.value.remedy
    model(batch)
    source.graph(micro_batches=1)


# --- messages of refusals -------------------------------------------------------------------------


def gradient_penalty(model: nn.Module, batch: Any) -> Any:
    x = batch.detach().requires_grad_()
    (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    return model(batch).mean() + (slope.norm(dim=1) - 1).square().mean()


def penalty_of_parameters(model: nn.Module, batch: Any) -> Any:
    value = model(batch).square().mean()
    slopes = torch.autograd.grad(value, [*model.parameters()], create_graph=True)
    return value + sum(slope.square().sum() for slope in slopes)


def flex_attention_loss(model: nn.Module, batch: Any) -> Any:
    x = model(batch)[None, None]
    return flex_attention(x, x, x).square().mean()


def of_inference(model: nn.Module, batch: Any) -> Any:
    with torch.inference_mode():
        target = batch.sum(1, keepdim=True)
    return nn.functional.mse_loss(model(batch)[:, :1] * target, target)


TEACHER = nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16))


def of_a_teacher_in_training_mode(model: nn.Module, batch: Any) -> Any:
    with torch.no_grad():
        target = TEACHER(batch)
    return nn.functional.mse_loss(model(batch), target)


@pytest.mark.parametrize(
    ("loss", "said", "remedy"),
    [
        pytest.param(
            *(
                gradient_penalty,
                "takes a gradient itself, as a gradient penalty does",
                "remove the pen",
            ),
            marks=torch_since((2, 12), "before torch 2.12 its requires_grad_() is refused first"),
        ),
        (penalty_of_parameters, "takes a gradient itself", "plain PyTorch"),
        (flex_attention_loss, "FlexAttention has no backward pass on a CPU", "sdpa"),
        (of_inference, "made under torch.inference_mode", r"no_grad\(\) instead of"),
        (of_a_teacher_in_training_mode, "writes into its own buffers", r"\.eval\(\)"),
    ],
)
def test_torch_errors_are_explained_in_our_words(loss: Any, said: str, remedy: str) -> None:
    with pytest.raises(CaptureRefused, match=said) as refused:
        source_of((nn.Linear(16, 16), loss, torch.randn(16, 16))).captured()
    assert re.search(remedy, refused.value.remedy)
    assert "depend on tensor values" not in refused.value.expected
    assert "torch._dynamo" not in str(refused.value)


def test_a_torch_error_is_never_truncated_within_a_word() -> None:
    text = "alpha bravo charlie " * 40
    short = shortened(text)
    assert len(short) <= 200
    assert short.endswith(" ...")
    assert set(short.split()) == {"alpha", "bravo", "charlie", "..."}


# --- enable_input_require_grads(), which LoRA with checkpointing needs ----------------------------


class Adapted(nn.Module):
    """A frozen layer with a trained low-rank adapter."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.base = nn.Linear(width, width).requires_grad_(False)
        self.down, self.up = nn.Linear(width, 2, bias=False), nn.Linear(2, width, bias=False)

    def forward(self, x: Any) -> Any:
        return (self.base(x) + self.up(self.down(x))).tanh()


class FrozenWithAdapters(nn.Module):
    def __init__(self, *, use_reentrant: bool) -> None:
        super().__init__()
        self.words = nn.Embedding(16, 8).requires_grad_(False)
        self.blocks = nn.ModuleList(Adapted() for _ in range(3))
        self.use_reentrant = use_reentrant
        # transformers' and PEFT's enable_input_require_grads() registers this hook.
        self.words.register_forward_hook(lambda module, given, made: made.requires_grad_(True))

    def forward(self, ids: Any) -> Any:
        x = self.words(ids)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.use_reentrant)
        return x


@torch_since((2, 12), "Dynamo traces requires_grad_() of intermediate tensors since torch 2.12")
@pytest.mark.parametrize("use_reentrant", [True, False])
def test_an_embedding_that_requires_grad_trains_as_in_plain_pytorch(use_reentrant: bool) -> None:
    torch.manual_seed(0)
    model = FrozenWithAdapters(use_reentrant=use_reentrant)
    twin = copy.deepcopy(model)
    ids = torch.randint(16, (4, 5))

    def loss(model: nn.Module, batch: Any) -> Any:
        return model(batch).square().mean()

    step = live(source_of((model, loss, ids)))
    value = step.backward(ids)
    expected = loss(twin, ids)
    expected.backward()
    assert torch.equal(value, expected)
    assert reference.gradients(twin)
    reference.assert_same(reference.gradients(twin), reference.gradients(model))
