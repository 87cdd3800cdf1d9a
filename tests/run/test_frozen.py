"""What the loss has read from outside is part of the step; a change of it is refused."""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from steelyard.core.errors import Mismatch
from steelyard.run.frozen import LossWatch

RATE = 1.0
TABLE = {"rate": 1.0, "unread": 1.0}
SETTINGS = SimpleNamespace(rate=1.0, unread=1.0)


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
    watch = LossWatch(of_globals)
    watch.check()
    change(monkeypatch)
    with pytest.raises(Mismatch, match=r"which the loss reads, was 1\.0 and is 2\.0"):
        watch.check()


def test_what_it_does_not_name_may(monkeypatch: pytest.MonkeyPatch) -> None:
    watch = LossWatch(of_globals)
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
    watches = [LossWatch(loss) for loss in (closed, module, partial)]
    for watch in watches:
        watch.check()
    rate = 2.0
    module.rate = 2.0
    partial.keywords["extra"]["rate"] = 2.0
    for watch in watches:
        with pytest.raises(Mismatch):
            watch.check()


def test_values_that_are_equal_but_of_another_kind_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    watch = LossWatch(of_globals)
    monkeypatch.setitem(globals(), "RATE", True)
    with pytest.raises(Mismatch):
        watch.check()
    assert torch.is_tensor(inner(torch.ones(())))
