"""Messages through slots: when they are chosen, the text of the plan, and the number of slots.

For messages between live ranks, see tests/system/dist/test_slots.py and test_pipelines.py.
"""

from __future__ import annotations

import importlib
from dataclasses import replace

import pytest

from steelyard.errors import BadInput, Mismatch
from steelyard.hardware.cluster import Link
from steelyard.ir.message_slots import PINNED, SlotSpec, edges_of
from steelyard.ir.parallel_layout import ParallelLayout
from steelyard.ir.pipeline_schedule import AHEAD, Action, ActionKind
from steelyard.ir.program import Program
from steelyard.ir.rule import Rule
from steelyard.plans.budget import Budget
from steelyard.plans.trade import apply_rules
from steelyard.predict import peak_bytes, predict
from steelyard.predict.cost_table import CostTable
from steelyard.search import PipelineSearch, SearchResult, StepSearch
from steelyard.trades import TRADES
from steelyard.trades.shared_memory_transfer import SharedMemoryTransfer, SharedMemoryTransferRule
from tests.support.declared import costs
from tests.unit.graphs.stored import stored_step
from tests.unit.trades.test_shard_pipeline import SOURCE, stages

LITTLE = stored_step("gpt-2-blocks")
SLOTS = SharedMemoryTransferRule(messages="stages")


def with_slots(costs: CostTable, *, rate: float = 1e12, latency: float = 1e-7) -> CostTable:
    link = Link(kind="slots", latency_seconds=latency, bytes_per_second=rate, disturbs=1.0)
    return replace(costs, links={**costs.links, PINNED: link})


def pinned(program: Program) -> Program:
    return SharedMemoryTransfer().rewrite(program, [SLOTS], SOURCE)


def found(costs: CostTable) -> SearchResult:
    source, program = LITTLE, LITTLE.plain

    def searching(layout: tuple[Rule, ...]) -> StepSearch:
        return StepSearch(program, trades=TRADES, source=source, costs=costs, layout=layout)

    staged = PipelineSearch(
        program, layout=ParallelLayout(pipeline=2), trades=TRADES, source=source, costs=costs,
        searching=searching,
    )  # fmt: skip
    best = staged.find(Budget())
    assert best is not None
    return best


def test_shared_memory_transfer_is_offered_to_stages_only() -> None:
    (offer,), refused = SharedMemoryTransfer().offers(stages("blocks.1"), SOURCE)
    assert offer.rules == (SLOTS,)
    assert SharedMemoryTransfer().offers(SOURCE.plain, SOURCE) == ((), ())
    assert refused == ()
    with pytest.raises(Mismatch, match="has no pipeline stages") as error:
        apply_rules(SOURCE.plain, [SLOTS], trades=TRADES, source=SOURCE)
    assert len(str(error.value).splitlines()) == 3


def test_a_plan_with_shared_memory_is_refused_for_other_ranks() -> None:
    with pytest.raises(BadInput, match="have none in common") as error:
        predict(pinned(stages("blocks.1")), costs())
    assert len(str(error.value).splitlines()) == 3


def test_shared_memory_transfer_is_taken_if_the_step_is_faster() -> None:
    slow = costs(1e6)
    best = found(with_slots(slow))
    assert SLOTS in best.rules
    assert sorted(rule for taken in best.taken for rule in taken.rules) == sorted(best.rules)
    (taken,) = (taken for taken in best.taken if taken.trade == "shared_memory_transfer")
    assert taken.buys_seconds > 0
    others = [rule for rule in best.rules if rule != SLOTS]
    alone = apply_rules(LITTLE.plain, others, trades=TRADES, source=LITTLE)
    without = predict(alone, slow)
    gained = without.metrics.step_seconds.value - best.prediction.metrics.step_seconds.value
    assert gained == pytest.approx(taken.buys_seconds)
    assert gained > 0


def test_a_refused_shared_memory_transfer_has_a_reason() -> None:
    for price, said in (
        (with_slots(costs(), rate=1e5, latency=1e-2), "would take ~"),
        (costs(), "not known to share memory"),
    ):
        best = found(price)
        assert SLOTS not in best.rules
        (refused,) = (r for r in best.refused if r.trade == "shared_memory_transfer")
        assert said in refused.reason


