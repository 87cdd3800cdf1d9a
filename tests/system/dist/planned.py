"""Plans for several ranks, made and run through the public API, compared with one device.

Training is in float64, because Adam would turn the rounding noise of a zero gradient into a step.
Not for checking the results: the tests do that.
"""

from __future__ import annotations

import copy
import hashlib
import os
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import steelyard as sy
from steelyard.trades.accumulate import AccumulateRule
from steelyard.trades.recompute import RecomputeRule
from steelyard.trades.shard_batch import ShardBatchRule
from steelyard.trades.shared_memory_transfer import SharedMemoryTransferRule
from steelyard.comm.json_gather import gathered
from steelyard.errors import BadInput, Mismatch
from steelyard.ir.parallel_layout import PIPELINE, ParallelLayout
from steelyard.ir.program import Program
from steelyard.ir.rule import Rule
from steelyard.plan_files.plan_file import write_decisions
from steelyard.planner.session import PlanningSession, PlanRequest, Runner
from steelyard.plans.budget import Budget
from steelyard.plans.plan import Decisions
from steelyard.search.ranks.gather_buckets import with_prefetch
from steelyard.trades.shard_pipeline import rules_for
from steelyard.trades.shard_states import ShardStates
from tests import zoo
from tests.harness import in_a_hurry
from tests.system.dist.pipelines import cut_most
from tests.system.dist.scenarios import Patience, Recorder, Sends, planned_calls
from tests.zoo.case import Loss, class_loss, images, next_token_loss, tokens
from tests.zoo.own import GPT, Residual

OPTIMIZER = partial(torch.optim.AdamW, lr=1e-3)
STEPS = 20


@dataclass(frozen=True)
class Case:
    """``share_of_plain`` is the budget, relative to the memory of a rank without recomputation.

    With ``coordinator``, weights are gathered in buckets and ahead of their readers. With
    ``in_slots``, ranks exchange data through shared memory. ``runner`` executes the code between
    exchanges.
    """

    make: Callable[[], tuple[nn.Module, Loss, Any]]
    layout: ParallelLayout
    share_of_plain: float | None = None
    micro_batches: int = 1
    with_states: bool = False
    gathers: int = 1
    coordinator: bool = False
    schedule: str = "1F1B"
    in_slots: bool = False
    runner: Runner = "python"


def _gpt(dropout: float = 0.0, size: int = 8) -> tuple[nn.Module, Loss, Any]:
    model = GPT(layers=2, width=32, heads=2, vocabulary=64, length=16, dropout=dropout)
    return model, next_token_loss, tokens(size, 16, 64)


def _padded(size: int = 8) -> tuple[nn.Module, Loss, Any]:
    """Make a batch whose shares hold different numbers of counted targets."""
    model, loss, batch = _gpt(size=size)
    batch["y"][:3, 4:] = -100
    return model, loss, batch


def _random_and_padded(size: int = 8) -> tuple[nn.Module, Loss, Any]:
    model, loss, batch = _gpt(dropout=0.2, size=size)
    batch["y"][:3, 4:] = -100
    return model, loss, batch


def _random_and_summed(size: int = 8) -> tuple[nn.Module, Loss, Any]:
    model, _, batch = _gpt(dropout=0.2, size=size)

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        logits = model(batch["x"]).flatten(0, 1)
        return nn.functional.cross_entropy(logits, batch["y"].flatten(), reduction="sum")

    return model, loss, batch


def _random_and_tied() -> tuple[nn.Module, Loss, Any]:
    """Make micro-batches that hold different numbers of counted targets."""
    model, loss, batch = _gpt(dropout=0.2)
    model.head.weight = model.token.weight
    batch["y"][:3, 4:] = -100
    return model, loss, batch


def _mean(size: int) -> tuple[nn.Module, Loss, Any]:
    """Make a loss in which every sample has the same weight."""
    model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))
    x, y = torch.randn(2, size, 16)

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return (model(batch["x"]) - batch["y"]).square().mean()

    return model, loss, {"x": x, "y": y}


def _channels() -> tuple[nn.Module, Loss, Any]:
    model, loss, batch = zoo.case("resnet_bn").make()
    return model, loss, batch


