"""Pipelined steps on ranks, compared with the same micro-batches on one device, in float64.

Not for checking the results: the tests do that.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from steelyard import _torch
from steelyard.api.rank_context import RankContext
from steelyard.capture.step import CapturedStep
from steelyard.ir.parallel_layout import PIPELINE, ParallelLayout
from steelyard.ir.placement import Shard
from steelyard.ir.program import Program
from steelyard.ir.rule import Rule
from steelyard.comm.devices import generator_of, torch_device_of
from steelyard.run.sharded_model.tensors import ShardSpec
from steelyard.comm.shared_memory.same_host import SharedMemoryTransport
from steelyard.comm.shared_memory.slots import Like
from steelyard.measure.operators.memory import meter_once
from steelyard.predict.pipeline.replay import replay
from steelyard.predict.pipeline.stage_cost import stage_cost
from steelyard.run.codegen import emit
from steelyard.run.step import LiveStep
from steelyard.trades.shard_tensor import ShardTensor
from tests import zoo
from tests.support.stepping import COSTS
from tests.system.dist.slots import here
from tests.zoo import reference
from tests.zoo.case import Loss, next_token_loss, tokens
from tests.zoo.own import GPT

STEPS, MICRO_BATCHES, SEED = 20, 8, 5


@dataclass(frozen=True)
class Case:
    """``ends``: the modules after which a stage ends, for two, four and eight stages."""

    make: Callable[[], tuple[nn.Module, Loss, Any]]
    ends: dict[int, tuple[str, ...]]


def _gpt() -> tuple[nn.Module, Loss, Any]:
    model = GPT(layers=3, width=16, heads=2, vocabulary=32, length=8, dropout=0.2)
    model.head.weight = model.token.weight
    batch = tokens(MICRO_BATCHES, 8, 32)
    batch["y"][:3, 4:] = -100  # the micro-batches count different numbers of targets
    return model, next_token_loss, batch


class Towers(nn.Module):
    """A network with two branches, each on the same input."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = (
            nn.Sequential(nn.Linear(12, 24), nn.GELU(), nn.Dropout(0.2), nn.Linear(24, 12))
            for _ in range(2)
        )
        self.head = nn.Linear(12, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.head(self.left(x) * self.right(x))
        return result


def _towers() -> tuple[nn.Module, Loss, Any]:
    return Towers(), _squares, {"x": torch.randn(2 * MICRO_BATCHES, 12)}


def _of_zoo(name: str) -> tuple[nn.Module, Loss, Any]:
    """Use two samples for each micro-batch, because BatchNorm computes statistics over them."""
    case = zoo.case(name)
    model, loss, batch = case.make()
    batches = case.batches(2 * MICRO_BATCHES // len(next(iter(batch.values()))))
    return model, loss, {key: torch.cat([b[key] for b in batches]) for key in batch}


CASES = {
    "gpt": Case(make=_gpt, ends={2: ("blocks.1",), 4: ("dropout", "blocks.0", "blocks.2")}),
    "llama": Case(
        make=partial(_of_zoo, "hf_llama_default"),
        ends={2: ("model.layers.0",), 4: ("model.embed_tokens", "model.layers.0", "model.norm")},
    ),
    "resnet": Case(
        make=partial(_of_zoo, "resnet_bn"), ends={2: ("4.0",), 4: ("3.0", "4.0.conv1", "5.0")}
    ),
    "towers": Case(make=_towers, ends={2: ("left",), 4: ("left.0", "left", "right.0")}),
}
_OF_TWO = {"GPipe": 2, "1F1B": 2, "LoopedBFS": 4, "Interleaved1F1B": 4} | dict.fromkeys(
    ("InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"), 4
)
# 1F1B computes the backward pass in one part, ZBVZeroBubble in two.
_OF_TWO_BY_TWO = {"1F1B": 2, "ZBVZeroBubble": 4}
# Schedules through slots on two ranks: all activations wait, each is read at once, stages
# alternate, and the backward pass is in two parts.
_IN_SLOTS = ("GPipe", "1F1B", "Interleaved1F1B", "ZBVZeroBubble")
_OF_FOUR = {"GPipe": 4, "1F1B": 4, "Interleaved1F1B": 4, "InterleavedZeroBubble": 4}


def two_of_gpt(rank: int) -> Any:
    return _run("gpt", _OF_TWO, in_slots=_IN_SLOTS)


def two_of_gpt_on_gpus(rank: int) -> Any:
    return _run("gpt", {name: _OF_TWO[name] for name in _IN_SLOTS}, in_slots=_IN_SLOTS)


def two_of_llama(rank: int) -> Any:
    return _run("llama", _OF_TWO)


def two_of_resnet(rank: int) -> Any:
    return _run("resnet", _OF_TWO)


def two_of_towers(rank: int) -> Any:
    return _run("towers", _OF_TWO)


def four_of_gpt(rank: int) -> Any:
    return _run("gpt", _OF_FOUR)


def four_of_llama(rank: int) -> Any:
    return _run("llama", _OF_FOUR, in_slots=("1F1B",))


def four_of_resnet(rank: int) -> Any:
    return _run("resnet", _OF_FOUR)


def parts_of_gpt(rank: int) -> Any:
    return _run("gpt", _OF_TWO_BY_TWO, tensor=2)


def parts_of_resnet(rank: int) -> Any:
    return _run("resnet", _OF_TWO_BY_TWO, tensor=2)


def failed_of_gpt(rank: int) -> bool:
    """Check that a failed call keeps the gradient of the tied embedding from an earlier call."""
    model, loss, batch = _gpt()
    source = CapturedStep(model=model, loss=loss, batch=batch)
    step = _live(
        model,
        _in_stages(source, "1F1B", CASES["gpt"].ends[2]),
        constants=source.captured(micro_batches=MICRO_BATCHES).constants,
        batch=batch,
        reduction=source.reduction().value,
    )
    step.backward(batch)
    tied = model.token.weight
    assert tied.grad is not None
    found = tied.grad.clone()
    with (
        mock.patch.object(dist, "all_reduce", side_effect=RuntimeError("no line")),
        pytest.raises(RuntimeError, match="no line"),
    ):
        step.backward(batch)
    return torch.equal(found, tied.grad)


def without_gradients_of_gpt(rank: int) -> tuple[float, float, bool]:
    """Return the loss with and without ``no_grad``, and whether the gradients are equal."""
    model, loss, batch = _gpt()
    source = CapturedStep(model=model, loss=loss, batch=batch)
    step = _live(
        model,
        _in_stages(source, "1F1B", CASES["gpt"].ends[2]),
        constants=source.captured(micro_batches=MICRO_BATCHES).constants,
        batch=batch,
        reduction=source.reduction().value,
    )
    with torch.random.fork_rng():
        outside = float(step.backward(batch))
    gradients = [g.clone() for g in step.gradients()]
    step.zero_grad()
    with torch.no_grad():
        within = float(step.backward(batch))
    alike = all(map(torch.equal, gradients, step.gradients()))
    return within, outside, alike


def _run(
    name: str, schedules: dict[str, int], *, in_slots: Sequence[str] = (), **how: Any
) -> dict[str, Any]:
    """Run the schedules; those ``in_slots`` also run through slots.

    For ``how`` see ``_in_stages``.
    """
    case = CASES[name]
    one = _OneDevice(case)
    found = {s: one.differences(s, case.ends[count], how) for s, count in schedules.items()}
    for schedule in in_slots:
        ends, also = case.ends[schedules[schedule]], {**how, "is_pinned": True}
        with _counting_places() as places:
            found[f"{schedule} through slots"] = one.differences(schedule, ends, also)
        found[f"{schedule} through slots"]["made there"] = len(places)
    return found


@contextlib.contextmanager
def _counting_places() -> Iterator[list[int]]:
    """Count the values that are computed directly in their slots."""
    places: list[int] = []
    place = SharedMemoryTransport.place

    def counting(
        pinned: SharedMemoryTransport, index: int, number: int, position: int, like: Like
    ) -> torch.Tensor | None:
        found = place(pinned, index, number, position, like)
        if found is not None:
            places.append(found.data_ptr())
        return found

    with mock.patch.object(SharedMemoryTransport, "place", counting):
        yield places


def _drawn() -> torch.Tensor:
    """Return the state of the random generator that is used here."""
    return generator_of(here()).get_state()


class _OneDevice:
    """The results of the micro-batches on one device, step by step; captured once."""

    def __init__(self, case: Case) -> None:
        torch.manual_seed(0)  # a GPU's generator has another initial state
        model, loss, batch = case.make()
        self.model = model.double()
        self.batch = _torch.tree_map(
            lambda leaf: leaf.double() if leaf.is_floating_point() else leaf, batch
        )
        source = CapturedStep(model=model, loss=loss, batch=self.batch)
        self.source, self.captured = source, source.captured(micro_batches=MICRO_BATCHES)
        self.reduction = source.reduction().value
        self.after = copy.deepcopy(model)
        program = Program.plain(self.captured.graph).repeated(MICRO_BATCHES)
        step = LiveStep(self.after, program, optimizer=_optimizer(self.after), **self.settings)
        self.steps = []
        for index in range(STEPS):
            torch.manual_seed(SEED + index)
            value = step(self.batch)
            self.steps.append((value, reference.gradients(self.after), _drawn()))

    @property
    def settings(self) -> dict[str, Any]:
        constants = self.captured.constants
        return {"constants": constants, "batch": self.batch, "reduction": self.reduction}

    def differences(
        self, schedule: str, ends: Sequence[str], how: dict[str, Any]
    ) -> dict[str, Any]:
        """Return the largest differences, relative to the largest element of each tensor or of
        this rank's part."""
        model = copy.deepcopy(self.model)
        program = _in_stages(self.source, schedule, ends, **how)
        step = _live(model, program, optimizer=_optimizer(model), **self.settings)
        held = _held(program)
        own = {n: p for n, p in model.named_parameters() if f"parameter:{n}" in held}
        part = _parting(program)
        worst = {"loss": 0.0, "gradients": 0.0}
        for index, (value, gradients, state) in enumerate(self.steps):
            torch.manual_seed(SEED + index)
            worst["loss"] = max(worst["loss"], _gap(value, step(self.batch)))
            assert torch.equal(state, _drawn()), "another number of draws"
            gaps = [_gap(part(f"parameter:{name}", gradients[name]), p.grad) for name, p in own.items()]
            worst["gradients"] = max(worst["gradients"], *gaps)
        worst["parameters"] = max(
            _gap(part(f"parameter:{n}", self.after.get_parameter(n).detach()), p)
            for n, p in own.items()
        )
        with step.whole():
            pairs = zip(self.after.parameters(), model.parameters(), strict=True)
            worst["parameters"] = max(worst["parameters"], *(_gap(*pair) for pair in pairs))
        buffers = [n for n, _ in model.named_buffers() if f"buffer:{n}" in held]
        worst["buffers"] = max(
            (
                _gap(part(f"buffer:{n}", self.after.get_buffer(n)), model.get_buffer(n))
                for n in buffers
            ),
            default=0.0,
        )
        named = [name for name, _ in model.named_parameters()]
        whole = sum(p.numel() for p in self.after.parameters())
        return {
            **worst,
            "held": sorted(own),
            "all": named,
            "num_buffers": len(buffers),
            "share": sum(p.numel() for p in model.parameters()) / whole,
        }


def _in_stages(
    source: CapturedStep,
    schedule: str,
    ends: Sequence[str],
    *,
    tensor: int = 1,
    is_pinned: bool = False,
) -> Program:
    """Put each stage on ``tensor`` ranks, with messages through slots if requested."""
    graph, ranks = source.graph(micro_batches=MICRO_BATCHES), dist.get_world_size() // tensor
    layout = ParallelLayout(pipeline=ranks, tensor=tensor)
    plain = replace(
        Program.plain(graph, rank=dist.get_rank()).repeated(MICRO_BATCHES), layout=layout
    )
    if tensor > 1:
        plain = ShardTensor().rewrite(plain, cut_most(plain, source), source)
    pipeline = source.in_stages(plain, ends=tuple(ends), schedule=schedule, num_ranks=ranks)
    pipeline = replace(pipeline, is_pinned=is_pinned)
    return replace(plain.with_graph(pipeline.stages.graph), pipeline=pipeline)


def cut_most(plain: Program, source: CapturedStep) -> list[Rule]:
    """Return one sharding after another, region by region, so that no tensor is sharded twice."""
    rules: list[Rule] = []
    for offer in ShardTensor().offers(plain, source)[0]:
        if {rule.behind for rule in offer.rules}.isdisjoint(rule.behind for rule in rules):
            rules += offer.rules
    return rules


def _parting(program: Program) -> Callable[[str, torch.Tensor], torch.Tensor]:
    """Return the sharding of a tensor of the model, or of its gradient, on this rank."""
    group = dist.group.WORLD
    assert group is not None
    ways = {
        name: ShardSpec(shard=lies, num_ranks=each.num_ranks, group=group,
                  rank=program.layout.place(dist.get_rank(), each.axis))
        for each in program.shardings
        for name, lies in each.inputs
        if isinstance(lies, Shard)
    }  # fmt: skip

    def part(name: str, whole: torch.Tensor) -> torch.Tensor:
        way = ways.get(name)
        return whole if way is None else way.local_shard(whole)

    return part


def _held(program: Program) -> frozenset[str]:
    assert program.pipeline is not None
    return program.pipeline.held(program.layout.place(dist.get_rank(), PIPELINE))


def _live(model: nn.Module, program: Program, **settings: Any) -> LiveStep:
    ranks = RankContext.of(program.layout, torch_device_of(model))
    parts = ranks.parts_of(model, program)
    return LiveStep(
        model,
        program,
        parts=parts,
        in_stages=ranks.in_stages,
        runner=partial(emit, channels=ranks.channels),
        **settings,
    )


def _optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


def _gap(expected: Any, actual: Any) -> float:
    if expected is None or actual is None:
        return 0.0 if expected is actual else float("inf")
    left, right = expected.detach().double(), actual.detach().double()
    return float((left - right).abs().max() / left.abs().max().clamp(min=1e-30))


def peaks_of_gpt(rank: int) -> dict[str, tuple[int, int]]:
    """Measure peaks of a GPT, whose sent values are made only to be sent."""
    model = GPT(layers=4, width=64, heads=2, vocabulary=64, length=64, dropout=0.0)
    ends = {2: ("blocks.1",), 4: ("blocks.0", "blocks.1", "blocks.2")}
    return _peaks(rank, model, next_token_loss, tokens(2 * MICRO_BATCHES, 64, 64), ends)


def peaks_of_relus(rank: int) -> dict[str, tuple[int, int]]:
    """Measure peaks of a model with relus, whose sent values are also saved for the backward
    pass."""
    layers = (layer for _ in range(4) for layer in (nn.Linear(64, 64), nn.ReLU()))
    batch = {"x": torch.randn(64 * MICRO_BATCHES, 64)}
    return _peaks(rank, nn.Sequential(*layers), _squares, batch, {2: ("3",), 4: ("1", "3", "5")})


def _squares(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    result: torch.Tensor = model(batch["x"]).square().mean()
    return result


def _peaks(
    rank: int, model: nn.Module, loss: Any, batch: Any, ends_of: dict[int, tuple[str, ...]]
) -> dict[str, tuple[int, int]]:
    """Return, for each schedule, the predicted and metered bytes beyond those between steps."""
    source = CapturedStep(model=model, loss=loss, batch=batch)
    captured = source.captured(micro_batches=MICRO_BATCHES)
    found = {}
    for schedule, count in _OF_TWO.items():
        program = _in_stages(source, schedule, ends_of[count])
        step = _live(
            copy.deepcopy(model),
            program,
            constants=captured.constants,
            batch=batch,
            reduction=source.reduction().value,
        )
        step.backward(batch)
        step.zero_grad()
        assert program.pipeline is not None
        order, stages = program.pipeline.order, program.pipeline.stages
        costs = [stage_cost(s, stages.graph, COSTS) for s in stages.stages]
        metered = meter_once(lambda step=step: step.backward(batch), device=here()).peak_bytes
        replayed = replay(order, costs, is_by_host=program.pipeline.is_by_host)
        found[schedule] = (replayed.peak_bytes[rank], metered)
    return found
