"""What cannot be captured is refused with its true reason, and a remedy that is one."""

from __future__ import annotations

import re
from collections import UserDict
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

from steelyard.core.errors import CaptureRefused, Mismatch
from tests.capture.stepping import live, source_of

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
