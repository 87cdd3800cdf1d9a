"""Torch's pipeline schedules by name: the stages of each rank and the table of actions.

Not for running one: see run/pipeline/driver.py.
"""

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

from torch.distributed.pipelining import (
    Schedule1F1B,
    ScheduleDualPipeV,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleLoopedBFS,
    ScheduleZBVZeroBubble,
)

from steelyard.errors import BadInput
from steelyard.ir.pipeline_schedule import Order, actions_of, schedule_order

SCHEDULES: Mapping[str, Any] = {
    "GPipe": ScheduleGPipe,
    "1F1B": Schedule1F1B,
    "LoopedBFS": ScheduleLoopedBFS,
    "Interleaved1F1B": ScheduleInterleaved1F1B,
    "InterleavedZeroBubble": ScheduleInterleavedZeroBubble,
    "ZBVZeroBubble": ScheduleZBVZeroBubble,
    "DualPipeV": ScheduleDualPipeV,
}
ONE_EACH = ("GPipe", "1F1B")
# V-shaped placement: the first and the last stage are on the first rank, the second and the last
# but one on the second, and so on.
_FOLDED = ("ZBVZeroBubble", "DualPipeV")


def stages_of_rank(schedule: str, rank: int, *, num_ranks: int, num_stages: int) -> tuple[int, ...]:
    """Return the stages of ``rank`` under this schedule."""
    per_rank, rest = divmod(num_stages, num_ranks)
    fits = (
        per_rank == 1
        if schedule in ONE_EACH
        else per_rank == 2
        if schedule in _FOLDED
        else per_rank > 0
    )
    if rest or not fits or schedule not in SCHEDULES:
        raise BadInput(
            f"{num_stages} stages on {num_ranks} ranks are not supported by the schedule "
            f"{schedule}",
            expected="one stage a rank for GPipe and 1F1B, two for ZBVZeroBubble and DualPipeV, "
            f"an equal number for the others of {', '.join(SCHEDULES)}",
            remedy="use another number of stages, or another schedule",
        )
    if schedule in _FOLDED:
        return (rank, num_stages - 1 - rank)
    return tuple(range(rank, num_stages, num_ranks))


def made_schedule(schedule: str, stages: Any, *, micro_batches: int) -> Any:
    """Return torch's schedule object over this rank's stages."""
    try:
        return SCHEDULES[schedule](
            stages[0] if schedule in ONE_EACH else stages,
            n_microbatches=micro_batches,
            # The last stage returns the loss itself; without a loss function, torch skips the
            # backward pass.
            loss_fn=lambda loss, _: loss,
            scale_grads=False,
        )
    except ValueError as error:
        raise BadInput(
            f"{schedule} does not support {micro_batches} micro-batches: {str(error)[:120]}",
            expected="a number of micro-batches that the schedule supports",
            remedy="use a multiple of the number of ranks, at least two for each rank, or "
            "another schedule",
        ) from error


def order_under(schedule: str, *, num_ranks: int, num_stages: int, micro_batches: int) -> Order:
    """Return the action table of all ranks, without any process running."""
    stages = [
        SimpleNamespace(
            stage_index=index,
            num_stages=num_stages,
            group_size=num_ranks,
            group_rank=0,
            is_first=index == 0,
            is_last=index == num_stages - 1,
            has_backward=True,
            submod=None,
        )
        for index in stages_of_rank(schedule, 0, num_ranks=num_ranks, num_stages=num_stages)
    ]
    schedule_object = made_schedule(schedule, stages, micro_batches=micro_batches)
    if schedule == "1F1B":
        return schedule_order(num_ranks=num_ranks, micro_batches=micro_batches)
    # Drop gaps and the reductions of gradients over replicas, because they are not compute actions.
    table = schedule_object.pipeline_order
    rows = [[str(a) for a in table[rank] if a and a.is_compute_op] for rank in sorted(table)]
    # These schedules collect the work objects of their sends, which keep the tensors alive.
    return Order(ranks=tuple(actions_of(row) for row in rows), holds_sends=True)
