"""Plans that change while they run, through the public API, between ranks of gloo.

Not for checking the results: the tests do that.
"""

from __future__ import annotations

import contextlib
import copy
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn

from steelyard.trades.overlap import OverlapRule
from steelyard.trades.shard_batch import ShardBatchRule
from steelyard.comm.json_gather import gathered
import steelyard as sy
from steelyard.api import replan as adapting
from steelyard.api import replan_search
from steelyard.api.background import BackgroundProcess
from steelyard.planner.session import PlanningSession, PlanRequest, Runner
from steelyard.api.train import run_workload
from steelyard.plans.budget import Budget
from steelyard.ir.rule import of_kind
from steelyard.ir.rule_kinds import GradientCompression
from steelyard.ir.collective import SLOTS
from steelyard.hardware.link import Link
from steelyard.plans.plan import Decisions
from steelyard.plan_files.plan_file import read_decisions, write_decisions
from steelyard.ir.rule import Rule
from steelyard.search.ranks import retune as search
from steelyard.search.ranks.pace import Pace
from tests.system.dist import coded
from tests.harness import in_a_hurry
from tests.zoo.case import next_token_loss, tokens
from tests.zoo.own import GPT

OPTIMIZER = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
EVERY, STEPS = 4, 24
# SLOW is a hundred times slower than any loopback, so that exchanges take nearly the whole step.
SLOW, FAST = 2e5, 1e11


def adapted(rank: int) -> dict[str, Any]:
    """Run three plans whose ranks share the batch unequally, with simulated link measurements.

    In the first case the link becomes slow, in the second a plan for a slow link finds a fast one,
    and in the third the link is as planned. The results do not depend on the speed of this machine.
    """
    with _together() as at:
        return {
            "slower": _run(rank, at / "slower", codes=False, now=SLOW, shares=(2, 1)),
            "faster": _run(rank, at / "faster", codes=True, now=FAST),
            "same": _run(rank, at / "same", codes=False, now=FAST),
        }


def compiled(rank: int) -> dict[str, Any]:
    with _together() as at:
        return {"slower": _run(rank, at / "slower", codes=False, now=SLOW, runner="inductor")}


@contextlib.contextmanager
def _together() -> Iterator[Path]:
    """Yield a folder for all ranks, which exists until all are done."""
    with tempfile.TemporaryDirectory() as folder:
        paths = gathered(folder, str)
        with in_a_hurry(Path(os.environ["STEELYARD_CACHE"])):
            yield Path(paths[0])
            dist.barrier()


def standing_by(rank: int) -> dict[str, Any]:
    """Run three steps on both ranks, three on the first alone, and three on both again.

    State as in a checkpoint is compared at the end with plain PyTorch on the whole batch.
    """
    with _together() as at:
        path = at / "train.plan.toml"
        workload = _small()
        if rank == 0:
            session = _look(workload, "python")
            rules = (
                ShardBatchRule(ranks=2, bucket=1 << 16),
                OverlapRule(window=2),
            )
            write_decisions(
                path, Decisions(target=session.target(), budget=Budget(), rules=rules)
            )
        dist.barrier()
        model, batch = workload.model, workload.first_batch()
        plain = copy.deepcopy(model)
        planned = sy.load(path, model, workload.loss, batch, optimizer=OPTIMIZER)
        step = planned.apply()
        losses, held = [], []
        for members in ((0, 1), (0,), (0, 1)):
            rules = planned.plan.decisions.rules if len(members) == 2 else ()
            decisions = replace(planned.plan.decisions, rules=rules)
            if losses:
                step.switch_plan(replace(planned.plan, decisions=decisions), members)
            before = _values(model)
            losses += [float(step.live(batch)) for _ in range(3)]
            held.append(not torch.equal(before, _values(model)))
            dist.barrier()
        own = _values(model)
        other = own.clone()
        dist.broadcast(other, src=0)
    optimizer, expected = OPTIMIZER(plain.parameters()), []
    for _ in range(9):
        optimizer.zero_grad()
        loss = workload.loss(plain, batch)
        loss.backward()
        optimizer.step()
        expected.append(float(loss))
    return {
        "losses": losses,
        "expected": expected,
        "trained": held,
        "alike": torch.equal(own, other),
        "error": float((own - _values(plain)).abs().max()),
    }


def _values(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().reshape(-1).clone() for p in model.parameters()])