def _normalised() -> tuple[nn.Module, Loss, Any]:
    """Make a model with two consecutive BatchNorms over all samples, and a norm of each sample."""
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3, bias=False),
        nn.BatchNorm2d(4),
        nn.BatchNorm2d(4, affine=False, track_running_stats=False),
        nn.ReLU(inplace=True),
        nn.InstanceNorm2d(4, affine=True),
        Residual(4, 8, 2),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.BatchNorm1d(8),
        nn.Linear(8, 10),
    )
    return model, class_loss, images(8, 16, 10)


_BATCH, _TENSOR, _STAGES = (
    ParallelLayout(data=2),
    ParallelLayout(tensor=2),
    ParallelLayout(pipeline=2),
)
# Each case is captured, planned and loaded on all ranks, which takes seconds.
SHARED = {
    "random and summed, in less memory": Case(_random_and_summed, _BATCH, share_of_plain=0.8),
    "padded, with states in shares, in micro-batches": Case(
        _padded, _BATCH, micro_batches=2, with_states=True
    ),
    "normalised, in less memory": Case(_normalised, _BATCH, share_of_plain=0.9),
}
GATHERED_AGAIN = {
    "random and tied, gathered again, in micro-batches and less memory": Case(
        _random_and_tied,
        _BATCH,
        micro_batches=2,
        with_states=True,
        gathers=2,
        share_of_plain=0.95,
    ),
    "random and tied, gathered together and ahead, in micro-batches and less memory": Case(
        _random_and_tied,
        _BATCH,
        micro_batches=2,
        with_states=True,
        gathers=2,
        coordinator=True,
        share_of_plain=0.95,
    ),
}
UNEQUAL = {
    "random and summed, in less memory": Case(
        partial(_random_and_summed, 12), ParallelLayout(data=2, shares=(2, 1)), share_of_plain=0.8
    ),
    "padded, with states in shares, in micro-batches": Case(
        partial(_padded, 12),
        ParallelLayout(data=2, shares=(2, 1)),
        micro_batches=2,
        with_states=True,
    ),
}
THROUGH_SLOTS = {
    "random and summed, in less memory": Case(
        _random_and_summed, _BATCH, share_of_plain=0.9, in_slots=True
    ),
    "padded, with states in shares, in micro-batches": Case(
        _padded, _BATCH, micro_batches=2, with_states=True, in_slots=True
    ),
    "normalised": Case(_normalised, _BATCH, in_slots=True),
    "padded tensors in parts, in micro-batches": Case(
        _padded, _TENSOR, micro_batches=2, in_slots=True
    ),
}
THROUGH_SLOTS_ON_THREE = {
    "padded, unequal": Case(
        partial(_padded, 12), ParallelLayout(data=3, shares=(1, 3, 2)), in_slots=True
    ),
    "random and padded, with states in shares": Case(
        partial(_random_and_padded, 12), ParallelLayout(data=3), with_states=True, in_slots=True
    ),
}
COMPILED = {
    "random and padded, states gathered again, in micro-batches and less memory": Case(
        _random_and_padded, _BATCH, micro_batches=2, with_states=True, gathers=2,
        share_of_plain=0.95, runner="inductor",
    ),
    "normalised, in slots": Case(_normalised, _BATCH, in_slots=True, runner="inductor"),
}  # fmt: skip
# These run by themselves: four compiled plans take as long on two cores as the ranks' time limit.
COMPILED_TOO = {
    "padded, in unequal shares": Case(
        partial(_padded, 12), ParallelLayout(data=2, shares=(2, 1)), runner="inductor"
    ),
    "padded tensors in parts, in slots and micro-batches": Case(
        _padded, _TENSOR, micro_batches=2, in_slots=True, runner="inductor"
    ),
}  # fmt: skip
UNEQUAL_ON_THREE = {
    "mean": Case(partial(_mean, 12), ParallelLayout(data=3, shares=(3, 2, 1))),
    "padded": Case(partial(_padded, 12), ParallelLayout(data=3, shares=(1, 3, 2))),
    # The shares are nearly equal; three ranks do not divide the batch.
    "of eight": Case(partial(_mean, 8), ParallelLayout(data=3, shares=(3, 3, 2))),
}
IN_PARTS = {
    "random tensors in parts": Case(_random_and_summed, _TENSOR, share_of_plain=0.95),
    "padded tensors in parts, in micro-batches": Case(_padded, _TENSOR, micro_batches=2),
    "channels in parts": Case(_channels, _TENSOR),
}
IN_STAGES = {
    "random and tied, in stages": Case(
        _random_and_tied, _STAGES, share_of_plain=0.8, micro_batches=4
    ),
    "random and tied, in stages, through slots": Case(
        _random_and_tied, _STAGES, share_of_plain=0.8, micro_batches=4, in_slots=True
    ),
}
STAGES_BY_TENSORS = {
    "random and tied": Case(
        _random_and_tied, ParallelLayout(pipeline=2, tensor=2), share_of_plain=0.8, micro_batches=4
    ),
    "padded, backward in two parts": Case(
        _padded, ParallelLayout(pipeline=2, tensor=2), share_of_plain=0.8, micro_batches=4,
        schedule="ZBVZeroBubble",
    ),
}  # fmt: skip
STAGES_OF_GROUPS = {
    "random and tied, in stages, of two groups": Case(
        _random_and_tied, ParallelLayout(data=2, pipeline=2), share_of_plain=0.8, micro_batches=2
    ),
    "random and tied, in stages, of two groups with states in shares": Case(
        _random_and_tied,
        ParallelLayout(data=2, pipeline=2),
        share_of_plain=0.8,
        micro_batches=2,
        with_states=True,
    ),
}
ON_FOUR = {
    "normalised batch, channels in parts": Case(_normalised, ParallelLayout(data=2, tensor=2)),
    "random and padded batch, tensors and states, in micro-batches": Case(
        _random_and_padded, ParallelLayout(data=2, tensor=2), micro_batches=2, with_states=True
    ),
}


