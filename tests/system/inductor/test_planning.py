"""Plans for Inductor are priced as the program that Inductor makes, run, and fit the budget."""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch import nn

import steelyard as sy
from steelyard import _torch
from steelyard.errors import BadInput, Infeasible
from steelyard.ir.parallel_layout import ParallelLayout
from steelyard.measure.cache import CostCache
from steelyard.measure.links.probe import context_of
from steelyard.planner import compiled as lowering
from steelyard.trades.overlap import OverlapRule
from steelyard.trades.shard_batch import ShardBatchRule
from tests import zoo
from tests.harness import floor_bytes, in_a_hurry
from tests.system.ranks.test_gradient_compression import LINK

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(_torch.cpp_compiler() is None, reason="needs a C++ compiler"),
]


_WITH_ONE_PLAN = pytest.mark.xdist_group("two compiled ranks")


@pytest.fixture(scope="module", autouse=True)
def _in_a_hurry(costs: Path) -> Iterator[None]:
    with in_a_hurry(costs):
        yield


@pytest.mark.parametrize("name", ["convnet_bn"])
def test_the_measured_peak_is_within_the_budget(name: str) -> None:
    model, loss, batch = zoo.case(name).make()
    make = partial(torch.optim.SGD, lr=1e-2)
    session = sy.plan(model, loss, batch, optimizer=make, runner="inductor")
    unplanned = session.plan.unplanned.peak
    with pytest.raises(Infeasible) as refused:
        session.what_if(memory=floor_bytes(session))
    assert "cannot be split into micro-batches: buffer 1.running_mean" in str(refused.value)
    least = refused.value.least_bytes
    assert least is not None
    budget = max(least, (least + unplanned.nbytes) // 2)
    step = session.what_if(memory=budget).apply()
    losses = [float(step(batch)) for _ in range(3)]
    measured = step.receipt().measured.memory_bytes
    assert measured is not None
    assert measured <= budget
    # A convolution copies its arguments into another layout internally; the meter includes these
    # copies.
    assert measured == pytest.approx(step.plan.predicted.peak.nbytes, rel=0.001)
    assert losses[-1] < losses[0]


def test_each_frontier_point_is_predicted_from_its_compiled_program() -> None:
    layers = [layer for _ in range(4) for layer in (nn.Linear(32, 32), nn.Tanh(), nn.Sigmoid())]
    batch = torch.randn(512, 32)
    session = sy.plan(
        nn.Sequential(*layers), lambda m, b: m(b).square().mean(), batch, runner="inductor"
    )
    points = session.frontier
    assert len(points) >= 2
    assert [p.memory_bytes for p in points] == sorted({p.memory_bytes for p in points})
    seconds = [p.step_seconds for p in points]
    assert seconds == sorted(seconds, reverse=True)
    # The curve ends with the plain step, or with a plan that saves memory and takes no longer.
    last, plain = points[-1], session.plan.unplanned
    least = (plain.metrics.step_seconds.value, plain.peak.nbytes)
    assert (last.step_seconds, last.memory_bytes) <= least
    assert (last.rules == ()) == (last.memory_bytes == plain.peak.nbytes)
    within = session.what_if(memory=points[1].memory_bytes).plan
    assert within.predicted.peak.nbytes <= points[1].memory_bytes


@pytest.fixture(scope="module")
def on_two_ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[sy.Planned]:
    path = tmp_path_factory.mktemp("two ranks") / "costs.sqlite"
    # With fewer alternatives, fewer programs are lowered and compiled.
    with (
        mock.patch.dict(os.environ, STEELYARD_CACHE=str(path)),
        mock.patch.object(lowering, "_NUM_ALTERNATIVES", 1),
    ):
        CostCache().write_rates(context_of(2), {**LINK, "rate": 1e9})
        torch.manual_seed(0)
        model, loss, batch = zoo.case("gpt").make()
        yield sy.plan(
            model, loss, batch, optimizer=partial(torch.optim.SGD, lr=1e-2), runner="inductor",
            cluster=sy.Cluster.here(ranks=2),
        )  # fmt: skip


@_WITH_ONE_PLAN
def test_plans_for_ranks_are_predicted_from_compiled_programs(on_two_ranks: sy.Planned) -> None:
    session, plan = on_two_ranks.session, on_two_ranks.plan
    assert plan.decisions.target.decomposition == "inductor-2"
    assert "stages are run by generated Python" in on_two_ranks.why_not("shard_pipeline")
    assert "gradients in 2 bits" in on_two_ranks.why_not("ternary_gradients")
    batch = ShardBatchRule(ranks=2, bucket=2**20)
    lowered = session.as_executed(session.apply_rules([OverlapRule(window=1), batch]))
    assert lowered.problems() == []
    assert lowered.layout == ParallelLayout(data=2)
    nodes = [lowered.graph.by_name[i.node] for i in lowered.instructions if i.sink is None]
    kernels = [node for node in nodes if node.op.startswith("inductor.fused.")]
    assert len(kernels) > 10
    assert len(lowered.exchanges) > 1
    # Each kernel was compiled, called alone and timed, and the sum was calibrated against a whole
    # step.
    known = session.costs.operators
    assert all(known[node.signature].is_measured for node in kernels)
    assert session.costs.whole_step != session.prices.costs.whole_step
    # The program has the same outputs as before.
    assert len(lowered.graph.outputs) == len(session.apply_rules([batch]).graph.outputs)


@_WITH_ONE_PLAN
def test_compiled_ranks_keep_the_memory_budget(on_two_ranks: sy.Planned) -> None:
    whole = on_two_ranks.plan.predicted.peak
    limit = whole.nbytes - (whole.nbytes - whole.resident_bytes) // 5
    within = on_two_ranks.what_if(memory=limit).plan
    assert within.predicted.peak.nbytes <= limit
    assert within.taken
    with pytest.raises(Infeasible, match="no plan for Inductor fits"):
        on_two_ranks.what_if(memory=floor_bytes(on_two_ranks))


def test_inductor_is_refused_for_declared_clusters() -> None:
    declared = sy.Cluster.named("dgx-h100")
    with pytest.raises(
        BadInput, match="the Inductor runner is not supported for declared clusters"
    ):
        sy.plan(nn.Linear(4, 4), _mean, torch.randn(4, 4), runner="inductor", cluster=declared)


def _mean(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return model(batch).square().mean()
