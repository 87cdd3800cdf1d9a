"""The search prices sliced fetches as the predictor does."""

import random
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from steelyard.hardware.cluster import OFFLOAD_IN, OFFLOAD_OUT, Link
from steelyard.ir.graph import FETCH_MATMUL, Graph
from steelyard.ir.saved_activations import saved_for_backward
from steelyard.passes.offload.sliced_activation_matmuls import (
    sliceable_inputs,
    with_inputs_in_slices,
)
from steelyard.predict import peak_bytes, step_seconds
from steelyard.predict.cost_table import CostTable, OperatorCost
from steelyard.search.single.estimator.fast_estimator import FastEstimator
from steelyard.search.single.estimator.transfer_timing import TransferMode
from steelyard.search.single.slicing_candidates import worth_slicing
from steelyard.trades.offload import with_transfers
from steelyard.trades.quantize_activations import quantizable, with_codes
from steelyard.trades.recompute import recomputable, with_copies
from tests.harness import Trial
from tests.system.offload.test_sliced_activations import LAYERS, able, bare, square, tower
from tests.unit.search.single.test_fast_estimator import DEVICE, costs_with_workspace


def priced(graph: Graph, rng: random.Random) -> CostTable:
    costs = costs_with_workspace(graph, rng.randrange(99)) if rng.random() < 0.7 else None
    link = Link(
        kind="made up",
        latency_seconds=rng.choice((0.0, 1e-5)),
        bytes_per_second=10 ** rng.uniform(5, 10),
        disturbs=0.2,
        call_seconds=rng.choice((0.0, 1e-5)),
    )
    links = {OFFLOAD_OUT: link, OFFLOAD_IN: link}
    costs = costs or CostTable(device=DEVICE)
    # The workspace is so large that these products set the peak, in slices or whole.
    products = (n for n in graph.nodes if n.op in ("aten.mm.default", FETCH_MATMUL))
    more = {
        n.signature: OperatorCost(
            seconds=costs.seconds(n), workspace_bytes=rng.choice((0, 1 << 20, 1 << 24))
        )
        for n in products
    }
    operators = {**costs.operators, **more}
    return replace(costs, operators=operators, links=links, offload_bytes=1 << 40)


def test_only_values_read_at_the_peak_are_considered_for_slicing() -> None:
    """In a perceptron these are read where a gelu's gradient is computed; before a single layer
    there are none."""
    layers = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))
    perceptron = Trial(layers, square, torch.randn(600, 64)).plain
    alone = Trial(bare(512, 64), dropped, torch.randn(600, 512)).plain
    for plain, is_worth in ((perceptron, False), (alone, True)):
        able = dict.fromkeys(sliceable_inputs(plain, saved_for_backward(plain)), 4)
        assert able
        found = worth_slicing(FastEstimator(plain, CostTable(device=DEVICE), ()), able)
        assert bool(found) == is_worth
        assert found.items() <= able.items()


def dropped(model: nn.Module, x: Tensor) -> Tensor:
    return square(model, F.dropout(x, 0.5))


@pytest.mark.parametrize("name", LAYERS)
def test_the_estimator_agrees_with_the_predictor_for_all_choices(name: str) -> None:
    torch.manual_seed(0)
    once = tower(LAYERS[name], 3, 200, height=2).plain
    sliced = 0
    for seed in range(16):
        rng = random.Random(seed)
        plain = once.repeated(rng.choice((1, 3)))
        slices = {v: rng.choice((2, 3, 5, 8)) for v in able(plain)}
        found = with_inputs_in_slices(plain, slices, {v: k for k, v in enumerate(slices)}).graph
        coding = with_codes(plain, quantizable(plain)).graph
        more = [n for n in coding.nodes if n.name not in found.by_name]
        costs = priced(replace(found, nodes=(*found.nodes, *more)), rng)
        values = recomputable(plain.graph)
        tally = FastEstimator(
            plain, costs, values, saved_for_backward(plain), sorted(quantizable(plain)), slices
        )
        chosen = [v for v in sorted(values) if rng.random() < 0.3 * (seed % 2)]
        again = tally.storages_of(chosen)
        coded = {
            tally.quantize_choice(s)
            for s in tally.quantizable
            if s not in again and rng.random() < 0.1
        }
        left = [s for s in tally.offloadable if s not in again | {*map(tally.storage, coded)}]
        ways = [*TransferMode, TransferMode.SLICED, TransferMode.SLICED_IMMEDIATE]
        choice = (
            again
            | coded
            | {tally.offload_choice(s, rng.choice(ways)) for s in left if rng.random() < 0.7}
        )
        counted = tally.estimate(frozenset(choice))
        program = with_copies(plain, chosen)
        program = with_codes(program, [tally.evicted_value(c) for c in sorted(coded)])
        times, partition = tally.lags_and_leads(choice), tally.slice_counts(choice)
        program = with_transfers(program, times, partition)
        assert counted.peak_bytes == peak_bytes(program, costs)
        assert counted.seconds == pytest.approx(step_seconds(program, costs).value)
        sliced += len(partition)
        whole = tally.unsliced(choice)
        assert not tally.slice_counts(whole)
        assert tally.lags_and_leads(whole).keys() == times.keys()
    assert sliced > 10
