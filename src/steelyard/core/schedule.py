"""Who does what in which order in a pipeline: the table of actions that torch's schedules make.

Not for making one (exchange/schedules.py), nor for how long it takes (predict/schedule.py).
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from steelyard.core.errors import PlanFileError


class Work(StrEnum):
    """In torch's letters."""

    FORWARD = "F"
    BACK_TO_INPUTS = "I"
    BACK_TO_WEIGHTS = "W"
    BACKWARD = "B"


@dataclass(frozen=True, slots=True, kw_only=True)
class Action:
    stage: int
    work: Work
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.work}{self.micro_batch}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """The actions of each rank, one after another. ``holds_sends``: what was sent stays until the
    step ends, as in all of torch's schedules but 1F1B (2.13); there, until the next goes the same
    way. ``awaited``: while each action works, those after it for whose messages there is room
    already, where there are any."""

    ranks: tuple[tuple[Action, ...], ...]
    holds_sends: bool = False
    awaited: tuple[tuple[tuple[Action, ...], ...], ...] = ()

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
            Action(stage=int(stage), work=Work(work), micro_batch=int(micro_batch))
            for stage, work, micro_batch in _ACTION.findall(cell)
        ]
    return tuple(found)


def awaited_in(cells: Iterable[str]) -> tuple[tuple[Action, ...], ...]:
    """Of a row that says too when room is made for messages, ``2RECV_F0``: for each action, those
    after it that wait for one."""
    room: list[str] = []
    found: dict[Action, tuple[str, ...]] = {}
    for cell in cells:
        if _ROOM_MADE.fullmatch(cell):
            room.append(cell)
        elif _CELL.fullmatch(cell):
            for action in actions_of([cell]):
                if (message := _read_by(action)) in room:
                    room.remove(message)
                found[action] = tuple(room)
    readers = {_read_by(action): action for action in found}
    return tuple(tuple(readers[message] for message in each) for each in found.values())


def _read_by(action: Action) -> str:
    way = {Work.FORWARD: "F", Work.BACK_TO_WEIGHTS: ""}.get(action.work, "B")
    return f"{action.stage}RECV_{way}{action.micro_batch}"


_ACTION = re.compile(r"(\d+)([FIWB])(\d+)")
_CELL = re.compile(r"|\d+[FIWB]\d+|\(\d+[FIWB]\d+(;\d+[FIWB]\d+)*\)OVERLAP_F_B")
_ROOM_MADE = re.compile(r"\d+RECV_[FB]\d+")
