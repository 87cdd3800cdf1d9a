"""Lifetimes: at each instant, the tensors alive add up to the level of the timeline."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from steelyard.hardware.cluster import Device
from steelyard.ir.graph import Graph
from steelyard.ir.program import Program
from steelyard.predict import memory_history, predict
from steelyard.predict.cost_table import CostTable
from tests.support.graphs import random_step

COSTS = CostTable(
    device=Device(kind="test", flops_per_second=1e9, bytes_per_second=1e9, memory_bytes=1 << 30)
)
graphs = st.integers(0, 10_000).map(random_step)


@given(graph=graphs, repeats=st.integers(1, 3))
@settings(deadline=None, max_examples=25)
def test_the_tensors_alive_add_up_to_the_timeline(graph: Graph, repeats: int) -> None:
    program = Program.plain(graph).repeated(repeats)
    history = memory_history(program, COSTS)
    assert history is not None
    assert history.timeline == predict(program, COSTS).timeline
    for instant, nbytes in enumerate(history.timeline.nbytes):
        assert sum(one.tensor.nbytes for one in history.alive_at(instant)) == nbytes


@given(graph=graphs, instants=st.integers(2, 9))
@settings(deadline=None, max_examples=25)
def test_fewer_instants_have_the_same_tensors_and_keep_the_peak(
    graph: Graph, instants: int
) -> None:
    whole = memory_history(Program.plain(graph), COSTS)
    assert whole is not None
    few = whole.thinned(instants)
    assert len(few.timeline.nbytes) <= max(instants, 2)
    assert max(few.timeline.nbytes) == max(whole.timeline.nbytes)
    for instant, nbytes in enumerate(few.timeline.nbytes):
        assert sum(one.tensor.nbytes for one in few.alive_at(instant)) == nbytes


def test_the_smallest_tensors_are_left_out_first_and_are_counted() -> None:
    whole = memory_history(Program.plain(random_step(7)), COSTS)
    assert whole is not None
    assert len(whole.lifetimes) > 2
    few = whole.thinned(10_000, 2)
    assert len(few.lifetimes) == 2
    assert few.num_left_out == len(whole.lifetimes) - 2
    areas = [one.tensor.nbytes * (one.last - one.first + 1) for one in whole.lifetimes]
    kept = [one.tensor.nbytes * (one.last - one.first + 1) for one in few.lifetimes]
    assert kept == sorted(areas, reverse=True)[:2]


@pytest.mark.parametrize("seed", [3, 4])
def test_a_saved_tensor_is_read_last_in_the_backward_pass(seed: int) -> None:
    history = memory_history(Program.plain(random_step(seed)), COSTS)
    assert history is not None
    phases = history.timeline.phases
    saved = [one for one in history.lifetimes if one.is_saved]
    assert saved
    for one in saved:
        assert phases[one.first] == "forward"
        assert phases[one.last] == "backward"
        assert one.last_use
