"""Gathers, all-to-alls and scattered sums of ranks that gloo joins: each sends each other one what
is for it, and asks for all that is to come before it sends anything.

Stands in place of torch's calls (Channel.calls). Gloo's own send first: who asks has his word wait
behind his data, and who is asked does not send before it is there. Where exchanges follow one
another on a slow link, a gather of two ranks took 1.5 times as long as what it carries, and an
all-to-all twice; of a sum that each needs some rows of, gloo sends all rows to all (decision 0034).
Nor is there a copy in a thread of gloo's. Not for sums that all need: around a ring they go both
ways, and take as long as they should. Not for the messages: see point_to_point.py.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from steelyard.comm.channel import Channel, Waiting
from steelyard.comm.devices import CPU
from steelyard.comm.gloo.point_to_point import PendingMessages, begin_step, hand_over
from steelyard.ir.collective import Exchange


def put_together(whole: torch.Tensor, row: torch.Tensor, group: dist.ProcessGroup) -> None:
    """Every rank's row, and here they are when this returns."""
    if _goes_directly(row, group):
        _filled(whole, [row] * group.size(), group, Exchange.ALL_GATHER).wait()
    else:
        dist.all_gather_single(whole, row, group=group)


def hand_round(whole: torch.Tensor, rows: torch.Tensor, group: dist.ProcessGroup) -> None:
    """To each rank its row; what each has for this one is here when this returns."""
    if _goes_directly(rows, group):
        _filled(whole, rows.chunk(group.size()), group, Exchange.ALL_TO_ALL).wait()
    else:
        dist.all_to_all_single(whole, rows, group=group)


def own_rows_of_sum(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Of what the ranks have, summed up, this one's rows on memory of their own."""
    x = x.contiguous()
    result = torch.empty_like(x.chunk(group.size())[group.rank()])
    if _goes_directly(x, group):
        under_way, add_up = _asked_to_sum(x, result, group)
        under_way.wait()
        add_up()
    else:
        dist.reduce_scatter_single(result, x, group=group)
    return result


def _goes_directly(x: torch.Tensor, group: dist.ProcessGroup) -> bool:
    """Gloo sends nothing that lies on a GPU."""
    backend: Any = group._get_backend(x.device)
    return x.device.type == "cpu" and backend.name() == "gloo"


def _filled(
    whole: torch.Tensor, parts: Sequence[torch.Tensor], group: dist.ProcessGroup, kind: Exchange
) -> PendingMessages:
    """With this rank's own part now, and with what comes from the others when it has."""
    rooms, own = whole.chunk(group.size()), group.rank()
    under_way = hand_over(kind, parts, rooms, group)
    rooms[own].copy_(parts[own])
    return under_way


def _asked_to_sum(
    x: torch.Tensor, result: torch.Tensor, group: dist.ProcessGroup
) -> tuple[PendingMessages, Callable[[], None]]:
    """What is to be waited for, and what to do then. One part that comes lies in ``result``."""
    assert group.size() > 1, "nobody's part lies in the result"
    parts = x.chunk(group.size())
    own = parts[group.rank()]
    more = [torch.empty_like(own) for _ in range(group.size() - 2)]
    rooms = [result, *more]
    rooms.insert(group.rank(), own)

    def add_up() -> None:
        for part in (own, *more):
            result.add_(part)

    return hand_over(Exchange.REDUCE_SCATTER, parts, rooms, group), add_up


class DirectCollectives:
    """``over`` is the channel of the axis, whose time of waiting is counted on."""

    # Between steps.
    held_bytes = 0

    def __init__(self, over: Channel) -> None:
        assert over.process_group is not None, "see can"
        self._over, self._group = over, over.process_group
        # By what was returned when it was issued, which whoever waits hands in.
        self._under_way: dict[int, tuple[torch.Tensor, PendingMessages, Callable[[], None]]] = {}
        # Of steps that were broken off.
        self._left: list[PendingMessages] = []

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
        """A step. What one that was broken off has under way still comes, and gloo says no more to
        who takes its place away."""
        for _, under_way, _ in self._under_way.values():
            under_way.give_up()
            self._left.append(under_way)
        self._under_way.clear()
        begin_step(self._group)

    # --- issuing

    def _all_gather(self, share: torch.Tensor, num_ranks: int, _group: str) -> torch.Tensor:
        share = share.contiguous()
        whole = share.new_empty((num_ranks * share.shape[0], *share.shape[1:]))
        under_way = _filled(whole, [share] * num_ranks, self._group, Exchange.ALL_GATHER)
        return self._issued(whole, under_way)

    def _all_to_all(
        self, x: torch.Tensor, _given: list[int], _taken: list[int], _group: str
    ) -> torch.Tensor:
        x = x.contiguous()
        whole, parts = torch.empty_like(x), x.chunk(self._over.num_ranks)
        return self._issued(whole, _filled(whole, parts, self._group, Exchange.ALL_TO_ALL))

    def _reduce_scatter(self, x: torch.Tensor, op: str, ranks: int, _group: str) -> torch.Tensor:
        assert op == "sum", op
        x = x.contiguous()
        result = torch.empty_like(x.chunk(ranks)[self._over.rank])
        return self._issued(result, *_asked_to_sum(x, result, self._group))

    def _issued(
        self,
        result: torch.Tensor,
        under_way: PendingMessages,
        finish: Callable[[], None] = lambda: None,
    ) -> torch.Tensor:
        self._under_way[id(result)] = result, under_way, finish
        return result

    # --- waiting

    def _finish(self, sent: torch.Tensor) -> bool:
        """Whether it was sent from here."""
        if id(sent) not in self._under_way:
            return False
        with self._over.waiting.running():
            _, under_way, finish = self._under_way[id(sent)]
            under_way.wait()
            finish()
            del self._under_way[id(sent)]
        # What was issued before came before.
        self._left.clear()
        return True


class _Arriving(Waiting):
    """Sums are torch's."""

    def __init__(self, others: Waiting, finishes: Callable[[torch.Tensor], bool]) -> None:
        super().__init__()
        self._others, self._finishes = others, finishes

    def __call__(self, sent: torch.Tensor) -> torch.Tensor:
        return sent if self._finishes(sent) else self._others(sent)