def shared(rank: int) -> dict[str, Any]:
    return _all_trained(SHARED, rank)


def gathered_again(rank: int) -> dict[str, Any]:
    return _all_trained(GATHERED_AGAIN, rank)


def unequal(rank: int) -> dict[str, Any]:
    return _all_trained(UNEQUAL, rank)


def unequal_on_three(rank: int) -> dict[str, Any]:
    return _all_trained(UNEQUAL_ON_THREE, rank)


def through_slots(rank: int) -> dict[str, Any]:
    return _all_trained(THROUGH_SLOTS, rank)


def through_slots_on_three(rank: int) -> dict[str, Any]:
    return _all_trained(THROUGH_SLOTS_ON_THREE, rank)


def compiled(rank: int) -> dict[str, Any]:
    return _all_trained(COMPILED, rank)


def compiled_too(rank: int) -> dict[str, Any]:
    return _all_trained(COMPILED_TOO, rank)


def in_parts(rank: int) -> dict[str, Any]:
    return _all_trained(IN_PARTS, rank)


def in_stages(rank: int) -> dict[str, Any]:
    return _all_trained(IN_STAGES, rank)


def stages_by_tensors(rank: int) -> dict[str, Any]:
    return _all_trained(STAGES_BY_TENSORS, rank)


def stages_of_groups(rank: int) -> dict[str, Any]:
    return _all_trained(STAGES_OF_GROUPS, rank)


def on_four(rank: int) -> dict[str, Any]:
    return _all_trained(ON_FOUR, rank)


