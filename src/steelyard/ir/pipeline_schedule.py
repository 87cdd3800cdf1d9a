"""A pipeline schedule: the actions of each rank in order, as in the tables of torch's schedules.

Not for making one (comm/pipeline_schedules.py), nor for its duration
(predict/pipeline/replay.py).
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum

from steelyard.errors import PlanFileError

# Receives are posted this many actions ahead. The sender then need not ask for room and wait
# until its gloo thread is scheduled to read the answer.
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
