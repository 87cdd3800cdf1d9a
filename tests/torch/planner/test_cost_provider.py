"""A step in micro-batches is predicted to be faster only if the gain exceeds the uncertainty of
every calibration."""

from __future__ import annotations

import math
import os
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

import steelyard as sy
from steelyard.capture.step import CapturedStep
from steelyard.hardware.host_os import this_device
from steelyard.ir.graph import Graph
from steelyard.ir.metrics import Estimate
from steelyard.ir.program import Program
from steelyard.ir.rule import Rule
from steelyard.planner.cost_provider import CostProvider
from steelyard.plans.trade import apply_rules
from steelyard.predict.cost_table import CostTable
from steelyard.trades import TRADES
from steelyard.trades.gradient_compression import TernaryGradientsRule
from steelyard.trades.overlap import OverlapRule
from steelyard.trades.shard_batch import ShardBatchRule
from tests.torch.trades.test_shard_pipeline import plain
from tests.zoo.case import next_token_loss, tokens
from tests.zoo.own import GPT


def said(
    checks: dict[int, tuple[float, float, float]], *, operators: float = 1 - 1e-6
) -> dict[int, float]:
    """Return the predicted time of the step in this many parts, relative to the unsplit step.

    Calibrations measure the given ratios, and the operators of a split step alone add up to
    ``operators``.
    """
    prices = CostProvider.__new__(CostProvider)
    prices._split_calibrations, prices._split_times, prices._base = {}, {}, plain()
    prices.costs = CostTable(device=this_device(), whole_step=Estimate.exactly(1.0))
    found = {parts: Estimate(value=v, low=lo, high=hi) for parts, (lo, v, hi) in checks.items()}
    current = 0

    def checked(*_: Any, **__: Any) -> Estimate:
        return found[current]

    prices._is_here, prices._calibration = True, mock.Mock(split_ratio=checked)
    with mock.patch(
        "steelyard.planner.cost_provider.operator_seconds",
        lambda program, _: operators if program.repeats > 1 else 1.0,
    ):
        for current in checks:
            prices.check_cut(mock.Mock(), cut_into(current))
    return {parts: round(cut.value, 3) for parts, cut in prices._split_calibrations.items()}


def cut_into(parts: int) -> Program:
    return plain().repeated(parts)


@pytest.mark.parametrize(
    ("checks", "expected"),
    [
        ({2: (0.8, 0.85, 0.9)}, {2: 0.85}),
        ({2: (0.9, 0.95, 1.01)}, {2: 1.0}),
        ({2: (1.0, 1.1, 1.2)}, {2: 1.1}),
        ({2: (0.8, 0.85, 0.9), 4: (0.6, 0.7, 0.79)}, {2: 0.85, 4: 0.7}),
        # Each is faster than the measured time of the coarser split, but not than its upper bound.
        ({2: (0.8, 0.85, 0.9), 4: (0.76, 0.8, 0.84)}, {2: 0.85, 4: 0.85}),
        ({2: (0.9, 0.97, 1.04), 6: (0.85, 0.9, 0.95)}, {2: 1.0, 6: 1.0}),
        # A split that is slower once does not become faster again.
        ({2: (1.0, 1.1, 1.2), 4: (0.5, 0.6, 0.7)}, {2: 1.1, 4: 1.1}),
    ],
)
def test_micro_batches_count_as_faster_only_beyond_their_uncertainty(
    checks: dict[int, tuple[float, float, float]], expected: dict[int, float]
) -> None:
    assert said(checks) == expected


def test_micro_batches_are_no_faster_if_their_operators_are_not() -> None:
    assert said({2: (0.8, 0.85, 0.9)}, operators=1.0) == {2: 1.0}


def estimated(operators: float, parts: int, *, coarser: dict[int, float]) -> float:
    """Return the estimated time of an uncalibrated split, relative to the whole batch.

    Its ``operators`` and the time of ``coarser`` splits are relative as well.
    """
    prices = CostProvider.__new__(CostProvider)
    prices._split_calibrations, prices._base = {}, plain()
    prices._split_times = {k: Estimate.exactly(time) for k, time in coarser.items()}
    device = replace(this_device(), call_seconds=0.0)
    prices.costs = CostTable(device=device, whole_step=Estimate.exactly(1.0))
    # A sum of gradients takes as long as the whole batch.
    whole = 3 * plain().graph.gradient_bytes / device.bytes_per_second
    with mock.patch(
        "steelyard.planner.cost_provider.operator_seconds",
        lambda program, _: whole * (operators if program.repeats > 1 else 1.0),
    ):
        prices.estimate_cut(cut_into(parts))
    return prices._split_calibrations[parts].value * operators


