"""Messages of a rank to all others of a group at once, and from all: what is to come is asked for
before anything is sent.

Torch's flight recorder knows nothing of messages over gloo (torch 2.13), so what was issued lately
is noted here, for whoever asks where a rank is. Not for what they are part of: see
direct_collectives.py.
"""

import time
from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from typing import cast

import torch
import torch.distributed as dist

from steelyard.ir.collective import Exchange

# Torch takes tags of 31 bits. Those of a step begin anew: what is left of one that some rank broke
# off meets nothing of the next. The first are left to others, who may send over the same group.
_OF_A_STEP, _STEPS = 1 << 16, (1 << 15) - 1
# More than a step has between two of torch's exchanges.
_LATELY = 4096


@dataclass(slots=True)
class Note:
    """An exchange that was issued over the group of that name, the so-manieth of ours there."""

    group: str
    number: int
    words: str
    at_ns: int
    is_over: bool = False


LATELY: deque[Note] = deque(maxlen=_LATELY)


class _Tags:
    """Of one group, whoever sends over it."""

    def __init__(self) -> None:
        self._step = self.issued = 0
        self.begin()

    def begin(self) -> None:
        self._step = self._step % _STEPS + 1
        self._numbers = count()

    def next(self) -> int:
        self.issued += 1
        return self._step * _OF_A_STEP + next(self._numbers) % _OF_A_STEP


_TAGS: defaultdict[str, _Tags] = defaultdict(_Tags)


def begin_step(group: dist.ProcessGroup) -> None:
    """On all its ranks."""
    _TAGS[group.group_name].begin()


class PendingMessages:
    """What is to be waited for, and has its place as long as this is there."""

    def __init__(
        self, works: Sequence[dist.Work], places: Sequence[torch.Tensor], note: Note
    ) -> None:
        self._works, self._places, self._note = works, places, note

    def wait(self) -> None:
        for work in self._works:
            work.wait()
        self._note.is_over = True

    def give_up(self) -> None:
        """Nobody will wait for it."""
        self._note.is_over = True


def hand_over(
    kind: Exchange,
    parts: Sequence[torch.Tensor],
    rooms: Sequence[torch.Tensor],
    group: dist.ProcessGroup,
) -> PendingMessages:
    """To each other rank its part; what comes from each is put into its room."""
    tags, (part, *_) = _TAGS[group.group_name], parts
    tag = tags.next()
    words = f"{kind} {str(part.dtype).removeprefix('torch.')} {list(part.shape)}"
    LATELY.append(note := Note(group.group_name, tags.issued, words, time.time_ns()))
    # Not all to the same one at first.
    others = [(group.rank() + far) % group.size() for far in range(1, group.size())]
    works = [dist.irecv(rooms[r], group=group, group_src=r, tag=tag) for r in others]
    works += [dist.isend(parts[r], group=group, group_dst=r, tag=tag) for r in others]
    # Who is in the group is given one for each.
    return PendingMessages(cast("list[dist.Work]", works), [*rooms, *parts], note)
