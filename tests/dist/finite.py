"""Training in which the values of one rank are not finite first: in the batch, the loss, gradients.

Not the judgement: that is the tests'.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from steelyard.api import Workload, run_workload
from steelyard.core.errors import NonFinite
from steelyard.core.layout import Layout
from tests.dist.planned import OPTIMIZER, Case, _planned
from tests.harness import in_a_hurry

# Steps begin to go wrong with this one.
WRONG = 4


def _model() -> nn.Module:
    return nn.Sequential(*[nn.Linear(16, 16) for _ in range(4)])


def _loss(model: nn.Module, batch: Any) -> Tensor:
    found = model(batch["x"]).square().sum(-1)
    value: Tensor = (found * batch["scale"]).sqrt().mean() + batch["logged"].log().mean()
    return value


def _batch() -> dict[str, Tensor]:
    return {"x": torch.randn(8, 16), "scale": torch.ones(8), "logged": torch.ones(8)}


# Of the last sample, which is of the last rank; or of all.
_FAULTS: dict[str, tuple[str, float]] = {
    "batch": ("x", float("nan")),
    "loss": ("logged", -1.0),
    "gradients": ("scale", 0.0),  # the root of zero has no derivative
}


def _made() -> tuple[nn.Module, Any, Any]:
    return _model(), _loss, _batch()


LAYOUTS = {
    "whole": Case(_made, Layout(batch=2)),
    "in micro-batches, with states in shares": Case(
        _made, Layout(batch=2), micro_batches=2, with_states=True
    ),
    "through slots": Case(_made, Layout(batch=2), in_slots=True),
    "in stages": Case(_made, Layout(pipeline=2), micro_batches=4),
}


def batches(fault: str) -> list[Any]:
    name, value = _FAULTS[fault]
    found = [_batch() for _ in range(8)]
    found[WRONG - 1][name][-1] = value
    return found


def all_of_them(rank: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        paths = [folder]
        dist.broadcast_object_list(paths)
        with in_a_hurry(Path(os.environ["STEELYARD_CACHE"])):
            for name, case in LAYOUTS.items():
                for fault in _FAULTS:
                    path = Path(paths[0]) / "train.plan.toml"
                    found[f"{name}: {fault}"] = _trained(case, fault, rank, path)
            dist.barrier()
    return found


def _trained(case: Case, fault: str, rank: int, path: Path) -> dict[str, Any]:
    torch.manual_seed(0)
    model, loss, batch = case.make()
    given = batches(fault)
    planned = _planned(case, model, loss, batch, rank, path)
    step = planned.apply()
    for one in given:
        step(one)
    (note,) = (n for n in step.receipt().measured.notes if "was not finite" in n)
    torch.manual_seed(0)
    model = case.make()[0]
    workload = Workload(model, loss, given, optimizer=OPTIMIZER)
    try:
        run_workload(_planned(case, model, loss, batch, rank, path), workload, steps=8)
    except NonFinite as error:
        return {"note": note, "error": str(error), "rank": error.rank}
    raise AssertionError("a loss that is not finite goes on")


def in_ones_own_loop(rank: int) -> list[str]:
    """Of passes that add up, gradients of which one is not finite are found a step later."""
    case = LAYOUTS["whole"]
    with tempfile.TemporaryDirectory() as folder:
        paths = [folder]
        dist.broadcast_object_list(paths)
        with in_a_hurry(Path(os.environ["STEELYARD_CACHE"])):
            torch.manual_seed(0)
            model, loss, batch = case.make()
            path = Path(paths[0]) / "train.plan.toml"
            step = _planned(case, model, loss, batch, rank, path).apply()
            optimizer = OPTIMIZER(model.parameters())
            for number, one in enumerate(batches("gradients"), start=1):
                step.backward(one)
                if number % 2 == 0:
                    optimizer.step()
                    optimizer.zero_grad()
            measured = step.receipt().measured
            dist.barrier()
    memory = [f"{one.rank} {one.measured_bytes}" for one in measured.ranks]
    return [*(n for n in measured.notes if "was not finite" in n), *memory]
