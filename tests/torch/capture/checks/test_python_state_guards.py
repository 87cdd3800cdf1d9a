"""The step includes the outside state that its code has read; a change of this state is refused."""

from __future__ import annotations

import copy
import functools
import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from steelyard.capture.checks.python_state_guards import StateGuards
from steelyard.capture.step import CapturedStep
from steelyard.errors import CaptureRefused, Mismatch
from tests.support import schedule

RATE = 1.0
LEVELS = {"a": {"b": {"c": 1.0}}, "unread": 1.0}
TABLE: dict[str, Any] = {"rate": 1.0, "unread": 1.0, "twice": lambda x: x * 2}
TERMS = [1.0, 2.0]
WEIGHTS = [torch.ones(2)]
SHIFT = torch.zeros(2)
CRITERION = nn.CrossEntropyLoss(weight=torch.ones(2), label_smoothing=0.1)
TEACHER = nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.0)).requires_grad_(False)
BY_PAIR = {(1, 2): torch.ones(2)}
BETA, BETAS = np.float64(1.0), np.ones(2)
SEEN = SimpleNamespace(steps=0)


class Annealed:
    """A schedule with a method, a call and a property."""

    def __init__(self) -> None:
        self.rate = self.gain = self.bias = 1.0

    def __call__(self) -> float:
        return self.gain

    def beta(self) -> float:
        return self.rate * 2

    @property
    def offset(self) -> float:
        return self.bias + 1


ANNEALED = Annealed()


class Layered(nn.Module):
    """A model that reads a global, a dict, an object in an object and a list, and gets more than
    it reads."""

    def __init__(self) -> None:
        super().__init__()
        self.table = {"gain": 1.0, "unread": 1.0}
        self.config = SimpleNamespace(inner=SimpleNamespace(gain=1.0), unread=1.0)
        self.gains = [1.0]
        self.layer = nn.Linear(2, 2)
        self.drop = nn.Dropout(0.1)
        self.steps = 0

    def forward(self, x: Tensor) -> Tensor:
        gain = self.table["gain"] * self.config.inner.gain * self.gains[0]
        result: Tensor = self.drop(self.layer(x)) * gain
        return result


class Derived(Layered):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + 1


class Classed:
    scale = torch.ones(2)


class Trainer:
    """A trainer whose method is the loss; it counts steps, which the loss does not read."""

    def __init__(self) -> None:
        self.global_step = 0
        self.rate = 1.0
        self.settings = {"k": 1.0}

    def loss(self, model: nn.Module, x: Tensor, defaults: Any = LEVELS) -> Tensor:
        y = model(x)
        total = y.sum() * RATE * ANNEALED.beta() * ANNEALED() * ANNEALED.offset
        total = total + TABLE["twice"](y).mean() * TABLE.get("warm", 1.0) * self.settings["k"]
        total = total + y.mean() * sum(TERMS) * defaults["a"]["b"]["c"] * self.rate
        total = total + (y * WEIGHTS[0] + SHIFT).mean() + schedule.weighed(y).mean()
        total = total + (TEACHER(x) * BY_PAIR[1, 2] * Classed.scale).mean()
        total = total + y.mean() * BETA + (y * torch.as_tensor(BETAS)).mean()
        labels = torch.zeros(x.shape[0], dtype=torch.long)
        result: Tensor = total + CRITERION(y, labels)
        return result


def captured(trainer: Trainer, model: nn.Module) -> StateGuards:
    step = CapturedStep(model=model, loss=trainer.loss, batch=torch.ones(3, 2))
    return step.captured().reads


Change = Callable[[pytest.MonkeyPatch, Trainer, Any], object]