def _all_trained(cases: dict[str, Case], rank: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        paths = gathered(folder, str)
        with in_a_hurry(Path(os.environ["STEELYARD_CACHE"])):
            found = {name: _trained(case, rank, Path(paths[0])) for name, case in cases.items()}
            dist.barrier()
    return found


def _trained(case: Case, rank: int, folder: Path) -> dict[str, Any]:
    torch.manual_seed(0)
    model, loss, batch = case.make()
    model, batch = model.double(), _doubled(batch)
    alone = copy.deepcopy(model)
    planned = _planned(case, model, loss, batch, rank, folder / "train.plan.toml")
    if case.layout.tensor > 1 and not case.micro_batches > 1 and case.share_of_plain is None:
        _refused_without_an_optimizer(folder / "train.plan.toml", model, loss, batch)
    step = planned.apply()
    random = any(node.is_random for node in step.live.program.graph.nodes)
    torch.manual_seed(1)
    losses = [float(step(batch))]
    # The step meters itself meanwhile. Gloo makes the copies of a reduce-scatter, and the meter
    # does not see when they are freed.
    with Patience():
        losses.append(float(step(batch)))
    losses += [float(step(batch)) for _ in range(STEPS - 2)]
    after = torch.initial_seed(), int(torch.randint(2**40, ()))
    torch.manual_seed(1)
    expected = _alone(
        alone, loss, batch, portions=case.layout.portions if random else (1,),
        micro_batches=case.micro_batches if random else 1,
    )  # fmt: skip
    with step.whole():
        error, digest = _error(model, alone), _digest(model)
    with Recorder() as recorder, Sends() as sends:
        step(batch)
    odd = {key: x[:7] for key, x in batch.items()}
    refused = ""
    if case.layout.data > 1:
        with pytest.raises(Mismatch) as mismatch:
            step(odd)
        refused = str(mismatch.value)
    elif case.micro_batches == 1 or case.layout.pipeline > 1:
        step(odd)
    receipt = step.receipt()
    again = _added_up(step, batch) if case.micro_batches > 1 else 0.0
    return {
        "axes": ParallelLayout.of(planned.plan.decisions.rules).axes,
        "shares": ParallelLayout.of(planned.plan.decisions.rules).shares,
        "rules": sorted({rule.trade for rule in planned.plan.decisions.rules}),
        "losses": losses,
        "expected": expected,
        "error": error,
        "digest": digest,
        "after": after,
        "executed": recorder.executed,
        "planned": [call for one in step.live.program.passes for call in planned_calls(one)],
        "handed_bytes": recorder.handed_bytes + sends.nbytes,
        "sent_bytes": step.live.program.sent_bytes,
        "predicted_bytes": planned.predicted.communication_bytes.value,
        "counted_bytes": receipt.measured.communication_bytes,
        "refused": refused,
        "again": again,
        "in_shares": _rows(step.live.program, model, rank),
        "held": sum(p.numel() for p in model.parameters()),
        "whole": sum(p.numel() for p in alone.parameters()),
        "peak_bytes": receipt.measured.memory_bytes,
        "predicted_peak_bytes": planned.plan.predicted.peak.nbytes,
    }


def _rows(program: Program, model: nn.Module, rank: int) -> int:
    """Return the number of elements that this rank holds of row-sharded parameters."""
    if program.pipeline is None:
        return 0
    held = program.pipeline.held(program.layout.place(rank, PIPELINE)) & program.in_shares
    return sum(p.numel() for n, p in model.named_parameters() if f"parameter:{n}" in held)


def _added_up(step: Any, batch: Any) -> float:
    """Return the difference between the gradients of two backward passes and twice those of one."""
    found: list[list[Tensor]] = []
    step.live.zero_grad()
    for _ in range(2):
        torch.manual_seed(3)
        step.live.backward(batch)
        found.append([gradient.clone() for gradient in step.live.gradients()])
    return max(float((b - 2 * a).abs().max()) for a, b in zip(*found, strict=True))


def _refused_without_an_optimizer(path: Path, model: nn.Module, loss: Loss, batch: Any) -> None:
    """Check that a user's own optimizer is refused, because it could read a whole sharded
    parameter."""
    with pytest.raises(BadInput, match="no optimizer was given"):
        sy.load(path, model, loss, batch).apply()


def _planned(
    case: Case, model: nn.Module, loss: Loss, batch: Any, rank: int, path: Path
) -> sy.Planned:
    """Plan on rank 0, and load the plan on all ranks: two measurements would differ."""
    if rank == 0:
        write_decisions(path, _decided(case, model, loss, batch))
    dist.barrier()
    loaded = sy.load(path, model, loss, batch, optimizer=OPTIMIZER)
    dist.barrier()
    return loaded


def _decided(case: Case, model: nn.Module, loss: Loss, batch: Any) -> Decisions:
    """Return decisions for all ranks, even if one rank alone would be faster: these models are
    tiny."""
    session = PlanRequest(
        model=model, loss=loss, batch=batch, optimizer=OPTIMIZER, budget=Budget(),
        cluster=sy.Cluster.here(ranks=case.layout.num_ranks), runner=case.runner, title="",
        on_progress=lambda _: None,
    ).capture_and_price()  # fmt: skip
    if case.layout.pipeline > 1:
        return Decisions(target=session.target(), budget=Budget(), rules=_staged(case, session))
    ways = [
        way
        for way in session.layouts.candidates.of(case.layout)
        if _gathers(way.rules) == (case.gathers if case.with_states else 0)
        and any(r.trade == "shard_states" and r.bucket for r in way.rules) == case.coordinator
    ]
    # The machine decides whether slots are faster; the case decides whether they are used.
    laid = min(ways, key=lambda way: way.nbytes).rules
    laid = tuple(rule for rule in laid if rule.trade != "shared_memory_transfer")
    laid = with_prefetch(laid, has_equal_shares=True) if case.coordinator else laid
    if case.in_slots:
        laid = (*laid, SharedMemoryTransferRule(messages="exchanges"))
    search, budget = session.layouts.search_by(laid), Budget()
    if case.share_of_plain is not None:
        plain = search.explored().plain.peak_bytes
        budget = Budget(memory_bytes=round(case.share_of_plain * plain))
    rules = search.find(budget).rules
    if case.micro_batches > 1:
        rules = (*rules, AccumulateRule(micro_batches=case.micro_batches))
    if case.runner != "python":
        budget = Budget()  # no bound: a compiled step holds other values
    return Decisions(target=session.target(), budget=budget, rules=rules)


def _gathers(rules: Sequence[Rule]) -> int:
    """Return how often a step gathers a sharded weight; 0 if it does not."""
    return max((rule.gathers for rule in rules if rule.trade == "shard_states"), default=0)


def _staged(case: Case, session: PlanningSession) -> tuple[Rule, ...]:
    """Return stages with some recomputation in each, and as many sharded tensors as possible."""
    groups, ranks = case.layout.data, case.layout.tensor
    shared, _ = ShardStates().offers(
        replace(session.base, layout=ParallelLayout(data=groups)), session.source
    )
    return (
        *cut_most(replace(session.base, layout=ParallelLayout(tensor=ranks)), session.source),
        *(rule for offer in shared if case.with_states for rule in offer.rules),
        *([ShardBatchRule(ranks=groups, bucket=2**20)] if groups > 1 else []),
        AccumulateRule(micro_batches=case.micro_batches),
        RecomputeRule(module="blocks.*.mlp.act", op="aten.gelu.default", count=2),
        *rules_for(_ENDS[case.schedule], schedule=case.schedule, ranks=2),
        *([SharedMemoryTransferRule(messages="stages")] if case.in_slots else []),
    )


_ENDS = {"1F1B": ["blocks.0"], "ZBVZeroBubble": ["dropout", "blocks.0", "blocks.1"]}


def _alone(
    model: nn.Module, loss: Loss, batch: Any, *, portions: tuple[int, ...], micro_batches: int
) -> list[float]:
    """Run plain PyTorch on the whole batch.

    With several shares, each share draws its own random numbers, and so do its micro-batches, one
    after another.
    """
    optimizer = OPTIMIZER(model.parameters())
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        if len(portions) > 1:
            value = _in_shares(model, loss, batch, portions, micro_batches)
        else:
            value = _in_micro_batches(model, loss, batch, micro_batches, of=batch)
        optimizer.step()
        losses.append(float(value))
    return losses


def _in_shares(
    model: nn.Module, loss: Loss, batch: Any, portions: tuple[int, ...], micro_batches: int
) -> Tensor:
    seed, total = int(torch.empty((), dtype=torch.int64).random_()), torch.zeros(())
    for place in range(len(portions)):
        with torch.random.fork_rng(devices=()):
            torch.manual_seed((seed + place) % 2**63)
            share = {
                key: x.split([len(x) // sum(portions) * n for n in portions])[place]
                for key, x in batch.items()
            }
            total = total + _in_micro_batches(model, loss, share, micro_batches, of=batch)
    return total


def _in_micro_batches(model: nn.Module, loss: Loss, batch: Any, count: int, *, of: Any) -> Tensor:
    total = torch.zeros(())
    for place in range(count):
        part = {key: x.chunk(count)[place] for key, x in batch.items()}
        value = loss(model, part)
        if loss is next_token_loss:  # a mean: weigh each part by its counted targets
            value = value * (_counted(part) / _counted(of))
        value.backward()
        total = total + value.detach()
    return total


def _counted(batch: Any) -> int:
    return int((batch["y"] != -100).sum())


def _doubled(batch: Any) -> Any:
    return {
        key: x.double() if isinstance(x, Tensor) and x.is_floating_point() else x
        for key, x in batch.items()
    }


def _error(model: nn.Module, alone: nn.Module) -> float:
    """Return the largest difference of a parameter or a buffer, relative to the largest change
    by training."""
    pairs = zip(_tensors(model), _tensors(alone), strict=True)
    return max(float((a - b).detach().abs().max()) for a, b in pairs)


def _digest(model: nn.Module) -> str:
    digest = hashlib.sha256()
    for tensor in _tensors(model):
        digest.update(tensor.detach().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()


def _tensors(model: nn.Module) -> list[Tensor]:
    return [*model.parameters(), *model.buffers()]
