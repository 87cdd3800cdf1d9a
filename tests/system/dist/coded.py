"""Compressed gradients between ranks, through the public API, compared with a plain implementation.

Not for checking the results: the tests do that.
"""

from __future__ import annotations

import copy
import functools
import gc
import math
import os
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from steelyard.trades.accumulate import AccumulateRule
from steelyard.trades.overlap import OverlapRule
from steelyard.trades.shard_batch import ShardBatchRule
from steelyard.comm.json_gather import gathered
import steelyard as sy
from steelyard.planner.session import PlanningSession, PlanRequest, Runner
from steelyard.plans.budget import Budget
from steelyard.plans.plan import Decisions
from steelyard.plan_files.plan_file import write_decisions
from steelyard.ir.program import Program
from steelyard.ir.rule import Rule
from steelyard.trades.gradient_compression import (
    LowRankGradients,
    QuantizedGradients,
    TernaryGradients,
    TopKGradients,
)
from tests.system.dist.told import told
from tests.harness import in_a_hurry
from tests.zoo.case import next_token_loss, tokens
from tests.zoo.own import GPT

OPTIMIZER = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
STEPS, BLOCK = 8, 1024
CODECS = {
    "ternary": TernaryGradients(), "int8": QuantizedGradients(), "bfloat16": QuantizedGradients(),
    "factors": LowRankGradients(), "largest": TopKGradients(),
}  # fmt: skip
RANK = 4
# Maps each case to its number of micro-batches and its bucket size in bytes.
CASES = {
    "ternary": (1, 1 << 16), "int8": (1, 1 << 20), "bfloat16": (2, 1 << 16),
    "ternary in parts": (2, 1 << 16), "factors": (1, 1 << 18), "largest": (1, 1 << 16),
    "ternary in unequal shares": (1, 1 << 16),
}  # fmt: skip
UNEQUAL = {"ternary in unequal shares": (2, 1)}
COMPILED = {"ternary, compiled": (1, 1 << 20)}
# The first steps of a compiled plan send uncompressed gradients, so the plan is compiled twice.
LEAD = 2
# These cases take another path on more than two ranks: in parts, or by all-reduce.
MANY = ("ternary", "bfloat16", "factors")


def in_codes(rank: int) -> dict[str, Any]:
    return _all_trained(tuple(CASES) if dist.get_world_size() == 2 else MANY, rank)


def compiled(rank: int) -> dict[str, Any]:
    return _all_trained(tuple(COMPILED), rank)


