"""Modules and tensors that only the loss function uses are called by the user's own names."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from steelyard.capture.checks.loss_inputs import name_of_tensor
from steelyard.errors import CaptureRefused
from tests.support.stepping import source_of


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))


BATCH = torch.randn(4, 4)
TEACHER = net()


class Distillation:
    def __init__(self, teacher: nn.Module) -> None:
        self.teacher = teacher

    def loss(self, model: nn.Module, batch: Tensor) -> Tensor:
        with torch.no_grad():
            target = self.teacher(batch)
        return mse_loss(model(batch), target)

    __call__ = loss


def in_closure(teacher: nn.Module) -> Any:
    return lambda model, batch: mse_loss(model(batch), teacher(batch).detach())


def from_globals(model: nn.Module, batch: Tensor) -> Tensor:
    return mse_loss(model(batch), TEACHER(batch).detach())


def trained_too(teacher: nn.Module, model: nn.Module, batch: Tensor) -> Tensor:
    return mse_loss(model(batch), teacher(batch))


@pytest.mark.parametrize(
    ("loss", "path"),
    [
        (in_closure(net()), "loss.teacher.0"),
        (from_globals, "TEACHER.0"),
        (Distillation(net()), "loss.teacher.0"),
        (Distillation(net()).loss, "loss.teacher.0"),
    ],
)
def test_the_modules_of_a_teacher_are_called_as_the_user_calls_them(loss: Any, path: str) -> None:
    graph = source_of((net(), loss, BATCH)).graph(micro_batches=1)
    paths = {node.path for node in graph.nodes}
    assert {path, "0", "2"} <= paths
    assert not any("__" in each for each in paths)


@pytest.mark.parametrize(
    ("loss", "name"),
    [
        (functools.partial(trained_too, TEACHER), "argument 0 of the loss.2.weight"),
        (lambda model, batch: trained_too(TEACHER, model, batch), "TEACHER.2.weight"),
    ],
)
def test_a_teacher_that_would_be_trained_is_named_with_a_remedy(loss: Any, name: str) -> None:
    with pytest.raises(CaptureRefused) as refused:
        source_of((net(), loss, BATCH)).captured()
    assert (
        refused.value.happened == f"the loss trains {name}, which is not a parameter of the model"
    )
    assert "call a teacher under torch.no_grad()" in refused.value.remedy


def test_tensors_are_found_wherever_a_loss_function_has_them() -> None:
    class Weighed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(()))

    weight, owner = torch.ones((), requires_grad=True), Weighed()
    assert name_of_tensor(lambda *_: weight, weight) == "weight"
    assert name_of_tensor(owner, owner.weight) == "loss.weight"
    assert name_of_tensor(functools.partial(print, scale=weight), weight) == "scale"
    assert name_of_tensor(print, weight) == ""


class LookedInto(nn.Module):
    """A model like PEFT's, which looks up missing attributes in the model that it contains."""

    def __init__(self, base_model: nn.Module) -> None:
        super().__init__()
        self.base_model = base_model

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "base_model":
                raise
            return getattr(self.base_model, name)

    def forward(self, x: Tensor) -> Any:
        return self.base_model(x)


def test_modules_inside_one_with_getattr_keep_their_paths() -> None:
    model = LookedInto(LookedInto(net()))
    graph = source_of((model, lambda m, x: m(x).mean(), BATCH)).graph(micro_batches=1)
    known = {name for name, _ in model.named_modules()}
    assert {node.path for node in graph.nodes} <= known
    assert "base_model.base_model.0" in {node.path for node in graph.nodes}