READ: dict[str, tuple[Change, str]] = {
    "global": (
        lambda p, t, m: p.setitem(globals(), "RATE", 2.0),
        r"RATE, which the step reads \(.*test_python_state_guards\.py:\d+\), is no longer 1\.0",
    ),
    "method": (lambda p, t, m: p.setattr(ANNEALED, "rate", 2.0), r"ANNEALED\.rate, which"),
    "call": (lambda p, t, m: p.setattr(ANNEALED, "gain", 2.0), r"ANNEALED\.gain, which"),
    "property": (lambda p, t, m: p.setattr(ANNEALED, "bias", 2.0), r"ANNEALED\.bias, which"),
    "function in a dict": (lambda p, t, m: p.setitem(TABLE, "twice", torch.sin), "TABLE"),
    "key that was not there": (lambda p, t, m: p.setitem(TABLE, "warm", 2.0), "warm"),
    "dict in a dict": (lambda p, t, m: p.setitem(LEVELS["a"]["b"], "c", 2.0), "'c'"),
    "sum of a list": (lambda p, t, m: TERMS.__setitem__(1, 3.0), r"TERMS\[1\]"),
    "tensor in a list": (
        lambda p, t, m: WEIGHTS.__setitem__(0, torch.ones(2)),
        r"the tensor .*WEIGHTS\[0\], which the step reads, was replaced by another object",
    ),
    "tensor": (lambda p, t, m: p.setitem(globals(), "SHIFT", torch.ones(2)), "SHIFT"),
    "imported module": (lambda p, t, m: p.setattr(schedule, "FACTOR", 2.0), r"schedule\.FACTOR"),
    "module of the loss": (
        lambda p, t, m: p.setattr(CRITERION, "label_smoothing", 0.2),
        "label_smoothing",
    ),
    "buffer of a module of the loss": (
        lambda p, t, m: p.setitem(CRITERION._buffers, "weight", torch.ones(2)),
        r"the tensor .*CRITERION\.weight, which the step reads, was replaced by another object",
    ),
    "another teacher": (
        lambda p, t, m: p.setitem(globals(), "TEACHER", copy.deepcopy(TEACHER)),
        r"the tensor .*TEACHER\.0\.(weight|bias), which",
    ),
    "hook of a teacher": (
        lambda p, t, m: p.setitem(TEACHER[1]._forward_hooks, 7, print),
        r"TEACHER.*_forward_hooks",
    ),
    "tensor under a pair": (
        lambda p, t, m: p.setitem(BY_PAIR, (1, 2), torch.ones(2)),
        r"BY_PAIR\[\(1, 2\)\]",
    ),
    "tensor of a class": (
        lambda p, t, m: p.setattr(Classed, "scale", torch.ones(2)),
        r"Classed.*scale",
    ),
    "number of numpy": (
        lambda p, t, m: p.setitem(globals(), "BETA", np.float64(2.0)),
        r"BETA, which the step reads, is no longer 1\.0",
    ),
    "array of numpy": (lambda p, t, m: p.setitem(globals(), "BETAS", np.ones(2)), "BETAS"),
    "object of the loss": (lambda p, t, m: p.setattr(t, "rate", 2.0), "rate"),
    "its dict": (lambda p, t, m: p.setitem(t.settings, "k", 2.0), r"settings\['k'\]"),
    "model's dict": (
        lambda p, t, m: p.setitem(m.table, "gain", 2.0),
        r"model\.table\['gain'\], which the step reads .* is no longer 1\.0",
    ),
    "model's object": (lambda p, t, m: p.setattr(m.config.inner, "gain", 2.0), "config.inner.gain"),
    "model's list": (lambda p, t, m: m.gains.__setitem__(0, 2.0), r"model\.gains\[0\]"),
    "model's attribute": (lambda p, t, m: p.setattr(m.drop, "p", 0.3), r"model\.drop\.p"),
    "equal, of another type": (lambda p, t, m: p.setattr(m.drop, "p", True), "p"),
}


@pytest.fixture(scope="module")
def made() -> tuple[Trainer, Layered, StateGuards]:
    trainer, model = Trainer(), Derived()
    return trainer, model, captured(trainer, model)


