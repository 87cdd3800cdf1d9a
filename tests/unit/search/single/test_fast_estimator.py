"""The search's estimate equals the predictor on the program that the trade writes."""

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from steelyard.hardware.cluster import OFFLOAD_IN, OFFLOAD_OUT, Device, Link
from steelyard.ir.graph import Graph, Output, OutputKind
from steelyard.ir.metrics import Estimate
from steelyard.ir.program import Program
from steelyard.ir.saved_activations import saved_for_backward
from steelyard.predict import peak_bytes, step_seconds
from steelyard.predict.cost_table import CostTable, OperatorCost
from steelyard.search.single.estimator.fast_estimator import FastEstimator
from steelyard.search.single.estimator.transfer_timing import TransferMode
from steelyard.trades.offload import with_transfers
from steelyard.trades.quantize_activations import quantizable, with_codes
from steelyard.trades.recompute import recomputable, with_copies
from tests.support.graphs import in_floats, random_step

DEVICE = Device(kind="made up", flops_per_second=1e9, bytes_per_second=1e8, memory_bytes=1 << 30)
cases = st.tuples(st.integers(min_value=0, max_value=10**6), st.sampled_from([1, 3]), st.booleans())


def costs_with_workspace(graph: Graph, seed: int) -> CostTable:
    rng = random.Random(seed)
    return CostTable(
        device=DEVICE,
        operators={
            node.signature: OperatorCost(
                seconds=Estimate.exactly(rng.random()), workspace_bytes=rng.choice([0, 0, 5000])
            )
            for node in graph.nodes
            if not node.is_free
        },
        whole_step=Estimate(value=1.1, low=1.0, high=1.2),
    )


@settings(deadline=None, max_examples=200)
@given(cases)
def test_the_estimator_agrees_with_the_predictor_on_peak_and_seconds(
    case: tuple[int, int, bool],
) -> None:
    seed, repeats, measured = case
    graph = random_step(seed, num_values=12)
    costs = costs_with_workspace(graph, seed) if measured else CostTable(device=DEVICE)
    plain = Program.plain(graph).repeated(repeats)
    values = recomputable(graph)
    tally = FastEstimator(plain, costs, values)
    rng = random.Random(seed)
    for share in (0.0, 0.3, 0.7, 1.0):
        chosen = [v for v in sorted(values) if rng.random() < share]
        counted = tally.estimate(tally.storages_of(chosen))
        program = with_copies(plain, chosen)
        assert counted.peak_bytes == peak_bytes(program, costs)
        assert counted.seconds == pytest.approx(step_seconds(program, costs).value)
        assert counted.folded().max() == counted.live_bytes.max() <= counted.peak_bytes
        assert tally.flops_of(tally.storages_of(chosen)) == program.flops
        assert counted.excess(counted.peak_bytes) == 0.0
        # A view is recomputed too, but no operator runs for it.
        assert len(counted.active) == sum(
            not graph.by_name[i.node].is_free for i in program.recomputed
        )


@settings(deadline=None, max_examples=300)
@given(cases)
def test_the_estimator_agrees_with_the_predictor_on_repeated_recomputation(
    case: tuple[int, int, bool],
) -> None:
    seed, repeats, measured = case
    graph = random_step(seed, num_values=14)
    costs = costs_with_workspace(graph, seed) if measured else CostTable(device=DEVICE)
    plain = Program.plain(graph).repeated(repeats)
    values = recomputable(graph)
    tally = FastEstimator(plain, costs, values)
    storage = {value: s for s, value in tally.value_on.items()}
    rng = random.Random(seed)
    for share in (0.3, 0.7, 1.0):
        chosen = [v for v in sorted(values) if rng.random() < share]
        times = {v: rng.randint(2, 4) for v in chosen if rng.random() < 0.6}
        choice = tally.storages_of(chosen) | {
            tally.repeat_choice(storage[v], times[v]) for v in times
        }
        counted = tally.estimate(choice)
        program = with_copies(plain, chosen, times=times)
        assert program.problems() == []
        assert counted.peak_bytes == peak_bytes(program, costs)
        assert counted.seconds == pytest.approx(step_seconds(program, costs).value)
        assert counted.folded().max() == counted.live_bytes.max() <= counted.peak_bytes
        assert tally.flops_of(choice) == program.flops
        assert len(counted.active) == sum(
            not graph.by_name[i.node].is_free for i in program.recomputed
        )
        # The values reported as recomputed several times are all there are.
        plainly = tally.estimate(tally.storages_of(chosen) | set(counted.repeated))
        assert (plainly.peak_bytes, plainly.active) == (counted.peak_bytes, counted.active)


