"""Laws of the predictor on random steps, and one step counted by hand."""

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from steelyard.hardware.cluster import Device
from steelyard.ir.graph import Graph, Role
from steelyard.ir.metrics import Estimate
from steelyard.ir.program import Program
from steelyard.predict import peak_bytes, predict, slowdown, step_seconds
from steelyard.predict.cost_table import CostTable, OperatorCost
from steelyard.predict.liveness import alive_at, liveness
from steelyard.trades.recompute import recomputable, with_copies
from tests.support.graphs import random_step

DEVICE = Device(kind="test", flops_per_second=1e9, bytes_per_second=1e9, memory_bytes=1 << 30)
COSTS = CostTable(device=DEVICE)
graphs = st.integers(0, 10_000).map(random_step)


@given(graph=graphs, repeats=st.integers(1, 3))
@settings(deadline=None, max_examples=60)
def test_the_timeline_ends_in_the_peak_that_is_predicted(graph: Graph, repeats: int) -> None:
    prediction = predict(Program.plain(graph).repeated(repeats), COSTS)
    assert prediction.timeline is not None
    assert max(prediction.timeline.nbytes) == prediction.peak.nbytes
    assert prediction.peak.nbytes == peak_bytes(Program.plain(graph).repeated(repeats), COSTS)


@given(graph=graphs)
@settings(deadline=None, max_examples=60)
def test_no_instruction_holds_more_than_the_peak_and_live_bytes_add_up(graph: Graph) -> None:
    program = Program.plain(graph)
    alive = liveness(program, COSTS)
    for index, nbytes in enumerate(alive.bytes_at):
        assert nbytes <= alive.peak_bytes
        assert nbytes == sum(h.nbytes for h in alive_at(program, index))
    peak = predict(program, COSTS).peak
    assert sum(h.nbytes for h in peak.alive) + peak.workspace_bytes == peak.nbytes


@given(graph=graphs, data=st.data())
@settings(deadline=None, max_examples=60)
def test_recomputation_adds_at_least_the_time_of_its_copies(
    graph: Graph, data: st.DataObject
) -> None:
    plain = Program.plain(graph)
    values = sorted(recomputable(graph))
    chosen = data.draw(st.sets(st.sampled_from(values))) if values else set()
    program = with_copies(plain, chosen)
    again = sum(COSTS.seconds(graph.by_name[i.node]).value for i in program.recomputed)
    added = step_seconds(program, COSTS).value - step_seconds(plain, COSTS).value
    assert abs(added - again * COSTS.whole_step.value) < 1e-9
    ratio = slowdown(program, plain, COSTS)
    assert ratio.low <= 1 + again / step_seconds(plain, COSTS).value * 1.0001
    assert ratio.contains(ratio.value)


@given(graph=graphs, workspace=st.integers(1, 1 << 20))
@settings(deadline=None, max_examples=40)
def test_workspace_is_held_within_its_own_line_only(graph: Graph, workspace: int) -> None:
    program = Program.plain(graph)
    node = next(n for n in graph.nodes if not n.is_free)
    known = OperatorCost(seconds=Estimate.exactly(1.0), workspace_bytes=workspace)
    costs = replace(COSTS, operators={node.signature: known})
    before, after = liveness(program, COSTS).bytes_at, liveness(program, costs).bytes_at
    for index, instruction in enumerate(program.instructions):
        own = instruction.sink is None and instruction.node == node.name
        assert after[index] - before[index] == (workspace if own else 0)


def test_accumulating_holds_gradients_from_the_first_part_on() -> None:
    graph = random_step(7)
    once, thrice = Program.plain(graph), Program.plain(graph).repeated(3)
    gradients = liveness(once, COSTS).left_bytes
    later = liveness(once, COSTS, accumulating=True).peak_bytes
    resident = predict(once, COSTS).peak.resident_bytes
    batch = graph.resident_bytes(Role.BATCH)
    expected = max(resident + 2 * batch + gradients + later, peak_bytes(once, COSTS) + 2 * batch)
    assert abs(peak_bytes(thrice, COSTS) - expected) <= 8
