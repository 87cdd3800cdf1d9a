"""A model with a large table on ranks of gloo, through the public API: its gradients are sent as
rows. Not for checking the results: the tests do that."""

from __future__ import annotations

import copy
import functools
import os
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from steelyard.trades.accumulate import AccumulateRule
from steelyard.trades.overlap import OverlapRule
from steelyard.trades.shard_batch import ShardBatchRule
from steelyard.trades.sparse_gradients import SparseGradientsRule
from steelyard.comm.json_gather import gathered
import steelyard as sy
from steelyard.planner.session import PlanningSession, PlanRequest
from steelyard.plans.budget import Budget
from steelyard.plans.plan import Decisions
from steelyard.plan_files.plan_file import write_decisions
from steelyard.ir.rule import Rule
from tests.system.dist.told import told
from tests.torch.passes.data_parallel.test_sparse_embedding_grads import Words, _loss, _source
from tests.harness import in_a_hurry

OPTIMIZER = partial(torch.optim.AdamW, lr=1e-2)
STEPS = 20


def in_rows(rank: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        paths = gathered(folder, str)
        with in_a_hurry(Path(os.environ["STEELYARD_CACHE"])):
            found = {str(parts): _trained(parts, rank, Path(paths[0])) for parts in (1, 2)}
            dist.barrier()
    return found


@functools.cache
def _look(count: int) -> PlanningSession:
    """Return one planning session for both numbers of micro-batches, because they plan the same
    step."""
    torch.manual_seed(0)
    model = Words()
    return PlanRequest(
        model=model, loss=_loss, batch=_source(model).batch, optimizer=OPTIMIZER, budget=Budget(),
        cluster=sy.Cluster.here(ranks=count), runner="python", title="",
        on_progress=lambda _: None,
    ).capture_and_price()  # fmt: skip


def _trained(parts: int, rank: int, folder: Path) -> dict[str, Any]:
    torch.manual_seed(0)
    model, count = Words(), dist.get_world_size()
    batch = _source(model).batch
    plain = copy.deepcopy(model)
    path = folder / f"{parts}.plan.toml"
    if rank == 0:
        rules = [
            ShardBatchRule(ranks=count, bucket=1 << 16),
            OverlapRule(window=2),
            SparseGradientsRule(parameter="word.weight", format="rows"),
            *([AccumulateRule(micro_batches=parts)] if parts > 1 else []),
        ]
        made = Decisions(target=_look(count).target(), budget=Budget(), rules=tuple(sorted(rules)))
        write_decisions(path, made)
    dist.barrier()
    planned = sy.load(path, model, _loss, batch, optimizer=OPTIMIZER)
    dist.barrier()
    step = planned.apply()
    losses = [float(step(batch)) for _ in range(STEPS)]
    optimizer, expected = OPTIMIZER(plain.parameters()), []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = _loss(plain, batch)
        loss.backward()
        optimizer.step()
        expected.append(float(loss))
    apart = [
        float((a - b).abs().max()) for a, b in zip(model.parameters(), plain.parameters())
    ]
    return {
        **told(planned, step, batch),
        "losses": losses,
        "expected": expected,
        "apart": max(apart),
    }
