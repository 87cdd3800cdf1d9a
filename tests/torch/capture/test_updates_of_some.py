"""The update of a stage's parameters equals the full update without the lines of other
parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from steelyard.capture.tracing.optimizer import capture_update
from steelyard.ir.graph import Role
from steelyard.ir.optimizer_update import update_of
from steelyard.ir.program import Program
from steelyard.predict.liveness import liveness

OPTIMIZERS = {
    "momentum": partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.1),
    "adamw": partial(torch.optim.AdamW, lr=1e-3),
    "amsgrad": partial(torch.optim.Adam, lr=1e-3, amsgrad=True),
    "rmsprop": partial(torch.optim.RMSprop, lr=1e-3, centered=True, momentum=0.5),
    "nadam": partial(torch.optim.NAdam, lr=1e-3),
    "rprop": partial(torch.optim.Rprop, lr=1e-3),
}


def model() -> nn.Module:
    return nn.Sequential(*(nn.Linear(8 * k, 8 * (k + 1)) for k in range(1, 5)))


def told(program: Program) -> Any:
    """Return the calls, their arguments, and the live values at each line."""
    nodes = program.graph.by_name
    calls = [nodes[line.node] for line in program.instructions]
    return (
        [(n.op, [(t.shape, t.dtype) for t in n.outputs], n.moved_bytes) for n in calls],
        liveness(program, None).bytes_at,
        program.graph.resident_bytes(Role.STATE),
        program.graph.resident_bytes(Role.PARAMETER),
    )


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("held", [("0.", "1."), ("2.", "3."), ("0.weight", "3."), ("1.bias",)])
def test_an_update_restricted_to_some_parameters_equals_its_capture(
    name: str, held: tuple[str, ...]
) -> None:
    make: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer] = OPTIMIZERS[name]
    names = [n for n, _ in model().named_parameters()]
    ours = {n for n in names if n.startswith(held)}
    some = update_of(capture_update(model(), make), ours)
    captured = capture_update(model(), make, without_gradient=frozenset(names) - ours)
    assert some is not None
    assert some.problems() == []
    assert told(some) == told(captured)


def test_nodes_of_several_parameters_cannot_be_restricted() -> None:
    joint = capture_update(model(), partial(torch.optim.SGD, lr=0.1, momentum=0.9, foreach=True))
    assert update_of(joint, {"0.weight"}) is None
