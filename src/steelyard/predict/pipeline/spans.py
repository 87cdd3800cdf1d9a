"""The trace spans of replayed actions: the passes of a rank, and its waits in between.

Not for the times of the actions: see replay.py.
"""

from collections.abc import Iterator, Sequence

from steelyard.ir.pipeline_schedule import ActionKind
from steelyard.plans.trace_span import DEVICE, WAITING, Span
from steelyard.predict.pipeline.replay import Replayed

_NAMES = {
    ActionKind.FORWARD: "forward",
    ActionKind.BACKWARD: "backward",
    ActionKind.BACK_TO_INPUTS: "backward to inputs",
    ActionKind.BACK_TO_WEIGHTS: "backward to weights",
}


def action_spans(rank: int, actions: Sequence[Replayed], *, waiting_for: str) -> Iterator[Span]:
    """Yield the spans of a rank's actions, and of the waits before them."""
    free = 0.0
    for replayed in actions:
        action, begin = replayed.action, replayed.begin_seconds
        where = f"stage {action.stage}"
        if begin > free:
            yield Span(
                rank=rank, stream=WAITING, name=waiting_for, where=where, begin_seconds=free,
                seconds=begin - free,
            )  # fmt: skip
        free = replayed.end_seconds
        yield Span(
            rank=rank,
            stream=DEVICE,
            name=f"{_NAMES[action.work]}, micro-batch {action.micro_batch}",
            where=where,
            begin_seconds=begin,
            seconds=free - begin,
        )
