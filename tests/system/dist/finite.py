"""Training in which one rank's batch, loss or gradients are the first that are not finite.

Not for checking the results: the tests do that.
"""

from __future__ import annotations

import os
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from steelyard.trades.accumulate import AccumulateRule
from steelyard.trades.shard_batch import ShardBatchRule
from steelyard.trades.shared_memory_transfer import SharedMemoryTransferRule
from steelyard.api.rank_context import RankContext
from steelyard.capture.step import CapturedStep
from steelyard.comm.devices import torch_device_of
from steelyard.errors import NonFinite
from steelyard.ir.parallel_layout import DATA, ParallelLayout
from steelyard.ir.program import Program
from steelyard.ir.rule import Rule
from steelyard.plans.trade import apply_rules
from steelyard.run.codegen import emit
from steelyard.run.finite_check import FiniteWatch
from steelyard.run.launch.coordination import InGroup
from steelyard.run.step import LiveStep
from steelyard.run.train_loop import train
from steelyard.trades import TRADES
from tests.harness import in_a_hurry
from tests.system.dist.pipelines import _in_stages
from tests.system.dist.planned import OPTIMIZER, Case, _planned

# The first step that computes values that are not finite.
WRONG = 4


def _model() -> nn.Module:
    return nn.Sequential(*[nn.Linear(16, 16) for _ in range(4)])


def _loss(model: nn.Module, batch: Any) -> Tensor:
    found = model(batch["x"]).square().sum(-1)
    value: Tensor = (found * batch["scale"]).sqrt().mean() + batch["logged"].log().mean()
    return value


def _batch() -> dict[str, Tensor]:
    return {"x": torch.randn(8, 16), "scale": torch.ones(8), "logged": torch.ones(8)}


# The fault is in the last sample, which the last rank holds; or in all samples.
_FAULTS: dict[str, tuple[str, float]] = {
    "batch": ("x", float("nan")),
    "loss": ("logged", -1.0),
    "gradients": ("scale", 0.0),  # the derivative of the square root is infinite at zero
}


def _made() -> tuple[nn.Module, Any, Any]:
    return _model(), _loss, _batch()


_OVER_BATCH = ShardBatchRule(ranks=2, bucket=1 << 20)
LAYOUTS: dict[str, tuple[Rule, ...]] = {
    "whole": (_OVER_BATCH,),
    "in micro-batches": (_OVER_BATCH, AccumulateRule(micro_batches=2)),
    "through slots": (_OVER_BATCH, SharedMemoryTransferRule(messages="exchanges")),
    "in stages": (),
}


def batches(fault: str) -> list[Any]:
    name, value = _FAULTS[fault]
    found = [_batch() for _ in range(8)]
    found[WRONG - 1][name][-1] = value
    return found


def all_of_them(rank: int) -> dict[str, Any]:
    return {f"{name}: {fault}": _trained(name, fault) for name in LAYOUTS for fault in _FAULTS}


def _trained(layout: str, fault: str) -> dict[str, Any]:
    torch.manual_seed(0)
    step = _live(layout)
    try:
        train(step, batches(fault), steps=8, coordinator=InGroup())
    except NonFinite as error:
        return {"error": str(error), "rank": error.rank}
    raise AssertionError("a loss that is not finite goes on")


def _live(layout: str) -> LiveStep:
    model, loss, batch = _made()
    source = CapturedStep(model=model, loss=loss, batch=batch)
    if layout == "in stages":
        program = _in_stages(source, "1F1B", ("1",))
    else:
        base = Program.plain(source.captured().graph, rank=dist.get_rank())
        program = apply_rules(base, LAYOUTS[layout], trades=TRADES, source=source)
    captured = source.captured(micro_batches=program.units, share=program.share)
    reduction = source.reduction().value
    ranks, watch = RankContext.of(program.layout, torch_device_of(model)), FiniteWatch()
    return LiveStep(
        model,
        program,
        constants=captured.constants,
        batch=batch,
        optimizer=OPTIMIZER(model.parameters()),
        parts=ranks.parts_of(model, program),
        reduction=reduction,
        rank=program.layout.place(ranks.rank, DATA),
        in_stages=ranks.in_stages,
        channels=ranks.channels,
        runner=partial(emit, channels=ranks.channels, watch=watch),
        finite=watch,
    )


def in_ones_own_loop(rank: int) -> list[str]:
    """In a user's loop whose passes accumulate, gradients that are not finite are found one step
    later."""
    case, cache = Case(_made, ParallelLayout(data=2)), Path(os.environ["STEELYARD_CACHE"])
    with tempfile.TemporaryDirectory() as folder, in_a_hurry(cache):
        first = Path(InGroup().words(folder))
        torch.manual_seed(0)
        model, loss, batch = case.make()
        path = first / "train.plan.toml"
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
