"""What cannot be captured is refused with its true reason, and a remedy that is one."""

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

from steelyard.core.errors import CaptureRefused, Mismatch
from tests.capture.stepping import SEED, captured_step, differences, live, source_of
from tests.zoo import reference

GENERATOR = torch.Generator()


@pytest.mark.parametrize("is_made_inside", [True, False])
def test_a_generator_of_its_own_is_named(is_made_inside: bool) -> None:
    def loss(model: nn.Module, batch: Any) -> Any:
        x = model(batch)
        generator = torch.Generator() if is_made_inside else GENERATOR
        return (x + torch.rand(x.shape, generator=generator)).mean()

    with pytest.raises(CaptureRefused, match="drawn from a generator of its own") as refused:
        source_of((nn.Linear(2, 2), loss, torch.randn(3, 2))).graph(micro_batches=1)
    assert "next: leave generator= out, or draw before the step" in str(refused.value)


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
def test_a_batch_of_an_unknown_kind_is_refused_with_what_would_do(batch: Any, remedy: str) -> None:
    with pytest.raises(CaptureRefused, match=r"batch.* is a \w+") as refused:
        source_of((nn.Linear(2, 2), lambda m, b: m(b.x).sum(), batch)).graph(micro_batches=1)
    assert re.search(f"next: .*{remedy}", str(refused.value))


def test_a_mistake_of_pythons_own_keeps_its_name() -> None:
    def loss(model: nn.Module, batch: Any) -> Any:
        return model(batch["x"]).sum() + batch["target"].sum()

    with pytest.raises(CaptureRefused, match=r"test_failures\.py:\d+: KeyError: 'target'"):
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
        "a random number that Python or numpy draws",
        "draw before the step",
    ),
    "a factor that Python draws": (
        lambda m, b: m(b).mean() * random.random(),
        "a random number that Python or numpy draws",
        "draw before the step",
    ),
    "a distribution": (
        # By default, but for whoever has used torch.compile in this process before.
        lambda m, b: Normal(m(b), 1.0, validate_args=True).rsample().mean(),
        "a number is read out of a tensor",
        "validate_args=False",
    ),
}


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_is_refused_at_its_line_with_what_would_do(name: str) -> None:
    loss, said, remedy = LOSSES[name]
    with pytest.raises(CaptureRefused, match=rf"cannot be captured.*: {said}") as refused:
        source_of((nn.Linear(6, 6), loss, torch.randn(4, 6))).graph(micro_batches=1)
    assert remedy in refused.value.remedy


def test_what_a_distribution_may_hide_is_a_remedy() -> None:
    def loss(model: nn.Module, batch: Any) -> Any:
        return Normal(model(batch), 1.0, validate_args=False).rsample().mean()

    model, batch = nn.Linear(6, 6), torch.randn(4, 6)
    expected = reference.eager_step(copy.deepcopy(model), loss, batch, SEED)
    actual = captured_step(live(source_of((model, loss, batch))), batch)
    assert differences(expected, actual) == []


def test_a_lazy_layer_is_to_see_a_batch_first() -> None:
    model, batch = nn.Sequential(nn.Linear(6, 6), nn.LazyLinear(2)), torch.randn(4, 6)
    source = source_of((model, lambda m, b: m(b).square().mean(), batch))
    with pytest.raises(CaptureRefused, match=r"^1\.weight has no shape yet") as refused:
        source.graph(micro_batches=1)
    assert "run the model once" in refused.value.remedy
    model(batch)
    source.graph(micro_batches=1)
