"""Refusals of a live step before anything runs: another model, batch, optimizer or mode."""

from __future__ import annotations

from collections.abc import Callable
from functools import partialmethod
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook
from torch.utils.flop_counter import FlopCounterMode

from steelyard.errors import BadInput, Mismatch
from steelyard.run.step import LiveStep
from tests.support.live import ADAMW, both, captured, live, twins
from tests.support.torch_since import torch_since
from tests.zoo.reference import (
    assert_same,
    assert_same_model,
    buffers,
    gradients,
)


class Watched(nn.Module):
    """A model with one thing of each kind that a captured step fixes."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5))
        self.norm = nn.BatchNorm1d(4)
        self.scale = 2.0
        self.constant = torch.ones(4)
        self.listed = [torch.ones(4)]
        self.act = torch.relu

    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(x) * self.scale + self.constant + self.listed[0]
        result: Tensor = self.act(self.norm(y))
        return result


def square(model: nn.Module, batch: Any) -> Tensor:
    value: Tensor = model(batch["x"]).square().mean()
    return value


def replace_parameter(m: Watched) -> None:
    m.inner[0].weight = nn.Parameter(torch.ones(4, 4))


def tie(m: Watched) -> None:
    m.inner[0].weight = m.inner[0].weight.detach().clone().requires_grad_()  # type: ignore[assignment]


def hook(m: Watched) -> None:
    m.inner.register_forward_hook(lambda *_: None)


CHANGES: dict[str, tuple[Callable[[Watched], object], str]] = {
    "parameter replaced": (replace_parameter, r"parameter inner\.0\.weight was replaced"),
    "parameter gone": (
        lambda m: delattr(m.inner[0], "bias"),
        r"parameter inner\.0\.bias was removed",
    ),
    "parameter set to None": (lambda m: setattr(m.inner[0], "bias", None), "was set to None"),
    "parameter new": (
        lambda m: m.register_parameter("more", nn.Parameter(torch.ones(1))),
        "parameter more appeared",
    ),
    "loaded by assignment": (
        lambda m: m.load_state_dict(m.state_dict(), assign=True),
        r"(?s)as load_state_dict\(assign=True\) does.* next: call load_state_dict without assign",
    ),
    "buffer replaced": (
        lambda m: setattr(m.norm, "running_mean", torch.zeros(4)),
        r"buffer norm\.running_mean was replaced",
    ),
    "buffer new": (lambda m: m.register_buffer("b", torch.ones(1)), "buffer b appeared"),
    "module replaced": (
        lambda m: setattr(m, "norm", nn.BatchNorm1d(4)),
        "module norm was replaced",
    ),
    "module added": (lambda m: m.inner.append(nn.ReLU()), r"module inner\.2 appeared"),
    "frozen": (lambda m: m.inner[0].weight.requires_grad_(False), "requires_grad of parameter"),
    "eval": (lambda m: m.eval(), r"the model is in eval\(\) mode"),
    "one in eval": (lambda m: m.norm.eval(), r"norm is in eval\(\) mode"),
    "number": (lambda m: setattr(m, "scale", 3.0), r"model\.scale, which .* is no longer 2\.0"),
    "dropout rate": (lambda m: setattr(m.inner[1], "p", 0.1), r"model\.inner\.1\.p, which"),
    "function": (lambda m: setattr(m, "act", torch.tanh), r"model\.act.* was replaced"),
    "forward overridden": (lambda m: setattr(m, "forward", square), "forward was overridden"),
    "constant replaced": (
        lambda m: setattr(m, "constant", torch.ones(4)),
        r"tensor model\.constant, which the step reads, was replaced",
    ),
    "listed constant": (
        lambda m: m.listed.__setitem__(0, torch.ones(4)),
        r"tensor model\.listed\[0\], which the step reads, was replaced",
    ),
    "forward hook": (hook, "a forward hook of inner appeared"),
    "cast": (lambda m: m.double(), "was replaced"),
    "dtype of data": (
        lambda m: setattr(m.norm.bias, "data", torch.zeros(4).double()),
        r"parameter norm\.bias is now float64\[4\]",
    ),
    "shape of data": (
        lambda m: setattr(m.norm.bias, "data", torch.zeros(5)),
        r"parameter norm\.bias is now float32\[5\]",
    ),
}


def test_a_hook_of_every_module_is_refused_when_it_comes_after_planning() -> None:
    model, batch = Watched(), {"x": torch.randn(6, 4)}
    step = live(model, square, batch)
    handle = register_module_forward_hook(lambda *_: None)
    try:
        with pytest.raises(Mismatch, match="a forward hook of every module appeared"):
            step(batch)
    finally:
        handle.remove()
    step(batch)
    assert all(p.grad is not None for p in model.parameters())


def test_a_step_can_be_counted_by_torchs_own_flop_counter() -> None:
    """The counter hooks every module, but only to label it."""
    model, batch = Watched(), {"x": torch.randn(6, 4)}
    eager = twins(model)[1]
    step = live(model, square, batch)
    with FlopCounterMode(display=False) as expected:
        square(eager, batch).backward()
    with FlopCounterMode(display=False) as counted:
        step.backward(batch)
    assert counted.get_total_flops() == expected.get_total_flops() > 0


def test_the_code_of_a_class_may_not_change_but_its_data_may() -> None:
    class Base(nn.Module):
        calls = 0

        def act(self, x: Tensor) -> Tensor:
            return x.relu()

        @classmethod
        def scaled(cls, x: Tensor) -> Tensor:
            return x * 2

        def forward(self, x: Tensor) -> Tensor:
            return self.scaled(self.act(self.inner(x)))

    class Model(Base):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(4, 4)

    model, batch = Model(), {"x": torch.randn(6, 4)}
    step = live(model, square, batch)
    Base.calls += 1
    Model.helper = staticmethod(torch.relu)  # type: ignore[attr-defined]
    expected = step(batch)
    replaced = [
        (Base, "act", lambda self, x: x.tanh()),
        (Base, "scaled", classmethod(lambda cls, x: x)),
        (Model, "act", lambda self, x: x.tanh()),
    ]
    for kind, name, code in replaced:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(kind, name, code, raising=False)
            with pytest.raises(Mismatch, match=f"{name} of class {kind.__name__} was replaced"):
                step(batch)
    assert torch.equal(step(batch), expected)


def test_torch_compile_elsewhere_does_not_change_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    model, batch = nn.Linear(4, 4), {"x": torch.randn(6, 4)}
    step = live(model, square, batch)
    expected = step(batch)
    # Torch does this once in a process, so perhaps not in this test.
    for name in ("__init__", "__setstate__"):
        monkeypatch.setattr(nn.Module, name, partialmethod(getattr(nn.Module, name)))
    model.compile(backend="eager")
    model(batch["x"])
    assert torch.equal(step(batch), expected)


def test_hooks_that_transformers_leaves_behind_are_no_other_model() -> None:
    sample, _, batches = both("hf_llama", 1)
    model, loss, _ = sample
    step = live(model, loss, batches[0])
    torch.manual_seed(0)
    before = step(batches[0])
    with torch.no_grad():
        model(input_ids=batches[0]["input_ids"], output_hidden_states=True)
    assert any(m._forward_hooks for m in model.modules())
    torch.manual_seed(0)
    assert torch.equal(step(batches[0]), before)


def test_unread_batch_entries_may_be_anything() -> None:
    model = Watched()

    def batch(**unread: Any) -> dict[str, Any]:
        return {"x": torch.ones(6, 4), "double": True, **unread}

    def loss(model: nn.Module, batch: Any) -> Tensor:
        return square(model, batch) * (2 if batch["double"] else 1)

    step = live(model, loss, batch(step=1, files=["a", "b"]))
    step(batch(step=2, files=["c"]))
    step(batch(step=None, files=()))
    with pytest.raises(Mismatch, match=r"batch:\['double'\] is False"):
        step({**batch(step=1, files=[]), "double": False})
    with pytest.raises(Mismatch, match="a different structure"):
        step(batch(step=1))


@pytest.mark.parametrize("change", CHANGES)
def test_another_model_is_refused_before_anything_runs(change: str) -> None:
    torch.manual_seed(0)
    model = Watched()
    batch = {"x": torch.randn(6, 4)}
    step = live(model, square, batch, optimizer=ADAMW)
    step(batch)
    act, message = CHANGES[change]
    act(model)
    before = {**buffers(model), **gradients(model)}
    state = torch.get_rng_state()
    with pytest.raises(Mismatch, match=message) as refused:
        step(batch)
    assert len(str(refused.value).splitlines()) == 3
    assert_same(before, {**buffers(model), **gradients(model)})
    assert torch.equal(state, torch.get_rng_state())


def load(m: Watched) -> None:
    m.load_state_dict({k: v + 1 for k, v in m.state_dict().items()})


def swap_data(m: Watched) -> None:
    m.inner[0].weight.data = torch.full((4, 4), 0.5)


def fill(m: Watched) -> None:
    with torch.no_grad():
        m.inner[0].weight.copy_(torch.ones(4, 4))
        m.constant.fill_(4)


ALLOWED: dict[str, Callable[[Watched], object]] = {
    "load_state_dict": load,
    "data swapped": swap_data,
    "filled": fill,
    "same number again": lambda m: setattr(m, "scale", float("2.0")),
    "an attribute that nothing read": lambda m: setattr(m, "best", 0.3),
    "eval and back": lambda m: (m.eval(), m.train()),
    "forward hook and back": lambda m: m.register_forward_hook(lambda *_: None).remove(),
}


@pytest.mark.parametrize("change", ALLOWED)
def test_new_values_are_no_other_model(change: str) -> None:
    torch.manual_seed(0)
    model = Watched()
    plain = twins(model)[1]
    batch = {"x": torch.randn(6, 4)}
    step = live(model, square, batch, optimizer=ADAMW)
    other = ADAMW(plain.parameters())
    for _ in range(2):
        ALLOWED[change](model)
        ALLOWED[change](plain)
        torch.manual_seed(1)
        value = step(batch)
        torch.manual_seed(1)
        other.zero_grad()
        expected = square(plain, batch)
        expected.backward()
        other.step()
        assert torch.equal(value, expected)
    assert_same_model(plain, model)


def batch_of(**changed: Any) -> dict[str, Any]:
    return {"x": torch.randn(6, 4), "y": [torch.ones(6)], "flag": True, "rate": 0.5, **changed}


BATCHES: dict[str, tuple[Any, str]] = {
    "shape": (batch_of(x=torch.randn(5, 4)), r"\['x'\] has shape \[5, 4\]"),
    "dtype": (batch_of(x=torch.randn(6, 4).double()), "float64"),
    "device": (batch_of(x=torch.randn(6, 4, device="meta")), "meta"),
    "strides": (batch_of(x=torch.randn(4, 6).t()), "strides"),
    "gradient": (batch_of(x=torch.randn(6, 4, requires_grad=True)), "requires a gradient"),
    "no tensor": (batch_of(x=3), "is 3"),
    "flag": (batch_of(flag=False), "is False"),
    "flag of another type": (batch_of(flag=1), "is 1"),
    "number": (batch_of(rate=0.25), r"is 0\.25"),
    "key": ({**batch_of(), "z": 1}, "a different structure"),
    "list": (batch_of(y=(torch.ones(6),)), "a different structure"),
    "length": (batch_of(y=[torch.ones(6), torch.ones(6)]), "a different structure"),
}


def weighed(model: nn.Module, batch: Any) -> Tensor:
    rate = batch["rate"] if batch["flag"] else 1.0
    value: Tensor = (model(batch["x"]).sum(1) * batch["y"][0] * rate).mean()
    return value


@pytest.mark.parametrize("change", BATCHES)
def test_another_batch_is_refused_before_anything_runs(change: str) -> None:
    torch.manual_seed(0)
    step = live(nn.Linear(4, 4), weighed, batch_of(), optimizer=ADAMW)
    step(batch_of())
    batch, message = BATCHES[change]
    before = gradients(step.model)
    with pytest.raises(Mismatch, match=message) as refused:
        step(batch)
    assert len(str(refused.value).splitlines()) == 3
    assert_same(before, gradients(step.model))


def test_the_keys_of_a_batch_may_come_in_another_order() -> None:
    step = live(nn.Linear(4, 4), weighed, batch_of())
    batch = batch_of()
    value = step(batch)
    assert torch.equal(value, step(dict(reversed(batch.items()))))


def test_an_optimizer_of_other_parameters_is_refused() -> None:
    (model, loss, batch), plain, _ = both("mlp")
    program, constants, _ = captured(model, loss, batch)

    def made(parameters: Any) -> LiveStep:
        optimizer = ADAMW(parameters)
        return LiveStep(model, program, constants=constants, batch=batch, optimizer=optimizer)

    with pytest.raises(
        Mismatch, match="steps 8 parameters that the model does not have and does not update"
    ):
        made(plain.parameters())
    with pytest.raises(Mismatch, match=r"does not update 0\.bias and 6 more"):
        made([next(iter(model.parameters()))])
    step = made(model.parameters())
    step.optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))]})
    with pytest.raises(Mismatch, match="steps 1 parameters"):
        step(batch)
    with pytest.raises(BadInput, match="LBFGS"):
        LiveStep(
            model,
            program,
            constants=constants,
            batch=batch,
            optimizer=torch.optim.LBFGS(model.parameters()),
        )


def test_a_program_of_another_model_is_refused() -> None:
    (model, loss, batch), _, _ = both("mlp")
    program, constants, _ = captured(model, loss, batch)
    fewer = twins(model)[1]
    next(iter(fewer.parameters())).requires_grad_(False)
    with pytest.raises(Mismatch, match="plan"):
        LiveStep(fewer, program, constants=constants, batch=batch)
    wider = twins(model)[1]
    wider[0].weight = nn.Parameter(torch.ones(64, 32))
    with pytest.raises(Mismatch, match=r"float32\[64, 32\]"):
        LiveStep(wider, program, constants=constants, batch=batch)


def test_unknown_torch_modes_are_refused() -> None:
    (model, loss, batch), plain, _ = both("mlp")
    step = live(model, loss, batch, optimizer=ADAMW)
    with torch.autocast("cpu"), pytest.raises(BadInput, match="autocast"):
        step(batch)
    with torch.inference_mode(), pytest.raises(BadInput, match="inference_mode"):
        step(batch)
    assert_same_model(plain, model)


@torch_since((2, 12), "before torch 2.12 Dynamo cannot raise in a frame that it resumes (gb0057)")
def test_a_step_inside_torch_compile_is_refused() -> None:
    (model, loss, batch), plain, _ = both("mlp")
    step = live(model, loss, batch, optimizer=ADAMW)
    with pytest.raises(BadInput, match=r"torch\.compile"):
        torch.compile(step.backward, backend="eager")(batch)
    assert_same_model(plain, model)
    torch.compiler.reset()


def test_another_default_dtype_is_refused_before_anything_runs() -> None:
    (model, loss, batch), _, _ = both("mlp")
    step = live(model, loss, batch)
    torch.set_default_dtype(torch.float64)
    try:
        with pytest.raises(Mismatch, match=r"default dtype is torch\.float64") as refused:
            step.backward(batch)
    finally:
        torch.set_default_dtype(torch.float32)
    assert len(str(refused.value).splitlines()) == 3
    assert all(p.grad is None for p in model.parameters())
    step.backward(batch)
