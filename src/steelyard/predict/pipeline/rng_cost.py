"""What a rank of a pipeline pays so that it draws what one device would: see run/pipeline/rng.py.

Not for what ranks draw that share a batch: those draw apart.
"""

from collections.abc import Callable, Sequence
from itertools import product, takewhile

from steelyard.ir.graph import Node
from steelyard.ir.pipeline_schedule import ActionKind, Order
from steelyard.ir.pipeline_stages import PipelineStage

# A state of torch's generator on the CPU (torch 2.13): a Mersenne twister's.
STATE_BYTES = 5056
# To let numbers pass, over drawing them (110 over 195 us, of 32,768 of torch 2.13's bernoulli).
_PASSING = 0.55


def states_bytes(stages: Sequence[PipelineStage], order: Order, rank: int) -> int:
    """The states that this rank keeps at most: of places that it let pass, to draw there later."""
    return STATE_BYTES * _let_pass(stages, order, rank)[0]


def passing_seconds(
    stages: Sequence[PipelineStage], order: Order, seconds: Callable[[Node], float]
) -> list[float]:
    """Of each stage, in front of its forward pass: for what has been drawn since its rank did."""
    takes = [_PASSING * sum(map(seconds, _drawing(stage))) for stage in stages]
    found = [0.0] * len(stages)
    for rank in range(len(order.ranks) if any(takes) else 0):
        for at, passed in _let_pass(stages, order, rank)[1]:
            found[at] += takes[passed] / order.num_micro_batches
    return found


def _let_pass(
    stages: Sequence[PipelineStage], order: Order, rank: int
) -> tuple[int, list[tuple[int, int]]]:
    """How many states are kept at most, and each time that a stage is let pass: in front of which
    stage's forward pass, and which."""
    random = [bool(_drawing(stage)) for stage in stages]
    places = product(range(order.num_micro_batches), range(len(stages)))
    kept: set[tuple[int, int]] = set()
    most, found = 0, []
    for action in order.ranks[rank]:
        place = action.micro_batch, action.stage
        if action.work is not ActionKind.FORWARD or not random[action.stage]:
            continue
        if place in kept:
            most = max(most, len(kept) + 1)  # and where it was before
            kept.remove(place)
            continue
        for passed in takewhile(place.__ne__, places):
            found.append((action.stage, passed[1]))
            if random[passed[1]] and order.rank_of[passed[1]] == rank:
                kept.add(passed)
        most = max(most, len(kept))
    return most, found


def _drawing(stage: PipelineStage) -> list[Node]:
    return [node for node in stage.forward.nodes if node.is_random]