def _all_trained(cases: Sequence[str], rank: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        paths = gathered(folder, str)
        with in_a_hurry(Path(os.environ["STEELYARD_CACHE"])):
            found = {name: _trained(name, rank, Path(paths[0])) for name in cases}
            dist.barrier()
    return found


def _trained(name: str, rank: int, folder: Path) -> dict[str, Any]:
    gc.collect()  # free the memory of the last case before this one is metered
    micro_batches, bucket = (CASES | COMPILED)[name]
    codec, count = codec_in(name), dist.get_world_size()
    is_compiled = name in COMPILED
    lead = LEAD if is_compiled else 0
    model, batch = _made(is_compiled=is_compiled)
    plain = copy.deepcopy(model)
    path = folder / "train.plan.toml"
    if rank == 0:
        session = _look(count, is_compiled=is_compiled)
        shares = UNEQUAL.get(name, ())
        write_decisions(path, _decided(session, codec, micro_batches, bucket, lead, shares))
    dist.barrier()
    planned = sy.load(path, model, next_token_loss, batch, optimizer=OPTIMIZER)
    dist.barrier()
    step = planned.apply()
    program = step.live.program
    losses = [float(step(batch)) for _ in range(STEPS)]
    portions = UNEQUAL.get(name, (1,) * count)
    expected = _plainly(plain, batch, program, codec, portions, lead)
    apart = [
        float((a - b).norm() / b.norm()) for a, b in zip(model.parameters(), plain.parameters())
    ]
    return {
        **told(planned, step, batch),
        "losses": losses,
        "expected": expected,
        "apart": max(apart),
        "gradient_bytes": sum(p.nbytes for p in model.parameters()),
    }


def diverged(rank: int) -> dict[str, Any]:
    """Return whether compression is given up if the loss is not a finite number."""
    model, batch = _made(is_compiled=False)
    with tempfile.TemporaryDirectory() as folder, in_a_hurry(Path(os.environ["STEELYARD_CACHE"])):
        path = Path(folder) / "train.plan.toml"
        write_decisions(path, _decided(_look(2, is_compiled=False), "ternary", 1, 1 << 16, 0))
        step = sy.load(path, model, next_token_loss, batch, optimizer=OPTIMIZER).apply()
        losses = [float(step(batch))]
        with torch.no_grad():
            model.get_parameter(next(name for name, _ in model.named_parameters())).fill_(math.nan)
        assert step.live.guard is not None
        for down in (1, 2):
            step.live.guard.load_state(0, down)
            losses.append(float(step(batch)))
            assert step.live.rung == down
        dist.barrier()
    return {"losses": losses}


def codec_in(name: str) -> str:
    return name.replace(",", " ").partition(" ")[0]


def _made(*, is_compiled: bool) -> tuple[nn.Module, dict[str, Tensor]]:
    """Return a small model, because compiling takes a second for each segment."""
    torch.manual_seed(0)
    model = GPT(
        layers=1 if is_compiled else 2, width=64, heads=2, vocabulary=96, length=16, dropout=0.0
    )
    return model, tokens(12, 16, 96)


@functools.cache
def _look(count: int, *, is_compiled: bool) -> PlanningSession:
    """Return the planning session that all cases of a runner share, because they plan the same
    step."""
    model, batch = _made(is_compiled=is_compiled)
    runner: Runner = "inductor" if is_compiled else "python"
    return PlanRequest(
        model=model, loss=next_token_loss, batch=batch, optimizer=OPTIMIZER, budget=Budget(),
        cluster=sy.Cluster.here(ranks=count), runner=runner, title="",
        on_progress=lambda _: None,
    ).capture_and_price()  # fmt: skip


def _decided(
    session: PlanningSession,
    codec: str,
    micro_batches: int,
    bucket: int,
    lead: int,
    shares: tuple[int, ...] = (),
) -> Decisions:
    count = session.request.cluster.num_devices
    rules: tuple[Rule, ...] = (
        ShardBatchRule(ranks=count, bucket=bucket, shares=shares),
        OverlapRule(window=2),
    )
    if micro_batches > 1:
        rules += (AccumulateRule(micro_batches=micro_batches),)
    offers, _ = CODECS[codec].offers(session.apply_rules(rules), session.source)
    own = (r for offer in offers for r in offer.rules if getattr(r, "format", codec) == codec)
    rules += tuple(replace(rule, warm_up=lead) for rule in own)
    lossy = Budget(accuracy_loss=0.5)
    return Decisions(target=session.target(), budget=lossy, rules=tuple(sorted(rules)))


# --- the same computation, written plainly ---------------------------------------------------------


def _plainly(
    model: nn.Module,
    batch: dict[str, Tensor],
    program: Program,
    codec: str,
    portions: Sequence[int],
    lead: int,
) -> list[float]:
    """Compute all ranks in turn; the program determines which gradients share a bucket."""
    count, units = len(portions), sum(portions)
    sizes = [len(batch["x"]) // units * portion for portion in portions]
    optimizer = OPTIMIZER(model.parameters())
    grouped = _grouped(program)
    named = {f"parameter:{n}": p for n, p in model.named_parameters()}
    lost = [[torch.zeros(0)] * len(grouped) for _ in range(count)]
    lost_again = [[torch.zeros(0)] * len(grouped) for _ in range(count)]
    factors = _Factors()
    losses = []
    for turn in range(STEPS):
        found, total = [], 0.0
        for rank in range(count):
            model.zero_grad()
            own = {key: x.split(sizes)[rank] for key, x in batch.items()}
            loss = next_token_loss(model, own) * (portions[rank] / units)
            loss.backward()
            total += float(loss)
            found.append({name: _given(p).clone() for name, p in named.items()})
        losses.append(total)
        summed = {name: sum(one[name] for one in found) for name in named}
        for number, members in enumerate(grouped if turn >= lead else ()):
            if codec == "factors":
                summed |= factors.summed(members, found)
                continue
            flats = [torch.cat([one[name].flatten() for name in members]) for one in found]
            whole = _summed(flats, codec, lost, lost_again, number)
            start = 0
            for name in members:
                summed[name] = whole[start : start + named[name].numel()].view_as(named[name])
                start += named[name].numel()
        for name, parameter in named.items():
            parameter.grad = summed[name]
        optimizer.step()
    return losses


class _Factors:
    """For each matrix, the residual of every rank and the factors with which the next step
    begins."""

    def __init__(self) -> None:
        self._lost: dict[str, list[Tensor]] = {}
        self._start: dict[str, Tensor] = {}

    def summed(
        self, members: Sequence[str], found: Sequence[dict[str, Tensor]]
    ) -> dict[str, Tensor]:
        if members[0] not in self._start:
            columns = [found[0][name][0].numel() for name in members]
            drawn = torch.randn(RANK * sum(columns), generator=torch.Generator().manual_seed(0))
            for name, own in zip(members, drawn.split([RANK * c for c in columns]), strict=True):
                self._start[name] = own.view(RANK, -1).t()
        return {name: self._summed(name, [one[name] for one in found]) for name in members}

    def _summed(self, name: str, given: Sequence[Tensor]) -> Tensor:
        lost = self._lost.setdefault(name, [torch.zeros(1)] * len(given))
        values = [x + before for x, before in zip(given, lost, strict=True)]
        left = torch.linalg.qr(sum(v @ self._start[name] for v in values)).Q
        rights = [v.t() @ left for v in values]
        self._lost[name] = [v - left @ r.t() for v, r in zip(values, rights, strict=True)]
        right = sum(rights)
        assert isinstance(right, Tensor)
        self._start[name] = right / right.norm()
        return left @ right.t()


def _given(parameter: nn.Parameter) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad


def _grouped(program: Program) -> list[list[str]]:
    """Return the parameters of each bucket, in their order."""
    graph = program.graph
    lying: dict[int, list[tuple[int, str]]] = {}
    for output in graph.outputs:
        (tensor,) = graph.by_name[output.node].outputs
        if output.target.startswith("parameter:"):
            lying.setdefault(tensor.storage, []).append((tensor.offset, output.target))
    decoded = [n for n in graph.nodes if n.name.endswith(".decoded")]
    return [[t for _, t in sorted(lying[n.outputs[0].storage])] for n in decoded]


def _summed(
    flats: Sequence[Tensor],
    codec: str,
    lost: list[list[Tensor]],
    lost_again: list[list[Tensor]],
    number: int,
) -> Tensor:
    count = len(flats)
    if codec == "bfloat16":
        return torch.stack([flat.bfloat16() for flat in flats]).sum(0).float()
    parts = 1 if count == 2 else count
    blocks = -(-flats[0].numel() // (parts * BLOCK)) * parts
    told = []
    for rank, flat in enumerate(flats):
        value = torch.cat([flat, torch.zeros(blocks * BLOCK - flat.numel())])
        told.append(_told(value, codec, lost[rank], number, parts))
    if count == 2:
        return torch.stack(told).sum(0)
    shares = [
        _told(sum(one.chunk(count)[part] for one in told), codec, lost_again[part], number, 1)
        for part in range(count)
    ]
    return torch.cat(shares)


def _told(value: Tensor, codec: str, lost: list[Tensor], number: int, parts: int) -> Tensor:
    """Return the decoded sum, and keep the residuals.

    A block consists of equal parts of the four quarters of a chunk or, with ternary codes, of its
    sixteen pieces.
    """
    if codec in ("ternary", "largest"):
        value = value + lost[number] if lost[number].numel() else value
    stretch = (513 if codec == "ternary" else 512) * BLOCK
    stretches = [x for part in value.chunk(parts) for x in part.split(stretch)]
    told = torch.cat([_told_of(stretch, codec) for stretch in stretches])
    lost[number] = value - told
    return told


def _told_of(stretch: Tensor, codec: str) -> Tensor:
    pieces = 16 if codec == "ternary" else 4
    of_pieces = stretch.view(pieces, -1, BLOCK // pieces).transpose(0, 1)
    rows = of_pieces.reshape(-1, BLOCK)
    if codec == "ternary":
        scale = 2.5 * rows.square().mean(1, keepdim=True).sqrt()
        told = torch.sign(rows) * (rows.abs() > scale / 2) * scale
    elif codec == "largest":
        scale = rows.abs().amax(1, keepdim=True) / 127
        parts = rows.view(-1, 4, BLOCK // 4)
        places = parts.abs().topk(4, dim=2).indices
        kept = torch.zeros_like(parts).scatter(2, places, parts.gather(2, places)).view(rows.shape)
        told = torch.round(kept / scale.clamp_min(1e-30)) * scale
    else:
        scale = rows.abs().amax(1, keepdim=True) / 127
        told = torch.round(rows / scale.clamp_min(1e-30)) * scale
    return told.view(of_pieces.shape).transpose(0, 1).flatten()
