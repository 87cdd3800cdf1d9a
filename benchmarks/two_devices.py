"""Trains a model that needs twice the memory of a device on two devices, under a kernel limit.

    python benchmarks/two_devices.py

Each device is declared to have half of what plain PyTorch needs for a step. Plain PyTorch on one
device, and two ranks under a plan for that budget, run under RLIMIT_DATA from the first line on:
what the process holds besides its step (found as in hard_limit.py), plus the budget, plus an
allowance. Plain PyTorch has to die. The ranks have to finish 20 steps with the losses of plain
PyTorch without a limit.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import steelyard as sy
from benchmarks.hard_limit import (
    ALLOWANCE_BYTES,
    MALLOC,
    MOST_OFF,
    OUT_OF_MEMORY,
    SETTLED,
    STEPS,
    Plain,
    Told,
    beside_the_step,
    figure,
    losses_of,
    off,
    tell,
    warm_up,
)
from benchmarks.honest_budget import OPTIMIZER
from tests.zoo.case import next_token_loss, tokens
from tests.zoo.own import GPT

RANKS = 2


def main() -> None:
    if sys.argv[1:2] == ["--child"]:
        child(sys.argv[2], json.loads(sys.argv[3]))
        return
    with tempfile.TemporaryDirectory(prefix="steelyard-two-") as folder:
        costs, plan = f"{folder}/costs.sqlite", f"{folder}/gpt.plan.toml"
        (planned,) = run("plan", [{"plan": plan}], costs)
        print(json.dumps(planned), flush=True)
        (free,) = run("plain", [{}], costs)
        probes = run("rank", _ranks(folder, "probe", plan, steps=SETTLED), costs)
        room = planned["budget"] + ALLOWANCE_BYTES
        (alone,) = run("plain", [{"limit": free["held"] + room}], costs)
        limits = [probe["held"] + room for probe in probes]
        ours = run("rank", _ranks(folder, "limited", plan, limits=limits), costs)
    row = {
        "needs": planned["eager"],
        "budget": planned["budget"],
        "measured": [told.get("measured") for told in ours],
        "plain": alone.get("died") or "finished",
        "ranks": [told.get("died") or f"finished {len(told['losses'])} steps" for told in ours],
        "losses": [ours[0]["losses"][:1], ours[0]["losses"][-1:]],
    }
    print(json.dumps(row), flush=True)
    figures = [
        figure("what plain PyTorch needs / the budget", planned["eager"] / planned["budget"], 2.0,
               at_least=True),
        figure("plain PyTorch that lived under the limit", int("died" not in alone), 0),
        figure("ranks that died under it", sum("died" in told for told in ours), 0),
        figure("budgets exceeded", sum(n > planned["budget"] for n in row["measured"] if n), 0),
        figure("losses off", max(off(told["losses"], free["losses"]) for told in ours), MOST_OFF),
    ]  # fmt: skip
    print(json.dumps({**figures[-1], "ok": all(f["ok"] for f in figures), "figures": figures}))


def _ranks(
    folder: str, name: str, plan: str, *, steps: int = STEPS, limits: list[int] | None = None
) -> list[Told]:
    return [
        {
            "rank": rank, "store": f"{folder}/{name}", "plan": plan, "steps": steps,
            **({"limit": limits[rank]} if limits else {}),
        }
        for rank in range(RANKS)
    ]  # fmt: skip


def run(role: str, tasks: list[Told], costs: str) -> list[Told]:
    """Run the tasks and return the result of each; if one ran out of memory, with its message."""
    environment = {
        **os.environ, **MALLOC, "STEELYARD_CACHE": costs, "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
    }  # fmt: skip
    processes = [
        subprocess.Popen(
            [sys.executable, __file__, "--child", role, json.dumps(task)],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for task in tasks
    ]
    return [
        _told(role, task, process, *process.communicate())
        for task, process in zip(tasks, processes, strict=True)
    ]


def _told(role: str, task: Told, process: Any, said: str, complained: str) -> Told:
    told: Told = {"losses": []}
    for line in said.splitlines():
        if line.startswith('{"loss":'):
            told["losses"].append(json.loads(line)["loss"])
        elif line.startswith("{"):
            told |= json.loads(line)
    if process.returncode == 0:
        return told
    signs = [x for x in complained.splitlines() if any(sign in x for sign in OUT_OF_MEMORY)]
    if "limit" not in task or not (signs or role == "rank"):
        raise RuntimeError(f"{role} failed otherwise: {complained[-2000:]}")
    why = signs[-1].strip() if signs else "with the other"
    return {**told, "died": f"in step {len(told['losses']) + 1}: {why[:200]}"}


# --- in a process of its own ----------------------------------------------------------------------


def child(role: str, task: Told) -> None:
    if "limit" in task:
        resource.setrlimit(resource.RLIMIT_DATA, (task["limit"], task["limit"]))
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    if role == "plan":
        plan(task["plan"])
        return
    warm_up()
    if role == "rank":
        os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[task["rank"]]})
        dist.init_process_group(
            "gloo", init_method=f"file://{task['store']}", rank=task["rank"], world_size=RANKS
        )
    model, loss, batch = case()
    if role == "rank":
        step = sy.load(task["plan"], model, loss, batch, optimizer=OPTIMIZER).apply(model)
    else:
        step = Plain(model, loss, 1)
    for number, value in enumerate(losses_of(step, batch, task.get("steps", STEPS)), 1):
        tell(loss=value)
        if number == SETTLED and "limit" not in task:
            tell(held=beside_the_step(model, batch, step))
    if role == "rank":
        tell(measured=step.receipt().measured.memory_bytes)
        dist.barrier()
        dist.destroy_process_group()


def plan(path: str) -> None:
    model, loss, batch = case()
    cluster = sy.Cluster.here(ranks=RANKS)
    alone = sy.plan(model, loss, batch, optimizer=OPTIMIZER, cluster=cluster)
    eager = alone.plan.before.peak.nbytes
    planned = alone.what_if(memory=eager // 2)
    planned.save(path)
    rules = planned.plan.decisions.rules
    tell(
        budget=eager // 2,
        eager=eager,
        predicted=planned.plan.predicted.peak.nbytes,
        taken=sorted({rule.trade for rule in rules}),
    )


def case() -> Any:
    torch.manual_seed(0)
    model = GPT(layers=4, width=512, heads=8, vocabulary=8192, length=128, dropout=0.0, fused=True)
    return model, next_token_loss, tokens(8, 128, 8192)


if __name__ == "__main__":
    main()
