"""A trace of a deep model's predicted step, for one rank of each stage.

The schedule's table of actions is replayed with the passes of each stage, so the trace ends at the
predicted end of the step. Not for the prediction: see step.py.
"""

from collections.abc import Iterator, Sequence

from steelyard.ir.pipeline_schedule import ActionKind, schedule_order
from steelyard.plans.trace_span import DEVICE, WAITING, Span
from steelyard.predict.analytic.step import LayoutCost, StageBlocks, analytic_step, passes_by_stage
from steelyard.predict.pipeline.replay import StageCost, replay
from steelyard.predict.pipeline.spans import action_spans

# At most this many stages are drawn.
_MOST_RANKS = 64


def analytic_spans(costs: Sequence[LayoutCost], stages: Sequence[StageBlocks]) -> tuple[Span, ...]:
    """Return the spans of a step; ``costs`` contains each stage's cost model on its device."""
    layout = costs[0].layout
    order = schedule_order(
        num_ranks=layout.pipeline, micro_batches=layout.micro_batches, virtual=layout.virtual
    )
    stage_costs = [
        StageCost(seconds={ActionKind.FORWARD: forward, ActionKind.BACKWARD: backward})
        for forward, backward in passes_by_stage(costs, stages)
    ]
    played = replay(order, stage_costs)
    width = layout.tensor * layout.data
    done = played.seconds
    step = analytic_step(costs, stages)
    found: list[Span] = []
    for number, actions in enumerate(played.ranks[:_MOST_RANKS]):
        rank, cost, stage = number * width, costs[number], stages[number]
        exchanging = cost.exposed_seconds(number, stage)
        found += action_spans(rank, actions, waiting_for="waiting for another stage")
        after = [
            (WAITING, "for other stages", "", done - actions[-1].end_seconds),
            (WAITING, "for gradients of other ranks", "gradients", exchanging),
            (WAITING, "for other stages", "", step.exposed_seconds - exchanging),
            (DEVICE, "update", "optimizer", cost.update_seconds(number, stage.num_blocks)),
        ]
        found += _sequential(rank, actions[-1].end_seconds, after)
    return tuple(found)


def _sequential(
    rank: int, begin: float, pieces: Sequence[tuple[str, str, str, float]]
) -> Iterator[Span]:
    for stream, name, where, seconds in pieces:
        if seconds > 0:
            yield Span(
                rank=rank, stream=stream, name=name, where=where, begin_seconds=begin,
                seconds=seconds,
            )  # fmt: skip
            begin += seconds