@pytest.mark.parametrize("schedule", ["GPipe", "1F1B"])
def test_there_are_as_many_slots_as_simultaneous_messages(schedule: str) -> None:
    """There are two more for messages sent ahead, if there are more messages than that."""
    program = stages("blocks.1", schedule=schedule, micro_batches=8)
    assert program.pipeline is not None
    pipeline = program.pipeline
    back, forward = edges_of(pipeline.order, pipeline.stages.stages, pipeline.stages.graph)
    assert (forward.source, forward.target, forward.is_back) == (0, 1, False)
    assert (back.source, back.target, back.is_back) == (1, 0, True)
    # In 1F1B the second stage sends back its first micro-batch at once; in GPipe all of them wait
    # there.
    assert forward.count == {"GPipe": 8, "1F1B": 1 + AHEAD}[schedule]
    assert forward.holds_all == (schedule == "GPipe")
    assert back.count == 1 + AHEAD
    graph, stage = pipeline.stages.graph, pipeline.stages.stages[1]
    sizes = tuple(graph.by_name[name].outputs[0].nbytes for name in stage.receives)
    assert forward.sizes == sizes


def test_no_more_messages_are_read_at_once_than_there_are_slots() -> None:
    """The number follows from the messages that actions read and keep, for V-shaped schedules."""
    for schedule in ("ZBVZeroBubble", "InterleavedZeroBubble", "Interleaved1F1B"):
        ends = ("blocks.0", "blocks.1", "blocks.2")
        pipeline = stages(*ends, schedule=schedule, micro_batches=8).pipeline
        assert pipeline is not None
        for edge in edges_of(pipeline.order, pipeline.stages.stages, pipeline.stages.graph):
            assert _most_held(pipeline.order.ranks[edge.target], edge) <= edge.count, schedule


def _most_held(actions: tuple[Action, ...], edge: SlotSpec) -> int:
    """Return the most messages held: until the last pass over a micro-batch."""
    reads = (
        {ActionKind.BACKWARD, ActionKind.BACK_TO_INPUTS} if edge.is_back else {ActionKind.FORWARD}
    )
    ends = {ActionKind.BACKWARD, ActionKind.BACK_TO_INPUTS}
    held: set[int] = set()
    most = 0
    for action in actions:
        if action.stage == edge.stage:
            held |= {action.micro_batch} if action.work in reads else set()
            most = max(most, len(held))
            held -= {action.micro_batch} if action.work in ends else set()
    return most


def test_slots_are_resident_memory() -> None:
    """Values read and sent are counted there, and not a second time in the passes."""
    price = with_slots(costs())
    program = stages("blocks.1", schedule="GPipe", micro_batches=8)
    assert program.pipeline is not None
    pipeline = program.pipeline
    edges = edges_of(pipeline.order, pipeline.stages.stages, pipeline.stages.graph)
    before, after = (peak_bytes(each, price) for each in (program, pinned(program)))
    # Each of the eight micro-batches that stay with the second stage has a slot; one had been in
    # transit.
    assert abs(after - before) <= max(sum(e.nbytes for e in edges if e.target == r) for r in (0, 1))
    resident = [predict(each, price).peak.resident_bytes for each in (program, pinned(program))]
    assert resident[1] > resident[0]


@pytest.mark.parametrize("is_made_there", [True, False])
def test_copying_into_a_slot_is_priced_on_the_sending_rank(
    is_made_there: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = pinned(stages("blocks.1"))
    assert program.pipeline is not None
    pipeline = program.pipeline
    _, forward = edges_of(pipeline.order, pipeline.stages.stages, pipeline.stages.graph)
    if not is_made_there:
        module = importlib.import_module("steelyard.predict.pipeline.messages")
        monkeypatch.setattr(module, "written_in_place", lambda *_, **__: {})
    fast, slow = (predict(program, with_slots(costs(), rate=rate)).metrics for rate in (1e12, 1e6))
    copying = 4 * sum(forward.sizes) / 1e6
    if is_made_there:
        assert slow.step_seconds == fast.step_seconds
        assert slow.communication_seconds == fast.communication_seconds
        assert slow.communication_seconds.value < copying / 100
    else:
        assert slow.step_seconds.value - fast.step_seconds.value >= copying
        assert slow.communication_seconds.value == pytest.approx(copying, rel=1e-3)
