"""Measures an uneven split of the batch between two ranks, one of which has half of a core.

    python benchmarks/mixed.py

Rank 1 runs in a control group whose quota is half of a core, rank 0 without one, each on a core of
its own. The ranks measure their speeds, and the plan is the one of `steelyard plan --ranks 2`. The
plan, the even split of the same plan, and the fast rank alone with the whole batch run one step
each in turn, in the same processes. The figure is the throughput of the plan over that of the fast
rank alone, over the 1.5 that both have together. A rank that waits uses none of its quota. Needs
two idle cores, and the right to make a control group with a quota (version 2 or 1).

Two cores that share one physical core do less than 1.5 times the work of one of them alone. What
they reach is measured in the same turns: each rank trains for itself at the same time, the slow
one on half of the batch, without any exchange. ``together`` is the sum of their throughputs over
that of the fast one alone, and ``of_together`` is the plan's share of it. The target stays 1.5.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import steelyard as sy
from benchmarks._turns import in_turn
from benchmarks.runner import interval
from steelyard.ir.parallel_layout import ParallelLayout
from steelyard.ir.rule_kinds import BatchSharding
from steelyard.measure.cache import CostCache
from steelyard.measure.links.link_fit import fitted
from steelyard.measure.links.local_ranks import command_of
from steelyard.measure.links.probe import context_of
from steelyard.plan_files.plan_file import read_decisions, write_decisions
from tests.zoo.case import next_token_loss, tokens
from tests.zoo.own import GPT

RANKS, BATCH, TURNS, WARM_UP = 2, 96, 16, 2
QUOTA, IDEAL, TARGET = 0.5, 1.5, 0.9
# Short compared with a step, so that every step gets its share of the quota.
PERIOD_SECONDS = 0.01
OPTIMIZER = partial(torch.optim.AdamW, lr=1e-3)
SAME = 1e-3


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="steelyard-mixed-") as name, quota(QUOTA) as group:
        folder = Path(name)
        os.environ["STEELYARD_CACHE"] = str(folder / "costs.sqlite")
        speeds = _measured(folder, group)
        print(json.dumps({"speeds": speeds}), flush=True)
        shares, predicted = _planned(folder)
        print(json.dumps({"shares": shares, "predicted": predicted}), flush=True)
        commands = [[__file__, "--rank", str(folder), str(rank)] for rank in range(RANKS)]
        _on_ranks(folder, group, commands)
        seconds = json.loads((folder / "seconds.json").read_text())
        apart = [json.loads((folder / f"apart.{rank}.json").read_text()) for rank in range(RANKS)]
    both = [
        alone * (1 / fast + QUOTA / slow)
        for alone, fast, slow in zip(seconds["alone"], *apart, strict=True)
    ]
    ratios = [a / b for a, b in zip(seconds["alone"], seconds["plan"], strict=True)]
    low, gained, high = interval(ratios)
    print(
        json.dumps(
            {
                "name": "mixed: throughput on two ranks, one at half speed / the ideal 1.5",
                "value": round(gained / IDEAL, 3),
                "interval": [round(low / IDEAL, 3), round(high / IDEAL, 3)],
                "target": TARGET,
                "ok": gained / IDEAL >= TARGET and len(set(shares)) > 1,
                "speeds": speeds,
                "shares": shares,
                "predicted_seconds": predicted,
                "seconds": {side: round(median(took), 4) for side, took in seconds.items()},
                "together": round(median(both), 3),
                "of_together": round(
                    median(gain / most for gain, most in zip(ratios, both, strict=True)), 3
                ),
                "even": round(median(seconds["alone"]) / median(seconds["even"]) / IDEAL, 3),
            }
        )
    )


# --- the quota ------------------------------------------------------------------------------------


@contextlib.contextmanager
def quota(share: float) -> Iterator[Path]:
    """Make a control group with this share of one core, and yield its folder."""
    period = round(PERIOD_SECONDS * 1e6)
    given, root = round(share * period), Path("/sys/fs/cgroup")
    is_second = (root / "cgroup.controllers").exists()
    group = (root if is_second else root / "cpu") / f"steelyard-mixed-{os.getpid()}"
    try:
        if is_second:
            (root / "cgroup.subtree_control").write_text("+cpu")
        group.mkdir()
    except OSError as error:
        raise SystemExit(f"no control group with a quota can be made here: {error}") from None
    try:
        if is_second:
            (group / "cpu.max").write_text(f"{given} {period}")
        else:
            (group / "cpu.cfs_period_us").write_text(str(period))
            (group / "cpu.cfs_quota_us").write_text(str(given))
        yield group
    finally:
        group.rmdir()


def _on_ranks(folder: Path, group: Path, commands: Sequence[Sequence[str]]) -> None:
    """Run a Python command for each rank, the last one in the control group from its start."""
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    entering = ["sh", "-c", 'echo $$ > "$0" && exec "$@"', str(group / "cgroup.procs")]
    ranks = [
        subprocess.Popen(
            [
                *(entering if rank == RANKS - 1 else ()),
                *(sys.executable, *command),
            ],
            env=environ,
        )
        for rank, command in enumerate(commands)
    ]
    codes = [rank.wait() for rank in ranks]
    (folder / "rendezvous").unlink(missing_ok=True)
    if any(codes):
        raise SystemExit(f"ranks ended with {codes}")


def _measured(folder: Path, group: Path) -> list[float]:
    """Measure the ranks, write their rates to the cost cache, and return their speeds."""
    commands = [command_of(rank, folder=str(folder), num_ranks=RANKS) for rank in range(RANKS)]
    _on_ranks(folder, group, commands)
    said = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(RANKS)]
    found = fitted(said)
    CostCache().write_rates(context_of(RANKS), found)
    return [round(found[f"speed of rank {rank}"], 3) for rank in range(RANKS)]


def _planned(folder: Path) -> tuple[list[int], dict[str, float]]:
    """Write the plan and the same plan with equal shares.

    Return the shares of the plan, and the predicted seconds of both and of one rank alone.
    """
    model, loss, batch = case()
    planned = sy.plan(model, loss, batch, optimizer=OPTIMIZER, cluster=sy.Cluster.here(ranks=RANKS))
    decisions = planned.plan.decisions
    write_decisions(folder / "plan.toml", decisions)
    rules = tuple(
        replace(rule, shares=()) if isinstance(rule, BatchSharding) else rule
        for rule in decisions.rules
    )
    write_decisions(folder / "even.toml", replace(decisions, rules=rules))
    even = sy.load(folder / "even.toml", model, loss, batch, optimizer=OPTIMIZER)
    steps = {
        "plan": planned.predicted, "even": even.predicted, "alone": planned.plan.unplanned.metrics,
    }  # fmt: skip
    predicted = {side: round(metrics.step_seconds.value, 4) for side, metrics in steps.items()}
    return list(ParallelLayout.of(decisions.rules).portions), predicted


# --- one rank -------------------------------------------------------------------------------------


def work(folder: Path, rank: int) -> None:
    os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[rank]})
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=RANKS
    )
    sides: dict[str, Callable[[], Tensor]] = {}
    for side in ("plan", "even"):
        assert ParallelLayout.of(read_decisions(folder / f"{side}.toml").rules).num_ranks == RANKS
        model, loss, batch = case()
        planned = sy.load(folder / f"{side}.toml", model, loss, batch, optimizer=OPTIMIZER)
        dist.barrier()
        sides[side] = partial(planned.apply(), batch)
    sides["alone"] = _alone() if rank == 0 else lambda: torch.zeros(())
    took: list[float] = []
    sides["apart"] = _timed(_alone(share=QUOTA if rank else 1.0), took)
    losses = {side: [float(step()) for _ in range(WARM_UP)] for side, step in sides.items()}
    if rank == 0:
        # The steps are comparable only if they compute the same losses.
        assert all(
            abs(a - b) <= SAME * abs(b)
            for side in ("plan", "even")
            for a, b in zip(losses[side], losses["alone"], strict=True)
        ), losses
    seconds = in_turn(sides, TURNS)
    if rank == 0:
        (folder / "seconds.json").write_text(json.dumps(seconds))
    (folder / f"apart.{rank}.json").write_text(json.dumps(took[WARM_UP:]))
    dist.barrier()
    dist.destroy_process_group()


def _alone(*, share: float = 1.0) -> Callable[[], Tensor]:
    """Return a step that trains by a plan of this rank alone, on this share of the batch.

    In a group of ranks, such a step leaves the optimizer to the caller.
    """
    model, loss, batch = case(share)
    step = sy.plan(model, loss, batch).apply(sums_gradients=True)
    optimizer = OPTIMIZER(model.parameters())

    def train() -> Tensor:
        optimizer.zero_grad()
        value = step.backward(batch)
        optimizer.step()
        return value

    return train


def _timed(step: Callable[[], Tensor], took: list[float]) -> Callable[[], Tensor]:
    def timed() -> Tensor:
        begin = time.perf_counter()
        loss = step()
        took.append(time.perf_counter() - begin)
        return loss

    return timed


def case(share: float = 1.0) -> tuple[nn.Module, Any, Any]:
    torch.manual_seed(0)
    model = GPT(
        layers=4, width=256, heads=4, vocabulary=512, length=128, dropout=0.0, fused=True
    )  # fmt: skip
    return model, next_token_loss, tokens(round(BATCH * share), 128, 512)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--rank"]:
        work(Path(sys.argv[2]), int(sys.argv[3]))
    else:
        main()
