"""Lower bounds on the step time and the peak memory of all plans of a layout.

Not for bounds on one assignment of blocks to stages: see stage_assignment.py.
"""

from collections import Counter
from collections.abc import Mapping, Sequence

from steelyard.predict.analytic.step import LayoutCost, StageBlocks
from steelyard.predict.pipeline.duration import (
    least_interleaved_seconds,
    least_pipeline_seconds,
)


def least_step_seconds(stage_costs: Sequence[LayoutCost], blocks: int) -> float:
    """Return a lower bound on the step time of the layout without recompute.

    The slowest stage takes at least as long as the total work would take at the combined speed of
    all stages. It also takes at least as long as an equal share of the blocks would take on the
    fastest stage.
    """
    stages = stage_costs[0].layout.pipeline
    block_seconds = {
        cost: cost.in_turn(cost.block) if blocks else 0.0 for cost in dict.fromkeys(stage_costs)
    }
    # The stages of equal cost outside of their blocks: their seconds there, and their number.
    around = [(stage_costs[s], stage_costs[s].ends_seconds(s), 1) for s in _end_stages(stages)]
    around += [
        (cost, cost.ends_seconds(_inner_stage(stages)), count)
        for cost, count in Counter(stage_costs[1:-1]).items()
    ]
    fastest_block, most = min(block_seconds.values()), -(-blocks // stages)
    slowest = most * fastest_block + min(seconds for _, seconds, _ in around)
    if fastest_block:
        speed = sum(1 / block_seconds[cost] for cost in stage_costs)
        slowest = max(
            slowest, (blocks + sum(n * t / block_seconds[cost] for cost, t, n in around)) / speed
        )
    total = blocks * fastest_block + sum(count * seconds for _, seconds, count in around)
    pipeline = _least_pipeline_seconds(stage_costs, blocks, block_seconds, slowest, total)
    return pipeline + least_seconds_after(stage_costs, blocks)


def _least_pipeline_seconds(
    stage_costs: Sequence[LayoutCost],
    blocks: int,
    block_seconds: Mapping[LayoutCost, float],
    slowest: float,
    total: float,
) -> float:
    layout = stage_costs[0].layout
    if layout.virtual == 1:
        return least_pipeline_seconds(layout, slowest=slowest, total=total)
    each = blocks // layout.pipeline
    last = each * block_seconds[stage_costs[-1]] + stage_costs[-1].ends_seconds(layout.pipeline - 1)
    return least_interleaved_seconds(
        layout,
        slowest=slowest,
        last=last,
        first_runs=sum(each * block_seconds[cost] for cost in stage_costs[:-1]) / layout.virtual,
    )


def least_seconds_after(stage_costs: Sequence[LayoutCost], blocks: int) -> float:
    """Return a lower bound on the seconds after the pipeline: gradient exchange and update.

    At least one stage must exchange and update an equal share of the blocks, or more.
    """
    layout = stage_costs[0].layout
    inner, share = _inner_stage(layout.pipeline), -(-blocks // layout.pipeline)
    most = blocks - layout.pipeline + 1
    distinct_costs = dict.fromkeys(stage_costs)
    exposed = min(
        cost.exposed_seconds(inner, StageBlocks(blocks=((cost.block, n),)))
        for cost in distinct_costs
        for n in (share, most)
    )
    return exposed + min(cost.update_seconds(inner, share) for cost in distinct_costs)


def least_peak_bytes(cost: LayoutCost, blocks: int) -> int:
    """Return a lower bound on the peak of the fullest rank if no activations are saved.

    For this, the first and last stages have as few blocks as possible, and an inner stage has the
    most.
    """
    layout = cost.layout
    most = -(-blocks // layout.pipeline)
    fewest = most if layout.virtual > 1 else min(1, most) if layout.pipeline > 1 else most
    inner = cost.model_memory(_inner_stage(layout.pipeline), most).nbytes
    ends = (
        cost.model_memory(s, fewest).nbytes + cost.around_bytes(s) + cost.ending_bytes(s)
        for s in _end_stages(layout.pipeline)
    )
    return max(*ends, inner if layout.pipeline > 2 else 0)


def _end_stages(stages: int) -> tuple[int, ...]:
    return (0,) if stages == 1 else (0, stages - 1)


def _inner_stage(stages: int) -> int:
    """Return a stage that is neither first nor last, or 0 if there is none."""
    return 1 if stages > 2 else 0
