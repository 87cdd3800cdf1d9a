"""The cost of random numbers in a pipeline, whose ranks draw the numbers that one device would
draw.

The implementation is run/pipeline/rng.py. Not for data-parallel ranks, which draw independently.
"""

from collections.abc import Callable, Sequence
from itertools import product, takewhile

from steelyard.ir.graph import Node
from steelyard.ir.pipeline_schedule import ActionKind, Order
from steelyard.ir.pipeline_stages import PipelineStage

# The bytes of a state of torch's generator on the CPU (torch 2.13), which is a Mersenne twister.
STATE_BYTES = 5056
# The time of skipping numbers relative to drawing them (110 vs. 195 us for 32,768 numbers of torch
# 2.13's bernoulli).
_SKIP_RATIO = 0.55


def states_bytes(stages: Sequence[PipelineStage], order: Order, rank: int) -> int:
    """Return the most bytes of generator states that this rank saves at one time.

    A state is saved for each position of the sequence that the rank skips and will draw from later.
    """
    return STATE_BYTES * _skips(stages, order, rank)[0]


def skipping_seconds(
    stages: Sequence[PipelineStage], order: Order, seconds: Callable[[Node], float]
) -> list[float]:
    """Return the seconds that the rank of each stage spends on skipping random numbers.

    Before a forward pass, a rank skips the numbers that other stages drew since its own last draw.
    """
    seconds_of = [_SKIP_RATIO * sum(map(seconds, _random_nodes(stage))) for stage in stages]
    found = [0.0] * len(stages)
    for rank in range(len(order.ranks) if any(seconds_of) else 0):
        for at, skipped in _skips(stages, order, rank)[1]:
            found[at] += seconds_of[skipped] / order.num_micro_batches
    return found


def _skips(
    stages: Sequence[PipelineStage], order: Order, rank: int
) -> tuple[int, list[tuple[int, int]]]:
    """Return the largest number of states saved at one time, and all skips of a rank.

    A skip is described by the stage before whose forward pass it happens, and the stage whose
    numbers are skipped.
    """
    random = [bool(_random_nodes(stage)) for stage in stages]
    places = product(range(order.num_micro_batches), range(len(stages)))
    saved: set[tuple[int, int]] = set()
    most, found = 0, []
    for action in order.ranks[rank]:
        place = action.micro_batch, action.stage
        if action.work is not ActionKind.FORWARD or not random[action.stage]:
            continue
        if place in saved:
            most = max(most, len(saved) + 1)  # plus the state before this jump
            saved.remove(place)
            continue
        for skipped in takewhile(place.__ne__, places):
            found.append((action.stage, skipped[1]))
            if random[skipped[1]] and order.rank_of[skipped[1]] == rank:
                saved.add(skipped)
        most = max(most, len(saved))
    return most, found


def _random_nodes(stage: PipelineStage) -> list[Node]:
    return [node for node in stage.forward.nodes if node.is_random]