@settings(deadline=None, max_examples=200)
@given(cases)
def test_the_estimator_agrees_with_the_predictor_on_offload(case: tuple[int, int, bool]) -> None:
    seed, repeats, measured = case
    rng = random.Random(seed)
    graph = random_step(seed, num_values=12)
    rate, latency = 10 ** rng.uniform(3, 9), rng.choice([0.0, 1e-5])
    link = Link(kind="made up", latency_seconds=latency, bytes_per_second=rate, disturbs=0.2)
    costs = costs_with_workspace(graph, seed) if measured else CostTable(device=DEVICE)
    costs = replace(costs, links={OFFLOAD_OUT: link, OFFLOAD_IN: link}, offload_bytes=1 << 40)
    plain = Program.plain(graph).repeated(repeats)
    values = recomputable(graph)
    tally = FastEstimator(plain, costs, values, saved_for_backward(plain))
    for share in (0.0, 0.3):
        chosen = [v for v in sorted(values) if rng.random() < share]
        again = tally.storages_of(chosen)
        able = [s for s in tally.offloadable if s not in again]
        ways = {
            tally.offload_choice(s, rng.choice(list(TransferMode)))
            for s in able
            if rng.random() < 0.6
        }
        counted = tally.estimate(again | ways)
        program = with_copies(plain, chosen)
        times = tally.lags_and_leads(again | ways)
        program = with_transfers(program, times) if times else program
        assert counted.peak_bytes == peak_bytes(program, costs)
        assert counted.seconds == pytest.approx(step_seconds(program, costs).value)
        assert {tally.storage(c) for c in counted.evicted} == {
            s for s, v in tally.offloadable.items() if v in times
        }


@settings(deadline=None, max_examples=300)
@given(cases, st.booleans())
def test_the_estimator_agrees_with_the_predictor_on_all_four_choices(
    case: tuple[int, int, bool], has_offload_memory: bool
) -> None:
    seed, repeats, measured = case
    rng = random.Random(seed)
    graph = in_floats(random_step(seed, num_values=12))
    plain = Program.plain(graph).repeated(repeats)
    able = quantizable(plain)
    every = with_codes(plain, able).graph
    costs = costs_with_workspace(every, seed) if measured else CostTable(device=DEVICE)
    if has_offload_memory:
        rate, latency = 10 ** rng.uniform(3, 9), rng.choice([0.0, 1e-5])
        link = Link(kind="made up", latency_seconds=latency, bytes_per_second=rate, disturbs=0.01)
        costs = replace(costs, links={OFFLOAD_OUT: link, OFFLOAD_IN: link}, offload_bytes=1 << 40)
    values = recomputable(graph)
    tally = FastEstimator(plain, costs, values, saved_for_backward(plain), able)
    for shares in ((0.0, 0.4), (0.3, 0.4), (0.3, 1.0), (0.0, 1.0)):
        chosen = [v for v in sorted(values) if rng.random() < shares[0]]
        again = tally.storages_of(chosen)
        small = {s for s in tally.quantizable if s not in again and rng.random() < shares[1]}
        rest = [s for s in tally.offloadable if s not in again | small]
        ways = {
            tally.offload_choice(s, rng.choice(list(TransferMode)))
            for s in rest
            if rng.random() < 0.6
        }
        times = {v: rng.randint(2, 3) for v in chosen if rng.random() < 0.4}
        often = {tally.repeat_choice(s, times[v]) for s, v in tally.value_on.items() if v in times}
        choice = again | ways | often | {tally.quantize_choice(s) for s in small}
        counted = tally.estimate(choice)
        codes = {
            tally.quantizable[tally.storage(c)] for c in counted.evicted if tally.is_quantize(c)
        }
        copied = with_copies(plain, chosen, times=times)
        program = with_codes(copied, {tally.quantizable[s] for s in small})
        assert frozenset(program.quantized) == codes
        times = tally.lags_and_leads(choice)
        program = with_transfers(program, times) if times else program
        assert counted.peak_bytes == peak_bytes(program, costs)
        assert counted.seconds == pytest.approx(step_seconds(program, costs).value)
        assert counted.folded().max() == counted.live_bytes.max() <= counted.peak_bytes
        assert tally.flops_of(choice) == program.flops
        assert len(codes) + len(times) == len(counted.evicted)