def _run(
    rank: int,
    folder: Path,
    *,
    codes: bool,
    now: float,
    shares: tuple[int, ...] = (),
    runner: Runner = "python",
) -> dict[str, Any]:
    folder.mkdir(exist_ok=True)
    path = folder / "train.plan.toml"
    workload = _workload() if runner == "python" else _small()
    if rank == 0:
        rules: tuple[Rule, ...] = (
            ShardBatchRule(ranks=2, bucket=1 << 16, shares=shares),
            OverlapRule(window=2),
        )
        allowed = Budget(accuracy_loss=0.5)
        session = _look(workload, runner)
        if codes:
            decided = coded._decided(session, "ternary", 1, 1 << 16, 0)
            rules += of_kind(decided.rules, GradientCompression)
        decisions = Decisions(target=session.target(), budget=allowed, rules=rules)
        write_decisions(path, decisions)
    dist.barrier()
    planned = sy.load(
        path, workload.model, workload.loss, workload.first_batch(), optimizer=OPTIMIZER
    )
    # Shared memory is left out, because with it exchanges would be fast on any link.
    prices = planned.session.prices
    links = {name: link for name, link in prices.costs.links.items() if name != SLOTS}
    if now == FAST:
        links["data"] = replace(links["data"], bytes_per_second=FAST)
    prices.costs = replace(prices.costs, links=links)
    if codes:  # make the plan as if exchanges took most of the step
        planned = _for_a_slow_link(planned)
    measured = adapting.measured_now

    def link(before: Link, **where: Any) -> Link:
        # The measured time of a message depends on the load at this moment, so only the rate is
        # replaced.
        measured(before, **where)
        return replace(before, bytes_per_second=now)

    # The codes of such a small model save next to nothing.
    gain = 0.0 if codes else search.LEAST_GAIN
    losses: list[float] = []
    with (
        mock.patch.object(search, "LEAST_GAIN", gain),
        mock.patch.object(replan_search, "LEAST_GAIN", gain),
        mock.patch.object(adapting, "measured_now", link),
        # This test does not depend on the present speed of the machine.
        mock.patch.object(Pace, "add", _off_after(EVERY)),
        mock.patch.object(adapting, "BackgroundProcess", Awaited),
    ):
        receipt = run_workload(
            planned, workload, steps=STEPS, adapt=path,
            on_step=lambda report: losses.append(report.loss),
        )  # fmt: skip
    files = sorted(p.name for p in folder.glob("*.adapted-*.plan.toml"))
    written = read_decisions(folder / files[0]).rules if files else ()
    return {
        "losses": losses,
        "codes": sorted({r.trade for r in of_kind(receipt.plan.decisions.rules, GradientCompression)}),
        "files": files,
        "as_written": not files or written == receipt.plan.decisions.rules,
        "named": receipt.written.name if receipt.written else None,
        "notes": receipt.measured.notes,
        "loses": receipt.plan.predicted.metrics.accuracy_loss,
        "predicted": planned.predicted.step_seconds.value,
        "predicted_then": receipt.plan.predicted.metrics.step_seconds.value,
        "measured": receipt.measured.step_seconds,
        "old": sorted(r.trade for r in read_decisions(path).rules),
    }


class Awaited(BackgroundProcess):
    """Waits for the background process, because so few steps would end before it."""

    def is_done(self) -> bool:
        while not super().is_done():
            time.sleep(0.02)
        return True


def _off_after(steps: int) -> Callable[[Pace, float, float], bool]:
    """Report steps as too slow from this one on, until the plan is switched."""
    taken = 0

    def add(*_: object) -> bool:
        nonlocal taken
        taken += 1
        return taken == steps

    return add


def _for_a_slow_link(planned: Any) -> Any:
    from steelyard.api.planned import Planned
    from steelyard.planner.planner import Planner

    links = planned.session.prices.costs.links
    session = planned.session.with_link(replace(links["data"], bytes_per_second=SLOW))
    predicted = session.priced(session.apply_rules(planned.plan.decisions.rules))
    return Planned(Planner(session), replace(planned.plan, predicted=predicted))


def _look(workload: sy.Workload, runner: Runner) -> PlanningSession:
    return PlanRequest(
        model=workload.model, loss=workload.loss, batch=workload.first_batch(),
        optimizer=OPTIMIZER, budget=Budget(), cluster=sy.Cluster.here(ranks=2), runner=runner,
        title="", on_progress=lambda _: None,
    ).capture_and_price()  # fmt: skip


def _workload() -> sy.Workload:
    torch.manual_seed(0)
    model = GPT(layers=2, width=64, heads=2, vocabulary=96, length=16, dropout=0.0)
    batch = tokens(12, 16, 96)
    return sy.Workload(model, next_token_loss, [batch], optimizer=OPTIMIZER)


def _small() -> sy.Workload:
    """Return a small model, because compiling takes a second for each segment."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(128, 256), nn.ReLU(), nn.Linear(256, 128))
    batch = {"x": torch.randn(64, 128), "y": torch.randn(64, 128)}
    return sy.Workload(model, _apart, [batch], optimizer=OPTIMIZER)


def _apart(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return nn.functional.mse_loss(model(batch["x"]), batch["y"])
