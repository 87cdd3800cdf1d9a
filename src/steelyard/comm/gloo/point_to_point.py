"""Messages between a rank and all other ranks of a group at once; receives are posted before sends.

Torch's flight recorder does not record point-to-point messages over gloo (torch 2.13). This module
therefore notes the latest ones itself, for reports of the state of a rank. Not for the collectives
that consist of such messages: see direct_collectives.py.
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

# Torch accepts tags of 31 bits. Each step has a range of tags, so that leftover messages of an
# interrupted step never match those of the next. The first range is left to other users of the
# same group.
_TAGS_PER_STEP, _STEP_RANGES = 1 << 16, (1 << 15) - 1
# More messages than a step sends between two of torch's own collectives.
_LATELY = 4096


@dataclass(slots=True)
class Note:
    """A collective over the group of this name; ``number`` counts the collectives of this
    module.
    """

    group: str
    number: int
    words: str
    at_ns: int
    is_over: bool = False


LATELY: deque[Note] = deque(maxlen=_LATELY)


class _Tags:
    """The message tags of one group, shared by all senders in this process."""

    def __init__(self) -> None:
        self._step = self.issued = 0
        self.begin()

    def begin(self) -> None:
        self._step = self._step % _STEP_RANGES + 1
        self._numbers = count()

    def next(self) -> int:
        self.issued += 1
        return self._step * _TAGS_PER_STEP + next(self._numbers) % _TAGS_PER_STEP


_TAGS: defaultdict[str, _Tags] = defaultdict(_Tags)


def begin_step(group: dist.ProcessGroup) -> None:
    """Begin a step; every rank of the group must call this."""
    _TAGS[group.group_name].begin()


class PendingMessages:
    """Messages in flight. This object keeps their buffers alive."""

    def __init__(
        self, works: Sequence[dist.Work], buffers: Sequence[torch.Tensor], note: Note
    ) -> None:
        self._works, self._buffers, self._note = works, buffers, note

    def wait(self) -> None:
        for work in self._works:
            work.wait()
        self._note.is_over = True

    def give_up(self) -> None:
        """Mark the messages as abandoned: no caller will wait for them."""
        self._note.is_over = True


def hand_over(
    kind: Exchange,
    parts: Sequence[torch.Tensor],
    buffers: Sequence[torch.Tensor],
    group: dist.ProcessGroup,
) -> PendingMessages:
    """Send each other rank its part, and receive from each into its buffer in ``buffers``."""
    tags, (part, *_) = _TAGS[group.group_name], parts
    tag = tags.next()
    words = f"{kind} {str(part.dtype).removeprefix('torch.')} {list(part.shape)}"
    LATELY.append(note := Note(group.group_name, tags.issued, words, time.time_ns()))
    # Use a rotated order, so that not all ranks send to the same one first.
    others = [(group.rank() + distance) % group.size() for distance in range(1, group.size())]
    works = [dist.irecv(buffers[r], group=group, group_src=r, tag=tag) for r in others]
    works += [dist.isend(parts[r], group=group, group_dst=r, tag=tag) for r in others]
    # The calls return None only on ranks that are not in the group.
    return PendingMessages(cast("list[dist.Work]", works), [*buffers, *parts], note)
