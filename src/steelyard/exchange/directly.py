"""Gathers, all-to-alls and scattered sums of ranks that gloo joins: each sends each other one what
is for it, and asks for all that is to come before it sends anything.

Stands in place of torch's calls (Channel.calls). Gloo's own send first: who asks has his word wait
behind his data, and who is asked does not send before it is there. Where exchanges follow one
another on a slow link, a gather of two ranks took 1.5 times as long as what it carries, and an
all-to-all twice; of a sum that each needs some rows of, gloo sends all rows to all (decision 0034).
Nor is there a copy in a thread of gloo's. Not for sums that all need: around a ring they go both
ways, and take as long as they should.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, cast

import torch
import torch.distributed as dist

from steelyard.exchange.channel import Channel, Waiting
from steelyard.exchange.devices import CPU

# So that what is left of a step that some rank broke off meets nothing of the next. Torch takes
# what fits into 31 bits.
_MOST_OF_A_STEP, _MOST_STEPS = 1 << 16, 1 << 15


def goes_directly(x: torch.Tensor, group: dist.ProcessGroup) -> bool:
    """Gloo sends nothing that lies on a GPU."""
    backend: Any = group._get_backend(x.device)
    return x.device.type == "cpu" and backend.name() == "gloo"


def hand_over(
    parts: Sequence[torch.Tensor],
    rooms: Sequence[torch.Tensor],
    group: dist.ProcessGroup,
    *,
    tag: int = 0,
) -> list[dist.Work]:
    """To each other rank its part; what comes from each is put into its room. What is returned is
    to be waited for, in any order."""
    # Not all to the same one at first.
    others = [(group.rank() + far) % group.size() for far in range(1, group.size())]
    works = [dist.irecv(rooms[r], group=group, group_src=r, tag=tag) for r in others]
    works += [dist.isend(parts[r], group=group, group_dst=r, tag=tag) for r in others]
    # Who is in the group is given one for each.
    return cast("list[dist.Work]", works)


def put_together(whole: torch.Tensor, row: torch.Tensor, group: dist.ProcessGroup) -> None:
    """Every rank's row, and here they are when this returns."""
    if goes_directly(row, group):
        _fill(whole, [row] * group.size(), group)
    else:
        dist.all_gather_single(whole, row, group=group)


def hand_round(whole: torch.Tensor, rows: torch.Tensor, group: dist.ProcessGroup) -> None:
    """To each rank its row; what each has for this one is here when this returns."""
    if goes_directly(rows, group):
        _fill(whole, rows.chunk(group.size()), group)
    else:
        dist.all_to_all_single(whole, rows, group=group)


def own_rows_of_sum(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Of what the ranks have, summed up, this one's rows on memory of their own."""
    x = x.contiguous()
    result = torch.empty_like(x.chunk(group.size())[group.rank()])
    if goes_directly(x, group):
        works, add_up = _asked_to_sum(x, result, group)
        for work in works:
            work.wait()
        add_up()
    else:
        dist.reduce_scatter_single(result, x, group=group)
    return result


def _asked_to_sum(
    x: torch.Tensor, result: torch.Tensor, group: dist.ProcessGroup, *, tag: int = 0
) -> tuple[list[dist.Work], Callable[[], None]]:
    """What is to be waited for, and what to do then. What comes first lies in ``result``."""
    parts = x.chunk(group.size())
    own = parts[group.rank()]
    more = [torch.empty_like(own) for _ in range(group.size() - 2)]
    rooms = [result, *more]
    rooms.insert(group.rank(), own)

    def add_up() -> None:
        for part in (own, *more):
            result.add_(part)

    return hand_over(parts, rooms, group, tag=tag), add_up


def _fill(whole: torch.Tensor, parts: Sequence[torch.Tensor], group: dist.ProcessGroup) -> None:
    rooms, own = whole.chunk(group.size()), group.rank()
    works = hand_over(parts, rooms, group)
    rooms[own].copy_(parts[own])
    for work in works:
        work.wait()


class Directly:
    """``over`` is the channel of the axis, whose time of waiting is counted on."""

    # Between steps.
    held_bytes = 0

    def __init__(self, over: Channel) -> None:
        assert over.process_group is not None, "see can"
        self._over, self._group = over, over.process_group
        self._step = self._number = 0
        # By what was returned when it was issued, which whoever waits hands in.
        self._under_way: dict[int, tuple[torch.Tensor, Callable[[], None]]] = {}

    @staticmethod
    def can(over: Channel) -> bool:
        return over.process_group is not None and over.backend == "gloo" and over.device == CPU

    @property
    def channel(self) -> Channel:
        calls: dict[str, Callable[..., torch.Tensor]] = {
            "_c10d_functional.all_to_all_single.default": self._all_to_all,
            "steelyard.all_gather": self._all_gather,
            "_c10d_functional.reduce_scatter_tensor.default": self._reduce_scatter,
        }
        return replace(self._over, calls=calls, waiting=_Arriving(self._over.waiting, self._finish))

    def begin(self) -> None:
        """A step. What one that was broken off had asked for comes into its tensors first."""
        for _, arrive in [*self._under_way.values()]:
            arrive()
        self._under_way.clear()
        self._step, self._number = (self._step + 1) % _MOST_STEPS, 0

    # --- issuing

    def _all_gather(self, share: torch.Tensor, num_ranks: int, _group: str) -> torch.Tensor:
        whole = share.new_empty((num_ranks * share.shape[0], *share.shape[1:]))
        return self._filled(whole, [share] * num_ranks)

    def _all_to_all(
        self, x: torch.Tensor, _given: list[int], _taken: list[int], _group: str
    ) -> torch.Tensor:
        return self._filled(torch.empty_like(x), x.chunk(self._over.num_ranks))

    def _filled(self, whole: torch.Tensor, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        rooms = whole.chunk(self._over.num_ranks)
        rooms[self._over.rank].copy_(parts[self._over.rank])
        works = hand_over(parts, rooms, self._group, tag=self._tag())
        return self._issued(whole, works, lambda: None)

    def _reduce_scatter(self, x: torch.Tensor, op: str, ranks: int, _group: str) -> torch.Tensor:
        assert op == "sum", op
        result = torch.empty_like(x.chunk(ranks)[self._over.rank])
        return self._issued(result, *_asked_to_sum(x, result, self._group, tag=self._tag()))

    def _tag(self) -> int:
        self._number += 1
        return self._step * _MOST_OF_A_STEP + self._number % _MOST_OF_A_STEP

    def _issued(
        self, result: torch.Tensor, works: Sequence[dist.Work], finish: Callable[[], None]
    ) -> torch.Tensor:
        def arrive() -> None:
            for work in works:
                work.wait()
            finish()

        self._under_way[id(result)] = result, arrive
        return result

    # --- waiting

    def _finish(self, sent: torch.Tensor) -> bool:
        """Whether it was sent from here."""
        _, arrive = self._under_way.pop(id(sent), (None, None))
        if arrive is None:
            return False
        with self._over.waiting.running():
            arrive()
        return True


class _Arriving(Waiting):
    """Sums are torch's."""

    def __init__(self, others: Waiting, finishes: Callable[[torch.Tensor], bool]) -> None:
        super().__init__()
        self._others, self._finishes = others, finishes

    def __call__(self, sent: torch.Tensor) -> torch.Tensor:
        return sent if self._finishes(sent) else self._others(sent)
