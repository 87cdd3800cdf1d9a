"""The note on optimizer state in a plan that was made without an optimizer."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from steelyard.capture.step import CapturedStep
from steelyard.capture.tracing.optimizer import capture_update
from steelyard.hardware.cluster import Device
from steelyard.ir.graph import Role
from steelyard.ir.program import Program
from steelyard.planner.plan_notes import note_on_state
from steelyard.plans.plan import Prediction
from steelyard.predict import predict
from steelyard.predict.cost_table import CostTable
from steelyard.units import format_bytes

COSTS = CostTable(
    device=Device(kind="made up", flops_per_second=1e9, bytes_per_second=1e8, memory_bytes=1 << 40)
)


class Partly(nn.Module):
    """A model with weights of two types, one of which is frozen, and one that no loss reads."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(64, 300)
        self.frozen = nn.Linear(300, 300).requires_grad_(False)
        self.last = nn.Linear(300, 64, dtype=torch.bfloat16)
        self.unused = nn.Linear(500, 500)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(self.frozen(self.first(x)).bfloat16())
        return out


def loss(model: nn.Module, x: Tensor) -> Tensor:
    out: Tensor = model(x)
    return out.float().square().mean()


def planned() -> tuple[nn.Module, Program, Prediction]:
    model = Partly()
    source = CapturedStep(model=model, loss=loss, batch=torch.randn(4, 64))
    program = Program.plain(source.graph(micro_batches=1))
    return model, program, predict(program, COSTS)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (torch.optim.AdamW, "AdamW would add {}"),
        (partial(torch.optim.SGD, lr=0.1, momentum=0.9), "SGD with momentum {}"),
    ],
)
def test_the_noted_state_equals_that_of_torch_to_the_byte(make: Any, said: str) -> None:
    model, program, predicted = planned()
    without = frozenset(program.graph.unused) | {"unused.weight", "unused.bias"}
    update = capture_update(model, make, without_gradient=without)
    state = update.graph.resident_bytes(Role.STATE)
    (note,) = note_on_state(program, predicted, limit_bytes=None, is_known=False)
    assert said.format(format_bytes(state)) in note
    assert "fit" not in note


def test_the_note_says_if_the_budget_would_still_hold() -> None:
    _, program, predicted = planned()
    peak = predicted.peak.nbytes

    def note(limit: int) -> str:
        (said,) = note_on_state(program, predicted, limit_bytes=limit, is_known=False)
        return said

    trained = sum(
        p.numel() * p.element_size()
        for name, p in Partly().named_parameters()
        if p.requires_grad and not name.startswith("unused")
    )
    assert "does not fit" in note(peak)
    assert "SGD with momentum does not fit either" in note(peak)
    assert "SGD with momentum fits" in note(peak + trained)
    assert "within the budget" in note(peak + 3 * trained)


def test_there_is_no_note_if_the_optimizer_is_known() -> None:
    _, program, predicted = planned()
    assert [*note_on_state(program, predicted, limit_bytes=None, is_known=True)] == []
