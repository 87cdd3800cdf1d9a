"""Takes a real model through a plan: captured once, then run and metered under any rules.

What tests and benchmarks share to hold programs against plain PyTorch. Not for making models: see
zoo/.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import os
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import (
    FlopCounterMode,
    sdpa_backward_flop_count,
    sdpa_flop_count,
)

from steelyard.api.planned import Planned
from steelyard.capture.step import CapturedStep
from steelyard.hardware.cluster import OFFLOAD_IN, OFFLOAD_OUT, Device, Link, OffloadMemory
from steelyard.ir.graph import Graph
from steelyard.ir.program import Program
from steelyard.ir.rule import Rule
from steelyard.measure import offload_bandwidth as offload_memory
from steelyard.measure.links.background_load import BackgroundLoad
from steelyard.measure.operators import benchmark as operators
from steelyard.measure.operators.memory import meter_once
from steelyard.offload.tier import OffloadFile
from steelyard.planner import calibration
from steelyard.plans.budget import Budget, Effort
from steelyard.plans.plan import Prediction
from steelyard.plans.trade import Trade, apply_rules
from steelyard.predict import predict
from steelyard.predict.cost_table import CostTable, OperatorCost
from steelyard.run.codegen import emit
from steelyard.run.step import LiveStep
from steelyard.search import Floor, StepSearch
from steelyard.trades import TRADES
from tests import zoo
from tests.support.short_search import looking_less_far
from tests.zoo import reference

# The device is declared, so that every machine makes the same plans.
DEVICE = Device(
    kind="declared for tests", flops_per_second=80e9, bytes_per_second=16e9, memory_bytes=1 << 40
)
_SEED = 11


def costs_of(*graphs: Graph, device: Device = DEVICE) -> CostTable:
    """Return declared seconds, with the workspace that the kernels really take.

    Offload memory has a price, but a search is not offered any.
    """
    declared = CostTable(device=device)
    computed = (n for graph in graphs for n in graph.nodes if not n.is_free and not n.is_transfer)
    by_signature = {n.signature: n for n in computed}
    _meter(graphs)
    return CostTable(
        device=device,
        operators={
            signature: OperatorCost(
                seconds=declared.declared_seconds(node),
                workspace_bytes=_WORKSPACES[signature],
            )
            for signature, node in by_signature.items()
        },
        links=FAR_LINKS,
    )


@contextlib.contextmanager
def in_a_hurry(costs: Path) -> Iterator[None]:
    """Plan like a user, but with few measurements and a short search.

    This is for tests that depend neither on precise times nor on the best plan. ``costs`` is the
    cost cache.
    """
    with (
        mock.patch.dict(os.environ, STEELYARD_CACHE=str(costs)),
        mock.patch.multiple(calibration, _CALIBRATION_SECONDS=1.0, _SPLIT_CALIBRATION_SECONDS=1.0),
        mock.patch.object(offload_memory, "_ROUNDS", 6),
        # No background load is started: two test workers load the machine already.
        mock.patch.object(BackgroundLoad, "at_work", return_value=contextlib.nullcontext()),
        looking_less_far(),
    ):
        yield


def floor_bytes(planned: Planned) -> int:
    """Return the smallest memory budget of this step that is searched rather than refused
    beforehand."""
    cluster = planned.session.request.cluster
    offload_bytes = 0 if cluster.offload_memory is None else cluster.offload_memory.size_bytes
    floor = Floor.of(planned.session.base)
    return floor.least_bytes(ranks=cluster.num_devices, offload_bytes=offload_bytes)


# Maps the signature of each operator to its workspace, metered once: it is the same in every
# program.
_WORKSPACES: dict[str, int] = {}


def _meter(graphs: Sequence[Graph]) -> None:
    # One call is enough to determine the workspace; further rounds only measure time.
    with mock.patch.multiple(operators, _FEWEST_ROUNDS=1, _ROUNDS_SECONDS=0.0):
        found, survey = operators.measure_operators(
            graphs,
            DEVICE,
            seconds_budget=60.0,
            is_wanted=lambda node: node.signature not in _WORKSPACES,
        )
    assert not survey.unmeasured, survey.unmeasured
    _WORKSPACES.update((s, cost.workspace_bytes) for s, cost in found.operators.items())


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The results of one step, and the most bytes it held beyond those at its beginning."""

    loss: Tensor
    gradients: dict[str, Tensor | None]
    buffers: dict[str, Tensor]
    peak_bytes: int

    def difference(self, other: Outcome) -> str | None:
        """Return None if the loss, every gradient and every buffer are equal to the bit."""
        if not torch.equal(self.loss, other.loss):
            return f"the loss is {self.loss.item()!r}, not {other.loss.item()!r}"
        return reference.difference(other.gradients, self.gradients) or reference.difference(
            other.buffers, self.buffers
        )


