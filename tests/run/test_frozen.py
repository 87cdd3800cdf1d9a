"""What the loss has read from outside is part of the step; a change of it is refused."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from steelyard.core.errors import Mismatch
from steelyard.run.frozen import FrozenWatch, read_by_loss, read_by_model

RATE = 1.0
TABLE = {"rate": 1.0, "unread": 1.0}
SETTINGS = SimpleNamespace(rate=1.0, unread=1.0)


def loss_watch(loss: Any) -> FrozenWatch:
    return FrozenWatch("loss", read_by_loss(loss))


def inner(x: Tensor) -> Tensor:
    return x * RATE


def of_globals(model: nn.Module, batch: Any) -> Tensor:
    return inner(model(batch).sum()) * TABLE["rate"] * SETTINGS.rate


def change_global(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "RATE", 2.0)


def change_entry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(TABLE, "rate", 2.0)


def change_attribute(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SETTINGS, "rate", 2.0)


@pytest.mark.parametrize("change", [change_global, change_entry, change_attribute])
def test_what_the_loss_names_may_not_change(change: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    watch = loss_watch(of_globals)
    watch.check()
    change(monkeypatch)
    with pytest.raises(Mismatch, match=r"which the loss reads, was 1\.0 and is 2\.0"):
        watch.check()


def test_what_it_does_not_name_may(monkeypatch: pytest.MonkeyPatch) -> None:
    watch = loss_watch(of_globals)
    monkeypatch.setitem(TABLE, "unread", 2.0)
    monkeypatch.setattr(SETTINGS, "unread", 2.0)
    monkeypatch.setattr(SETTINGS, "rate", float("1.0"))  # an equal value is the same value
    watch.check()


def test_closures_partials_and_losses_that_are_modules_are_watched() -> None:
    rate = 1.0

    def closed(model: nn.Module, batch: Any) -> Tensor:
        return model(batch).sum() * rate

    class Weighed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rate = 1.0

        def forward(self, model: nn.Module, batch: Any) -> Tensor:
            return model(batch).sum() * self.rate

    module, partial = Weighed(), functools.partial(of_globals, extra={"rate": 1.0})
    watches = [loss_watch(loss) for loss in (closed, module, partial)]
    for watch in watches:
        watch.check()
    rate = 2.0
    module.rate = 2.0
    partial.keywords["extra"]["rate"] = 2.0
    for watch in watches:
        with pytest.raises(Mismatch):
            watch.check()


def test_values_that_are_equal_but_of_another_kind_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    watch = loss_watch(of_globals)
    monkeypatch.setitem(globals(), "RATE", True)
    with pytest.raises(Mismatch):
        watch.check()
    assert torch.is_tensor(inner(torch.ones(())))


GAIN = 1.0


class Configured(nn.Module):
    """Reads a global, a dict, an object in an object, a list; is given more than it reads."""

    def __init__(self) -> None:
        super().__init__()
        self.table = {"gain": 1.0, "unread": 1.0}
        self.config = SimpleNamespace(inner=SimpleNamespace(gain=1.0), unread=1.0)
        self.gains = [1.0]
        self.layer = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        gain = GAIN * self.table["gain"] * self.config.inner.gain * self.gains[0]
        result: Tensor = self.layer(x) * gain
        return result


def model_watch(model: nn.Module) -> FrozenWatch:
    return FrozenWatch("model", read_by_model(model))


FROZEN_IN_MODELS: dict[str, tuple[Callable[[Configured, pytest.MonkeyPatch], object], str]] = {
    "global": (lambda _, patch: patch.setitem(globals(), "GAIN", 2.0), "global GAIN, which the mo"),
    "dict": (lambda m, _: m.table.update(gain=2.0), r"1\.table\['gain'\], .* was 1\.0 and is 2\.0"),
    "gone": (lambda m, _: m.table.clear(), r"1\.table\['gain'\], .* was 1\.0 and is gone"),
    "object": (lambda m, _: setattr(m.config.inner, "gain", 2.0), r"1\.config\.inner\.gain"),
    "list": (lambda m, _: m.gains.__setitem__(0, 2.0), r"1\.gains\[0\]"),
    "class": (
        lambda m, patch: patch.setattr(Configured, "forward", lambda m, x: m.layer(x)),
        "forward of Configured",
    ),
}


@pytest.mark.parametrize("change", FROZEN_IN_MODELS)
def test_what_the_models_code_names_may_not_change(
    change: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = nn.Sequential(nn.Linear(2, 2), Configured())
    watch = model_watch(model)
    watch.check()
    act, said = FROZEN_IN_MODELS[change]
    act(model[1], monkeypatch)
    with pytest.raises(Mismatch, match=said):
        watch.check()


def test_what_it_does_not_name_may_change_too() -> None:
    model = Configured()
    model.log = list(range(1000))
    watch = model_watch(model)
    model.table["unread"] = model.config.unread = 2.0
    model.table["new"] = model.log[0] = 3
    watch.check()