@pytest.mark.parametrize("change", READ)
def test_changing_python_state_that_was_read_is_refused(
    change: str, made: tuple[Trainer, Layered, StateGuards], monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer, model, reads = made
    reads.check()
    lists: list[list[Any]] = [TERMS, WEIGHTS, model.gains]
    kept = [list(x) for x in lists]
    act, message = READ[change]
    act(monkeypatch, trainer, model)
    with pytest.raises(Mismatch, match=message) as refused:
        reads.check()
    assert len(str(refused.value).splitlines()) == 3
    monkeypatch.undo()
    for changed, before in zip(lists, kept, strict=True):
        changed[:] = before
    reads.check()


def test_changing_python_state_that_was_not_read_is_allowed(
    made: tuple[Trainer, Layered, StateGuards],
) -> None:
    trainer, model, reads = made
    trainer.global_step += 1
    model.steps += 1
    model.table["unread"] = model.config.unread = 2.0
    LEVELS["unread"] = TABLE["unread"] = 2.0
    SEEN.steps += 1
    trainer.rate = float("1.0")  # an equal value passes the guard
    BETAS[:] = 2.0
    with torch.no_grad():
        WEIGHTS[0].fill_(3.0)
        TEACHER[0].weight.fill_(3.0)
        model.layer.weight.fill_(3.0)
    assert reads.check() is None  # type: ignore[func-returns-value]


def test_closures_partials_and_losses_that_are_modules_are_read_too() -> None:
    rate = 1.0

    def closed(model: nn.Module, batch: Any) -> Tensor:
        result: Tensor = model(batch).sum() * rate
        return result

    class Weighed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rate = 1.0

        def forward(self, model: nn.Module, batch: Any) -> Tensor:
            result: Tensor = model(batch).sum() * self.rate
            return result

    def given(model: nn.Module, batch: Any, extra: Any) -> Tensor:
        result: Tensor = model(batch).sum() * extra["rate"]
        return result

    module, extra = Weighed(), {"rate": 1.0}
    losses: list[Any] = [closed, module, functools.partial(given, extra=extra)]
    model = nn.Linear(2, 2)
    found = [
        CapturedStep(model=model, loss=loss, batch=torch.ones(3, 2)).captured().reads
        for loss in losses
    ]
    for reads in found:
        reads.check()
    rate = 2.0
    module.rate = 2.0
    extra["rate"] = 2.0
    for reads in found:
        with pytest.raises(Mismatch, match="is no longer 1"):
            reads.check()


def uniform() -> float:
    return random.uniform(1, 2)


def normal() -> Any:
    return torch.as_tensor(np.random.normal(size=2))  # noqa: NPY002 - as people write it


@pytest.mark.parametrize("draw", [uniform, normal])
def test_random_numbers_of_other_generators_are_refused(draw: Callable[[], Any]) -> None:
    def loss(model: nn.Module, batch: Any) -> Tensor:
        result: Tensor = (model(batch) * draw()).sum()
        return result

    with pytest.raises(CaptureRefused, match="random") as refused:
        CapturedStep(model=nn.Linear(2, 2), loss=loss, batch=torch.ones(3, 2)).captured()
    assert "or draw with torch (torch.rand)" in str(refused.value)


def test_unread_keys_of_a_batch_are_recorded() -> None:
    def loss(model: nn.Module, batch: Any) -> Tensor:
        result: Tensor = model(batch["x"]).sum() * (2 if batch["double"] else 1)
        return result * len(batch["names"])

    batch = {
        "x": torch.ones(3, 2),
        "double": True,
        "names": ["a", "b"],
        "step": 7,
        "files": ["c"],
        "y": torch.ones(3),
    }
    source = CapturedStep(model=nn.Linear(2, 2), loss=loss, batch=batch)
    assert source.captured().reads.unread == {"step", "files"}


LISTED, KEYED = [1.0], {"k": 1.0}


class OfDefaults(nn.Module):
    """A model whose forward pass reads default arguments that can change."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)

    def forward(self, x: Tensor, gains: list[float] = LISTED) -> Tensor:
        result: Tensor = self.layer(x) * gains[0]
        return result


class LossOfDefaults:
    def loss(
        self,
        model: nn.Module,
        x: Tensor,
        gains: list[float] = LISTED,
        *,
        scales: dict[str, float] = KEYED,
    ) -> Tensor:
        return model(x).sum() * gains[0] * scales["k"]


def loss_of_defaults(model: nn.Module, x: Tensor, scales: dict[str, float] = KEYED) -> Tensor:
    result: Tensor = model(x).sum() * scales["k"]
    return result


@pytest.mark.parametrize("changed", [(LISTED, 0), (KEYED, "k")], ids=["list", "dict"])
@pytest.mark.parametrize("loss", [LossOfDefaults().loss, loss_of_defaults], ids=["method", "func"])
def test_changing_a_default_argument_is_refused(loss: Any, changed: Any) -> None:
    step = CapturedStep(model=OfDefaults(), loss=loss, batch=torch.ones(3, 2))
    reads = step.captured().reads
    reads.check()
    container, key = changed
    container[key] = 5.0
    try:
        with pytest.raises(Mismatch, match=r"is no longer 1\.0"):
            reads.check()
    finally:
        container[key] = 1.0
