"""A pipeline schedule: the actions of each rank in order, as in the tables of torch's schedules.

Not for torch's schedule objects (comm/pipeline_schedules.py) or for the duration of a schedule
(predict/pipeline/).
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum

from steelyard.errors import BadInput, PlanFileError

# Receives are posted this many actions ahead. Otherwise the sender would have to ask for room, and
# wait until its gloo thread is scheduled to read the answer.
AHEAD = 2


class ActionKind(StrEnum):
    """Kinds of actions, in torch's letters."""

    FORWARD = "F"
    BACK_TO_INPUTS = "I"
    BACK_TO_WEIGHTS = "W"
    BACKWARD = "B"


@dataclass(frozen=True, slots=True, kw_only=True)
class Action:
    stage: int
    work: ActionKind
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.work}{self.micro_batch}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """The actions of each rank, in order.

    ``holds_sends``: sent buffers stay alive until the step ends, as in all of torch's schedules
    but 1F1B (2.13); otherwise, until the next send in the same direction.
    """

    ranks: tuple[tuple[Action, ...], ...]
    holds_sends: bool = False

    @property
    def rank_of(self) -> dict[int, int]:
        """The rank of each stage."""
        return {a.stage: rank for rank, actions in enumerate(self.ranks) for a in actions}

    @property
    def num_stages(self) -> int:
        return len(self.rank_of)

    @property
    def num_micro_batches(self) -> int:
        return len({a.micro_batch for actions in self.ranks for a in actions})


def actions_of(cells: Iterable[str]) -> tuple[Action, ...]:
    """Parse a row of torch's table, ``0F0, 0F1, , 1B0, (0F2;1B1)OVERLAP_F_B``.

    Overlapping actions are listed sequentially, because they share one stream.
    """
    found = []
    for cell in cells:
        if not _CELL.fullmatch(cell.strip()):
            raise PlanFileError(
                f"a schedule has the invalid action {cell!r}",
                expected="a stage, F, I, W or B, and a micro-batch, such as 0F1; overlapped "
                "actions as (0F2;1B1)OVERLAP_F_B",
                remedy="use the table as torch's schedule wrote it",
            )
        found += [
            Action(stage=int(stage), work=ActionKind(work), micro_batch=int(micro_batch))
            for stage, work, micro_batch in _ACTION.findall(cell)
        ]
    return tuple(found)


def schedule_order(*, num_ranks: int, micro_batches: int, virtual: int = 1) -> Order:
    """Return the table of 1F1B, or of interleaved 1F1B if each rank has ``virtual`` stages.

    Interleaved 1F1B is torch's own table. The table that torch 2.13 reports for 1F1B is wrong: on
    the last rank it begins with micro-batch 1 and ends with one too many. The table here is what
    torch runs. Only interleaved sends keep their tensors alive until the step ends.
    """
    num_rounds = max(1, micro_batches // num_ranks) if virtual > 1 else 1
    per_round, rest = divmod(micro_batches, num_rounds)
    if rest:
        raise BadInput(
            f"{micro_batches} micro-batches in {num_rounds} equal rounds of interleaved stages",
            expected="a multiple of the ranks of the pipeline",
            remedy="choose another number of micro-batches, or one stage for each rank",
        )
    # The stages of a rank and the micro-batches, in the order in which their forward passes begin.
    turns = [
        (run, number * per_round + index)
        for number in range(num_rounds)
        for run in range(virtual)
        for index in range(per_round)
    ]
    rows = []
    for rank in range(num_ranks):
        forward, backward = (
            [
                Action(stage=run_of * num_ranks + rank, work=work, micro_batch=index)
                for run, index in turns
                for run_of in [run if work is ActionKind.FORWARD else virtual - 1 - run]
            ]
            for work in (ActionKind.FORWARD, ActionKind.BACKWARD)
        )
        behind = num_ranks - 1 - rank
        ahead = min(len(turns), behind if virtual == 1 else (virtual - 1) * per_round + 2 * behind)
        actions = forward[:ahead]
        for index, action in enumerate(backward):
            actions += [*forward[ahead + index : ahead + index + 1], action]
        rows.append(tuple(actions))
    return Order(ranks=tuple(rows), holds_sends=virtual > 1)


def source_of(action: Action, rank_of: Mapping[int, int]) -> int | None:
    """Return the stage on another rank that sends the input of this action, if any."""
    step = {ActionKind.FORWARD: -1, ActionKind.BACKWARD: 1, ActionKind.BACK_TO_INPUTS: 1}.get(
        action.work
    )
    if step is None:
        return None
    source = action.stage + step
    is_sent = source in rank_of and rank_of[source] != rank_of[action.stage]
    return source if is_sent else None


_ACTION = re.compile(r"(\d+)([FIWB])(\d+)")
_CELL = re.compile(r"|\d+[FIWB]\d+|\(\d+[FIWB]\d+(;\d+[FIWB]\d+)*\)OVERLAP_F_B")