def test_an_uncalibrated_split_is_no_faster_than_the_whole_batch_and_its_sums() -> None:
    assert estimated(0.8, 2, coarser={}) == pytest.approx(2.0)
    assert estimated(0.8, 4, coarser={}) == pytest.approx(4.0)
    assert estimated(7.0, 4, coarser={}) == pytest.approx(7.0)


def test_an_uncalibrated_split_is_no_faster_than_a_coarser_one() -> None:
    assert estimated(1.0, 4, coarser={2: 6.0}) == pytest.approx(6.0)
    assert estimated(1.0, 4, coarser={8: 6.0}) == pytest.approx(4.0)


@pytest.mark.parametrize(
    ("quota", "threads", "ranks", "longer"),
    [
        (0.6, 1, 1, 1 / 0.6),
        (1.5, 1, 2, 2 / 1.5),
        (2.0, 1, 2, 1.0),
        (math.inf, 1, 1, 1.0),
        (0.6, 2, 1, 1.0),
    ],
)
def test_cpu_timings_are_scaled_by_withheld_cpu_time(
    quota: float, threads: int, ranks: int, longer: float
) -> None:
    prices = CostProvider.__new__(CostProvider)
    prices._is_here, prices.notes = True, []
    prices._conditions = mock.Mock(threads=threads)
    with mock.patch("steelyard.planner.cost_provider.quota_cores", return_value=quota):
        assert prices._slowdown_of_cpu_quota(ranks) == pytest.approx(longer)
    assert bool(prices.notes) == (longer > 1)


def test_predictions_are_scaled_by_withheld_cpu_time(tmp_path: Path) -> None:
    def seconds(quota: float) -> float:
        with (
            mock.patch("steelyard.planner.cost_provider.quota_cores", return_value=quota),
            mock.patch.dict(os.environ, STEELYARD_CACHE=str(tmp_path / "costs.sqlite")),
            mock.patch.object(torch, "get_num_threads", return_value=1),
        ):
            planned = sy.plan(model, loss, batch)
        return float(planned.plan.unplanned.metrics.computation_seconds.value)

    model, batch = torch.nn.Linear(64, 64), torch.randn(256, 64)

    def loss(model: torch.nn.Module, batch: torch.Tensor) -> torch.Tensor:
        return model(batch).square().mean()

    assert seconds(0.5) == pytest.approx(2 * seconds(math.inf))


def test_a_plan_with_unmeasured_collectives_is_priced() -> None:
    """``run --adapt`` compares plans with other buckets, and measures nothing for them."""
    torch.manual_seed(0)
    model = GPT(layers=2, width=64, heads=2, vocabulary=96, length=16, dropout=0.0)
    source = CapturedStep(
        model=model, loss=next_token_loss, batch=tokens(12, 16, 96),
        optimizer=partial(torch.optim.SGD, lr=0.1),
    )  # fmt: skip
    plain = Program.plain(source.captured().graph)

    def sent(bucket_bytes: int, *rules: Rule) -> Graph:
        batch = ShardBatchRule(ranks=2, bucket=bucket_bytes)
        lag = OverlapRule(window=1)
        return apply_rules(plain, [batch, lag, *rules], trades=TRADES, source=source).graph

    prices = CostProvider.__new__(CostProvider)
    prices._known = {node.signature for node in sent(1 << 20).nodes}
    other = sent(1 << 16)
    assert {node.signature for node in other.nodes} - prices._known
    assert prices.has_costs(other)
    # The costs of the codec have to be measured, and those of the model.
    code = TernaryGradientsRule(parameter="blocks.*.mlp.up.weight", count=2)
    assert not prices.has_costs(sent(1 << 20, code))
    prices._known -= {node.signature for node in other.nodes if node.op == "aten.mm.default"}
    assert not prices.has_costs(other)