def test_a_value_has_one_choice() -> None:
    graph = in_floats(random_step(3, num_values=12))
    link = Link(kind="made up", latency_seconds=0.0, bytes_per_second=1e9)
    costs = CostTable(
        device=DEVICE, links={OFFLOAD_OUT: link, OFFLOAD_IN: link}, offload_bytes=1 << 40
    )
    plain = Program.plain(graph)
    tally = FastEstimator(
        plain, costs, recomputable(graph), saved_for_backward(plain), quantizable(plain)
    )
    both = sorted(set(tally.quantizable) & set(tally.unit_of))
    assert both
    for storage in both:
        far, coded = (
            tally.offload_choice(storage, TransferMode.IMMEDIATE),
            tally.quantize_choice(storage),
        )
        assert tally.estimate(frozenset({far, coded})).evicted in ((coded,), ())
        assert tally.estimate(frozenset({storage, far, coded})).evicted == ()


def test_too_little_offload_memory_fits_nothing() -> None:
    graph = random_step(3, num_values=12)
    link = Link(kind="made up", latency_seconds=0.0, bytes_per_second=1e9)
    costs = CostTable(
        device=DEVICE, links={OFFLOAD_OUT: link, OFFLOAD_IN: link}, offload_bytes=4096
    )
    plain = Program.plain(graph)
    tally = FastEstimator(plain, costs, (), saved_for_backward(plain))
    choices = [tally.offload_choice(s, TransferMode.HIDDEN) for s in sorted(tally.offloadable)]
    assert tally.estimate(frozenset(choices)).peak_bytes > 1 << 39
    small = min(tally.offloadable, key=lambda s: tally.nbytes[s])
    assert tally.nbytes[small] <= 4096
    assert (
        tally.estimate(frozenset({tally.offload_choice(small, TransferMode.HIDDEN)})).peak_bytes
        < 1 << 30
    )


def test_a_buffers_new_value_waits_for_readers_of_the_old_one() -> None:
    """An example are BatchNorm's running statistics, which a copy reads again late in the step."""
    seen = 0
    for seed in range(60):
        graph = random_step(seed, num_values=12)
        weight = next((n for n in graph.inputs() if n.name.startswith("parameter")), None)
        value = next((n.name for n in graph.forward() if not n.is_free and len(n.outputs) == 1), "")
        if weight is None or not value:
            continue
        update = Output(kind=OutputKind.UPDATE, node=value, target=weight.name)
        graph = replace(graph, outputs=(*graph.outputs, update))
        values = recomputable(graph)
        plain, costs = Program.plain(graph), CostTable(device=DEVICE)
        tally = FastEstimator(plain, costs, values)
        program = with_copies(plain, values)
        assert tally.estimate(tally.storages_of(values)).peak_bytes == peak_bytes(program, costs)
        readers = {i.node for i in program.recomputed if weight.name in i.inputs}
        sink = next(n for n, i in enumerate(program.instructions) if i.sink == update)
        after = {i.node for i in program.instructions[sink:] if i.is_recomputed}
        assert not readers & after, "a copy would read the new value of the buffer"
        seen += bool(readers)
    assert seen > 5


def test_the_estimator_includes_the_optimizer_step() -> None:
    graph, optimizer = random_step(1), random_step(2, num_values=20)
    update = replace(Program.plain(optimizer), loss="")
    plain, costs = Program.plain(graph, update=update), CostTable(device=DEVICE)
    tally = FastEstimator(plain, costs, recomputable(graph))
    assert tally.estimate(frozenset()).peak_bytes == peak_bytes(plain, costs)
    assert tally.estimate(frozenset()).seconds == pytest.approx(step_seconds(plain, costs).value)