def _attention(query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    return int(sdpa_flop_count(query, key, value))


def _attention_backward(gradient: Any, query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    return int(sdpa_backward_flop_count(gradient, query, key, value))


# torch's counter (2.13) counts no FLOPs for attention on the CPU, as if recomputing it cost
# nothing.
UNCOUNTED = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _attention,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,
}


class Trial:
    """A model, its loss and its batch; each trial starts from the same state."""

    def __init__(
        self, model: nn.Module, loss: Any, batch: Any, *, decomposition: str = "python-2"
    ) -> None:
        self.model = model
        self.loss = loss
        self.batch = batch
        self.source = CapturedStep(model=model, loss=loss, batch=batch, decomposition=decomposition)
        self._start = copy.deepcopy(model.state_dict())

    @property
    def plain(self) -> Program:
        return Program.plain(self.source.graph(micro_batches=1))

    def costs(self, *, micro_batches: Sequence[int] = (1,)) -> CostTable:
        return costs_of(*(self.source.graph(micro_batches=k) for k in micro_batches))

    def searching(
        self,
        costs: CostTable,
        *,
        trades: Sequence[Trade] = TRADES,
        effort: Effort = Effort.NORMAL,
    ) -> StepSearch:
        return StepSearch(self.plain, trades=trades, source=self.source, costs=costs, effort=effort)

    def apply_rules(self, rules: Sequence[Rule]) -> Program:
        return apply_rules(self.plain, rules, trades=TRADES, source=self.source)

    def run(self, program: Program) -> Outcome:
        """One step of the program on the live model, metered from a clean level."""
        step = self._live(program)
        return self._metered(lambda: step.backward(self.batch))

    def flops(self, program: Program) -> int:
        """Return the FLOPs that torch counts while the program runs."""
        step = self._live(program)
        with FlopCounterMode(display=False, custom_mapping=UNCOUNTED) as counter:
            step.backward(self.batch)
        return int(counter.get_total_flops())

    def _live(self, program: Program) -> LiveStep:
        constants = self.source.captured(micro_batches=program.repeats).constants
        return LiveStep(
            self.model,
            program,
            constants=constants,
            batch=self.batch,
            reduction=self.source.reduction().value if program.repeats > 1 else "mean",
            runner=functools.partial(
                emit, offload_file=far_memory() if has_offload_memory(program) else None
            ),
        )

    def eager(self, *, micro_batches: int = 1) -> Outcome:
        """Run plain PyTorch, on the whole batch or accumulating over equal parts of it."""

        def backward() -> Tensor:
            total = None
            for index in range(micro_batches):
                value = self.loss(self.model, _part(self.batch, index, micro_batches))
                if micro_batches > 1 and self.source.reduction().value != "sum":
                    value = value / micro_batches
                value.backward()
                total = value.detach() if total is None else total + value.detach()
            assert total is not None
            return total

        return self._metered(backward)

    def _metered(self, backward: Any) -> Outcome:
        self._reset()
        backward()
        self._reset()
        values: list[Tensor] = []
        metered = meter_once(lambda: values.append(backward()))
        return Outcome(
            loss=values[0].detach().clone(),
            gradients=reference.gradients(self.model),
            buffers=reference.buffers(self.model),
            peak_bytes=metered.peak_bytes,
        )

    def _reset(self) -> None:
        self.model.load_state_dict(self._start)
        self.model.zero_grad(set_to_none=True)
        torch.manual_seed(_SEED)


@functools.lru_cache(maxsize=3)
def trial_of(name: str) -> Trial:
    """Return the trial of that case of the zoo.

    Its captures are expensive and are cached for consecutive tests, so tests of one model should be
    in one group.
    """
    return Trial(*zoo.case(name).make())


FAR_LINK = Link(kind="declared for tests", latency_seconds=2e-4, bytes_per_second=2e8)
FAR_LINKS = {OFFLOAD_OUT: FAR_LINK, OFFLOAD_IN: FAR_LINK}


@functools.cache
def far_memory() -> OffloadFile:
    return OffloadFile(OffloadMemory(tempfile.gettempdir(), rate="1 GB/s", size="1 GiB"))


def has_offload_memory(program: Program) -> bool:
    return any(node.is_transfer for node in program.graph.nodes)


def predicted_above(program: Program, costs: CostTable) -> int:
    """Return the bytes of the predicted peak beyond those at the beginning of the step."""
    prediction: Prediction = predict(program, costs)
    return int(prediction.metrics.memory_bytes.value) - prediction.peak.resident_bytes


def budgets(searching: StepSearch, count: int) -> list[Budget]:
    """Return budgets, evenly from the least memory of the step to that of the unplanned step."""
    explored = searching.explored()
    low, high = explored.least.peak_bytes, explored.plain.peak_bytes
    return [
        Budget(memory_bytes=low + (high - low) * step // max(1, count - 1)) for step in range(count)
    ]


def _part(batch: Any, index: int, parts: int) -> Any:
    from steelyard.capture.batch.splitting import batch_size, part

    size = batch_size(batch)
    if parts == 1 or size is None:
        return batch
    return part(batch, start=index * (size // parts), size=size // parts)
