"""Torch's tables of pipeline schedules are read back as written, and refused if torch has none."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from steelyard.comm.pipeline_schedules import ONE_EACH, SCHEDULES, made_schedule, order_under
from steelyard.errors import BadInput
from steelyard.ir.pipeline_schedule import ActionKind, actions_of
from tests.unit.predict.pipeline.test_replay import SCHEDULES as REPLAYED


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_tables_of_torch_schedules_are_read_back(schedule: str) -> None:
    each = 1 if schedule in ONE_EACH else 2
    order = order_under(schedule, num_ranks=2, num_stages=2 * each, micro_batches=8)
    kinds = {a.work for actions in order.ranks for a in actions}
    is_split = schedule in ("InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")
    assert (ActionKind.BACK_TO_WEIGHTS in kinds) == is_split
    for actions in order.ranks:
        assert actions_of(map(str, actions)) == actions
    forwards = [sum(a.work is ActionKind.FORWARD for a in actions) for actions in order.ranks]
    assert forwards == [8 * each] * 2
    assert order.num_micro_batches == 8


def test_torch_still_says_that_1f1b_begins_with_micro_batch_1() -> None:
    """When this fails, ``_one_forward_one_backward`` can be removed."""
    alone = SimpleNamespace(
        stage_index=1, num_stages=2, group_size=2, group_rank=1, is_last=True, has_backward=True
    )
    table = made_schedule("1F1B", [alone], micro_batches=4).pipeline_order
    assert [str(a) for a in table[1] if a and a.is_compute_op][:2] == ["1F1", "1B0"]


@pytest.mark.parametrize(
    ("schedule", "num_stages", "micro_batches"),
    [("1F1B", 4, 8), ("ZBVZeroBubble", 2, 8), ("GPipe", 3, 8), ("Interleaved1F1B", 4, 5)],
)
def test_stages_that_do_not_suit_a_schedule_are_refused(
    schedule: str, num_stages: int, micro_batches: int
) -> None:
    with pytest.raises(BadInput) as caught:
        order_under(schedule, num_ranks=2, num_stages=num_stages, micro_batches=micro_batches)
    assert len(str(caught.value).splitlines()) == 3


def test_unit_tests_replay_all_schedules() -> None:
    assert set(REPLAYED) == SCHEDULES.keys()
