"""A trace of a deep model's predicted step, for one rank of each stage.

The schedule's table of actions is replayed with the passes of each stage, so the trace ends when
the step is predicted to. Not for the prediction: see step.py.
"""

from collections.abc import Iterator, Sequence

from steelyard.ir.pipeline_schedule import ActionKind, schedule_order
from steelyard.plans.trace_span import DEVICE, WAITING, Span
from steelyard.predict.analytic.step import LayoutCost, StageBlocks, deep_step_of, passes_by_stage
from steelyard.predict.pipeline.replay import Replayed, StageCost, replay

# At most this many stages are drawn.
_MOST_RANKS = 64
_WORDS = {ActionKind.FORWARD: "forward", ActionKind.BACKWARD: "backward"}


def deep_spans(costs: Sequence[LayoutCost], stages: Sequence[StageBlocks]) -> tuple[Span, ...]:
    """Return the spans of a step; ``costs`` is each stage's cost model on its assigned device."""
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
    step = deep_step_of(costs, stages)
    found: list[Span] = []
    for number, actions in enumerate(played.ranks[:_MOST_RANKS]):
        rank, cost, stage = number * width, costs[number], stages[number]
        exchanging = cost.exposed_seconds(number, stage)
        found += _passes(rank, actions)
        after = [
            (WAITING, "waiting for other stages", "", done - actions[-1].end_seconds),
            (WAITING, "waiting for gradients of other ranks", "gradients", exchanging),
            (WAITING, "waiting for other stages", "", step.exposed_seconds - exchanging),
            (DEVICE, "update", "optimizer", cost.update_seconds(number, stage.num_blocks)),
        ]
        found += _sequential(rank, actions[-1].end_seconds, after)
    return tuple(found)


def _passes(rank: int, actions: Sequence[Replayed]) -> Iterator[Span]:
    free = 0.0
    for action in actions:
        if action.begin_seconds > free:
            yield _span(
                rank, WAITING, "waiting for another stage", "", free, action.begin_seconds - free
            )
        free = action.end_seconds
        name = f"{_WORDS[action.action.work]}, micro-batch {action.action.micro_batch}"
        where = f"stage {action.action.stage}"
        yield _span(rank, DEVICE, name, where, action.begin_seconds, free - action.begin_seconds)


def _sequential(
    rank: int, begin: float, pieces: Sequence[tuple[str, str, str, float]]
) -> Iterator[Span]:
    for stream, name, where, seconds in pieces:
        if seconds > 0:
            yield _span(rank, stream, name, where, begin, seconds)
            begin += seconds


def _span(rank: int, stream: str, name: str, where: str, begin: float, seconds: float) -> Span:
    return Span(
        rank=rank, stream=stream, name=name, where=where, begin_seconds=begin, seconds=seconds
    )
