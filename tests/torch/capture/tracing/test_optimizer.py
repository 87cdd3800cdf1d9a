"""The planned optimizer step compared with the live one: bytes of state and of temporaries."""

from __future__ import annotations

import gc
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import (
    LBFGS,
    SGD,
    Adadelta,
    Adafactor,
    Adagrad,
    Adam,
    Adamax,
    AdamW,
    NAdam,
    RAdam,
    RMSprop,
    Rprop,
)

from steelyard.capture.tracing.optimizer import capture_update, leaner_settings
from steelyard.errors import CaptureRefused
from steelyard.ir.graph import Phase, Role
from steelyard.ir.program import Program
from steelyard.measure.operators import benchmark as operators
from steelyard.measure.operators.memory import meter_once
from steelyard.predict.cost_table import CostTable
from steelyard.predict.liveness import liveness
from tests.support.stepping import DEVICE

OPTIMIZERS: dict[str, Any] = {
    "adamw": partial(AdamW, lr=1e-3, foreach=False),
    "adamw foreach": partial(AdamW, lr=1e-3, foreach=True),
    "adamw fused": partial(AdamW, lr=1e-3, fused=True),
    "adamw amsgrad": partial(AdamW, lr=1e-3, amsgrad=True),
    "adamw with a tensor for lr": lambda ps: AdamW(ps, lr=torch.tensor(1e-3)),
    "adam maximizing": partial(Adam, lr=1e-3, maximize=True, weight_decay=0.1),
    "sgd": partial(SGD, lr=1e-2),
    "sgd with momentum": partial(SGD, lr=1e-2, momentum=0.9),
    "sgd nesterov foreach": partial(SGD, lr=1e-2, momentum=0.9, nesterov=True, foreach=True),
    "sgd fused": partial(SGD, lr=1e-2, momentum=0.9, fused=True),
    "adagrad": partial(Adagrad, lr=1e-2),
    "rmsprop": partial(RMSprop, lr=1e-2, momentum=0.9, centered=True),
    "nadam": partial(NAdam, lr=1e-3),
    "radam": partial(RAdam, lr=1e-3),
    "adamax": partial(Adamax, lr=1e-3),
    "adadelta": partial(Adadelta, lr=1e-1),
    "rprop": partial(Rprop, lr=1e-2),
}


def small(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(64, 96), nn.GELU(), nn.LayerNorm(96), nn.Linear(96, 32))


def updated(make: Callable[..., Any]) -> tuple[Program, CostTable]:
    program = capture_update(small(), make)
    costs, survey = operators.measure_operators([program.graph], DEVICE, seconds_budget=60.0)
    assert not survey.unmeasured, survey.unmeasured[0]
    return program, costs


