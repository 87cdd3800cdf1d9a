"""Who does what in which order in a pipeline: the table of actions that torch's schedules make.

Not for making one (comm/pipeline_schedules.py), nor for how long it takes
(predict/pipeline/replay.py).
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum

from steelyard.errors import PlanFileError

# Room is made for what an action is sent while as many before it are still to be done: whoever
# sends need not ask first, and wait until its gloo has a turn on the core to hear the answer.
AHEAD = 2


class ActionKind(StrEnum):
    """In torch's letters."""

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
    """The actions of each rank, one after another. ``holds_sends``: what was sent stays until the
    step ends, as in all of torch's schedules but 1F1B (2.13); there, until the next goes the same
    way."""

    ranks: tuple[tuple[Action, ...], ...]
    holds_sends: bool = False

    @property
    def rank_of(self) -> dict[int, int]:
        """Of each stage."""
        return {a.stage: rank for rank, actions in enumerate(self.ranks) for a in actions}

    @property
    def num_stages(self) -> int:
        return len(self.rank_of)

    @property
    def num_micro_batches(self) -> int:
        return len({a.micro_batch for actions in self.ranks for a in actions})


def actions_of(cells: Iterable[str]) -> tuple[Action, ...]:
    """A row of torch's table, ``0F0, 0F1, , 1B0, (0F2;1B1)OVERLAP_F_B``; what overlaps is taken
    one after the other, as it is on one stream."""
    found = []
    for cell in cells:
        if not _CELL.fullmatch(cell.strip()):
            raise PlanFileError(
                f"a schedule says {cell!r}",
                expected="stage, F, I, W or B, and micro-batch, as 0F1; two that overlap as "
                "(0F2;1B1)OVERLAP_F_B",
                remedy="take the table as torch's schedule wrote it",
            )
        found += [
            Action(stage=int(stage), work=ActionKind(work), micro_batch=int(micro_batch))
            for stage, work, micro_batch in _ACTION.findall(cell)
        ]
    return tuple(found)


def source_of(action: Action, rank_of: Mapping[int, int]) -> int | None:
    """The stage on another rank that sends what this action reads, where one does."""
    before = {ActionKind.FORWARD: -1, ActionKind.BACKWARD: 1, ActionKind.BACK_TO_INPUTS: 1}.get(
        action.work
    )
    if before is None:
        return None
    source = action.stage + before
    is_sent = source in rank_of and rank_of[source] != rank_of[action.stage]
    return source if is_sent else None


_ACTION = re.compile(r"(\d+)([FIWB])(\d+)")
_CELL = re.compile(r"|\d+[FIWB]\d+|\(\d+[FIWB]\d+(;\d+[FIWB]\d+)*\)OVERLAP_F_B")
