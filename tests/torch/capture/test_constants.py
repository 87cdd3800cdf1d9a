"""Tensors outside of the model and the batch are read again in each step, whatever views the
code uses."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from steelyard.errors import CaptureRefused, Mismatch
from steelyard.ir.graph import Role
from tests.support.stepping import captured_step, differences, live, source_of
from tests.zoo import reference

WEIGHT = torch.rand(4) + 0.5
OUTSIDE = nn.Parameter(torch.rand(4))
LISTED = [torch.rand(4)]
SQUARE = torch.rand(2, 2)


def of_scaled(model: nn.Module, batch: Any, scale: Tensor) -> Tensor:
    return F.cross_entropy(model(batch["x"]) * scale, batch["y"])


READS: dict[str, tuple[Tensor, Callable[[nn.Module, Any], Tensor]]] = {
    "class weights detached": (
        WEIGHT,
        lambda m, b: F.cross_entropy(m(b["x"]), b["y"], weight=WEIGHT.detach()),
    ),
    "a list's": (LISTED[0], lambda m, b: of_scaled(m, b, LISTED[0].data)),
    "another model's parameter": (OUTSIDE, lambda m, b: of_scaled(m, b, OUTSIDE.detach())),
    "its data": (OUTSIDE, lambda m, b: of_scaled(m, b, OUTSIDE.data)),
    "detached and looked at": (SQUARE, lambda m, b: of_scaled(m, b, SQUARE.detach().view(4))),
    "read in three ways": (
        WEIGHT,
        lambda m, b: of_scaled(m, b, WEIGHT.detach() + WEIGHT.view(4, 1).t()[0] + WEIGHT),
    ),
}


@pytest.mark.parametrize("name", READS)
def test_a_constant_is_read_again_in_each_step(name: str) -> None:
    torch.manual_seed(0)
    constant, loss = READS[name]
    model = nn.Linear(4, 4)
    batch = {"x": torch.randn(6, 4), "y": torch.randint(0, 4, (6,))}
    plain = copy.deepcopy(model)
    source = source_of((model, loss, batch))
    step = live(source)
    for _ in range(2):
        expected = reference.eager_step(plain, loss, batch, 1)
        assert differences(expected, captured_step(step, batch, seed=1)) == []
        with torch.no_grad():
            constant.add_(0.25)
    graph = source.graph(micro_batches=1)
    held = [n for n in graph.inputs() if n.name.startswith("constant:")]
    assert len(held) == 1, "one tensor, however often it is read"
    assert graph.resident_bytes(Role.CONSTANT) == constant.nbytes


class Held(nn.Module):
    """A plain tensor among a module's attributes, which would have a gradient if it were
    trained."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.shift = torch.rand(4, requires_grad=True)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.inner(x) * self.shift.detach() - self.shift.data
        return result


def test_an_attribute_may_be_detached() -> None:
    torch.manual_seed(0)
    model = Held()

    def loss(model: nn.Module, batch: Any) -> Tensor:
        value: Tensor = model(batch["x"]).square().mean()
        return value

    batch = {"x": torch.randn(6, 4)}
    plain = Held()
    plain.load_state_dict(model.state_dict())
    plain.shift = model.shift
    expected = reference.eager_step(plain, loss, batch, 1)
    assert differences(expected, captured_step(live(source_of((model, loss, batch))), batch)) == []


AVERAGED = {name: tensor.detach().clone() for name, tensor in nn.Linear(4, 4).state_dict().items()}


def test_a_dict_for_functional_call_may_be_held_outside_of_the_loss() -> None:
    def loss(model: nn.Module, batch: Any) -> Tensor:
        target = torch.func.functional_call(model, AVERAGED, (batch,))
        return F.mse_loss(model(batch), target)

    torch.manual_seed(0)
    model, batch = nn.Linear(4, 4), torch.randn(6, 4)
    plain = copy.deepcopy(model)
    source = source_of((model, loss, batch))
    step, reads = live(source), source.captured().reads
    for _ in range(2):
        reads.check()
        expected = reference.eager_step(plain, loss, batch, 1)
        assert differences(expected, captured_step(step, batch, seed=1)) == []
        for tensor in AVERAGED.values():
            tensor.mul_(0.5)
    AVERAGED["weight"] = AVERAGED["weight"].clone()
    with pytest.raises(Mismatch, match=r"AVERAGED\['weight'\].* was replaced by another object"):
        reads.check()


def test_a_dict_that_functional_call_changes_is_named() -> None:
    class Replacing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(4, 4)
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            self.calls = self.calls + 1
            value: Tensor = self.inner(x)
            return value

    def loss(model: Any, batch: Any) -> Tensor:
        value: Tensor = torch.func.functional_call(model, CALLS, (batch,))
        return value.square().mean()

    with pytest.raises(
        CaptureRefused, match=r"has side effects on Python state: .*test_constants\.CALLS"
    ):
        source_of((Replacing(), loss, torch.randn(2, 4))).captured()


CALLS = {"calls": torch.zeros(())}


def test_layers_within_layers_get_their_parameters_back_from_functional_call() -> None:
    def loss(model: nn.Module, batch: Any) -> Tensor:
        target = torch.func.functional_call(model, held, (batch,))
        return F.mse_loss(model(batch), target)

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Tanh(), nn.Linear(4, 4)))
    held = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    batch = torch.randn(6, 4)
    with torch.no_grad():
        held["1.1.weight"].mul_(0.5)
    expected = reference.eager_step(copy.deepcopy(model), loss, batch, 1)
    step = live(source_of((model, loss, batch)))
    assert differences(expected, captured_step(step, batch, seed=1)) == []


def test_a_parameter_that_is_replaced_for_good_is_refused() -> None:
    class Replacing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Any:
            self.inner.weight = nn.Parameter(self.inner.weight * 0.5)
            return self.inner(x)

    source = source_of((Replacing(), lambda m, b: m(b).sum(), torch.randn(2, 4)))
    with pytest.raises(CaptureRefused, match="replaces parameters of inner"):
        source.captured()