def stepped(make: Callable[..., Any]) -> tuple[int, int]:
    """Return the bytes of the live state, and the most bytes that its third step adds."""
    model = small()
    optimizer = make(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    optimizer.step()
    tensors = [
        x for s in optimizer.state.values() for x in s.values() if isinstance(x, torch.Tensor)
    ]
    gc.collect()
    metered = meter_once(optimizer.step)
    return sum(x.untyped_storage().nbytes() for x in tensors), metered.peak_bytes


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_predicted_state_and_temporaries_equal_the_measured_ones(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(operators, "_FEWEST_ROUNDS", 1)
    monkeypatch.setattr(operators, "_ROUNDS_SECONDS", 0.0)
    program, costs = updated(OPTIMIZERS[name])
    state_bytes, peak_bytes = stepped(OPTIMIZERS[name])
    assert program.graph.resident_bytes(Role.STATE) == state_bytes
    predicted = liveness(program, costs).peak_bytes
    assert abs(predicted - peak_bytes) <= max(512, 0.01 * peak_bytes), (predicted, peak_bytes)


def test_temporaries_of_the_last_update_live_until_the_optimizer_returns() -> None:
    """Like those of other updates, they live until the next update begins: here it is a decayed
    gradient."""
    model = nn.Linear(64, 64, bias=False)
    program = capture_update(model, OPTIMIZERS["adam maximizing"])
    assert liveness(program, CostTable(device=DEVICE)).peak_bytes == 3 * model.weight.nbytes


def test_the_update_reads_gradients_and_belongs_to_the_optimizer() -> None:
    program = capture_update(small(), OPTIMIZERS["adamw"])
    assert program.problems() == []
    nodes = [n for n in program.graph.nodes if not n.is_input]
    assert {n.phase for n in nodes} == {Phase.UPDATE}
    assert {n.path for n in nodes} == {"optimizer"}
    names = {n.name for n in program.graph.inputs()}
    assert {f"gradient:{n}" for n, _ in small().named_parameters()} <= names


def test_frozen_and_unused_parameters_cost_no_state() -> None:
    model = small()
    model[0].requires_grad_(False)
    make = OPTIMIZERS["adamw"]
    program = capture_update(model, make, without_gradient=frozenset({"3.bias"}))
    trained = sum(
        p.numel() for n, p in model.named_parameters() if p.requires_grad and n != "3.bias"
    )
    # Two moments for each parameter, and a step counter of four bytes for each tensor.
    assert program.graph.resident_bytes(Role.STATE) == 2 * 4 * trained + 4 * 3


def test_parameter_groups_may_be_made_from_the_parameters_given() -> None:
    def grouped(parameters: Any) -> torch.optim.Optimizer:
        parameters = list(parameters)
        decayed = [p for p in parameters if p.dim() > 1]
        others = [p for p in parameters if p.dim() < 2]
        return AdamW(
            [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}],
            lr=1e-3,
        )

    grouped_program, costs = updated(grouped)
    state_bytes, peak_bytes = stepped(grouped)
    assert grouped_program.graph.resident_bytes(Role.STATE) == state_bytes
    assert liveness(grouped_program, costs).peak_bytes == pytest.approx(peak_bytes, abs=512)


def test_capturing_an_update_touches_no_parameter() -> None:
    model = small()
    before = [p.detach().clone() for p in model.parameters()]
    random = torch.get_rng_state()
    capture_update(model, OPTIMIZERS["adamw"])
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert all(p.grad is None for p in model.parameters())
    assert torch.equal(random, torch.get_rng_state())


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (partial(Adafactor, lr=1e-2), r"Adafactor\.step\(\) reads a number from a tensor"),
        (partial(AdamW, lr=torch.tensor(1e-2)), "optimizer= reads a number from a tensor"),
        (LBFGS, r"LBFGS\.step\(\) cannot be traced"),
        (lambda ps: AdamW(ps, lr=-1.0), "cannot be made from the parameters: ValueError"),
        (lambda ps: None, "made a NoneType"),
        (lambda _: AdamW(small().parameters()), "over 6 of 6 parameters that are not the model's"),
        (
            lambda ps: AdamW([*ps, nn.Parameter(torch.ones(3))]),
            r"over 1 of 7 parameters that are not the model's, the first of shape \[3\]",
        ),
        (AdamW(small().parameters(), lr=1e-3), "cannot be made from the parameters: TypeError"),
    ],
    ids=[
        "adafactor",
        "a tensor",
        "lbfgs",
        "a wrong rate",
        "nothing",
        "of another model",
        "one more",
        "one that exists",
    ],
)
def test_an_untraceable_optimizer_is_refused_by_name(make: Any, says: str) -> None:
    with pytest.raises(CaptureRefused, match=says) as caught:
        capture_update(small(), make)
    assert len(str(caught.value).splitlines()) == 3


@pytest.mark.parametrize(
    "make",
    [lambda _: AdamW(small().parameters()), AdamW(small().parameters()), lambda ps: None],
    ids=["of another model", "one that exists", "nothing"],
)
def test_an_optimizer_that_cannot_be_used_is_refused_before_anything_is_captured(
    make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from steelyard.api import planning

    def capture_and_price(_: object) -> Any:
        raise AssertionError("the step was captured")

    monkeypatch.setattr(planning.PlanRequest, "capture_and_price", capture_and_price)
    batch = torch.ones(2, 4)
    for plan in (planning.plan, partial(planning.load, "none.plan.toml")):
        with pytest.raises(CaptureRefused, match="optimizer= "):
            plan(small(), lambda model, x: model(x).sum(), batch, optimizer=make)


@pytest.mark.parametrize(
    ("make", "settings"),
    [
        (partial(AdamW, foreach=True), ("foreach=False", "fused=True")),
        (AdamW, ("fused=True",)),  # on a CPU, foreach is off by default
        (partial(AdamW, fused=True), ()),
        (partial(NAdam, foreach=True), ("foreach=False",)),
        (NAdam, ()),
        (LBFGS, ()),
    ],
)
def test_only_settings_that_the_optimizer_has_are_advised(
    make: Any, settings: tuple[str, ...]
) -> None:
    assert leaner_settings(small(), make) == settings
