"""All-gathers, all-to-alls and reduce-scatters over gloo as direct messages: each rank sends every
other rank its part, and posts all receives before it sends anything.

They replace torch's calls (Channel.calls). Gloo's own collectives send first: the receiver's
request then queues behind its data, and the sender waits for that request. In a row of collectives
over a slow link, an all-gather between two ranks took 1.5 times as long as sending its data, and an
all-to-all twice as long; gloo's reduce-scatter sends all rows to all ranks (decision 0034).
Messages also save a copy in one of gloo's threads. Not for all-reduces: gloo's ring uses both
directions of the link and takes as long as it should. Not for the messages: see point_to_point.py.
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


def all_gather_into(whole: torch.Tensor, row: torch.Tensor, group: dist.ProcessGroup) -> None:
    """All-gather ``row`` into ``whole``; complete when this returns."""
    if _is_supported(row, group):
        _fill(whole, [row] * group.size(), group, Exchange.ALL_GATHER).wait()
    else:
        dist.all_gather_single(whole, row, group=group)


def all_to_all_into(whole: torch.Tensor, rows: torch.Tensor, group: dist.ProcessGroup) -> None:
    """All-to-all of ``rows`` into ``whole``; complete when this returns."""
    if _is_supported(rows, group):
        _fill(whole, rows.chunk(group.size()), group, Exchange.ALL_TO_ALL).wait()
    else:
        dist.all_to_all_single(whole, rows, group=group)


def reduce_scatter_rows(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Reduce-scatter: return this rank's rows of the sum over the ranks, as a new tensor."""
    x = x.contiguous()
    result = torch.empty_like(x.chunk(group.size())[group.rank()])
    if _is_supported(x, group):
        messages, add_up = _start_reduce_scatter(x, result, group)
        messages.wait()
        add_up()
    else:
        dist.reduce_scatter_single(result, x, group=group)
    return result


def _is_supported(x: torch.Tensor, group: dist.ProcessGroup) -> bool:
    """Return True for CPU tensors on gloo; gloo's messages cannot send GPU memory."""
    backend: Any = group._get_backend(x.device)
    return x.device.type == "cpu" and backend.name() == "gloo"


def _fill(
    whole: torch.Tensor, parts: Sequence[torch.Tensor], group: dist.ProcessGroup, kind: Exchange
) -> PendingMessages:
    """Start the messages that fill ``whole``, and copy this rank's own part now. The other parts
    are complete once the returned messages are.
    """
    buffers, own = whole.chunk(group.size()), group.rank()
    messages = hand_over(kind, parts, buffers, group)
    buffers[own].copy_(parts[own])
    return messages


def _start_reduce_scatter(
    x: torch.Tensor, result: torch.Tensor, group: dist.ProcessGroup
) -> tuple[PendingMessages, Callable[[], None]]:
    """Start the messages of a reduce-scatter; return them, and a function that adds up their values
    once they are complete. ``result`` is the receive buffer of one of the parts.
    """
    assert group.size() > 1, "a reduce-scatter needs several ranks"
    parts = x.chunk(group.size())
    own = parts[group.rank()]
    received = [torch.empty_like(own) for _ in range(group.size() - 2)]
    buffers = [result, *received]
    buffers.insert(group.rank(), own)

    def add_up() -> None:
        for part in (own, *received):
            result.add_(part)

    return hand_over(Exchange.REDUCE_SCATTER, parts, buffers, group), add_up


class DirectCollectives:
    """The collectives of one mesh axis. ``base_channel`` is the channel of the axis, whose timer
    counts the waits."""

    # No memory stays allocated between steps.
    held_bytes = 0

    def __init__(self, base_channel: Channel) -> None:
        assert base_channel.process_group is not None, "the group of this axis is known"
        self._base_channel, self._group = base_channel, base_channel.process_group
        # Pending collectives by the id of their result tensor, which is the argument of the wait.
        self._pending: dict[int, tuple[torch.Tensor, PendingMessages, Callable[[], None]]] = {}
        # Pending messages of interrupted steps.
        self._abandoned: list[PendingMessages] = []

    @staticmethod
    def can(base_channel: Channel) -> bool:
        return (
            base_channel.process_group is not None
            and base_channel.backend == "gloo"
            and base_channel.device == CPU
        )

    @property
    def channel(self) -> Channel:
        calls: dict[str, Callable[..., torch.Tensor]] = {
            "_c10d_functional.all_to_all_single.default": self._all_to_all,
            "steelyard.all_gather": self._all_gather,
            "_c10d_functional.reduce_scatter_tensor.default": self._reduce_scatter,
        }
        return replace(
            self._base_channel,
            calls=calls,
            waiting=_Arriving(self._base_channel.waiting, self._finish),
        )

    def begin(self) -> None:
        """Begin a step. Receives of an interrupted step may still be pending. Their buffers are
        kept, because gloo would otherwise stop reporting anything.
        """
        for _, messages, _ in self._pending.values():
            messages.give_up()
            self._abandoned.append(messages)
        self._pending.clear()
        begin_step(self._group)

    # --- issuing

    def _all_gather(self, share: torch.Tensor, num_ranks: int, _group: str) -> torch.Tensor:
        share = share.contiguous()
        whole = share.new_empty((num_ranks * share.shape[0], *share.shape[1:]))
        messages = _fill(whole, [share] * num_ranks, self._group, Exchange.ALL_GATHER)
        return self._register(whole, messages)

    def _all_to_all(
        self, x: torch.Tensor, _given: list[int], _taken: list[int], _group: str
    ) -> torch.Tensor:
        x = x.contiguous()
        whole, parts = torch.empty_like(x), x.chunk(self._base_channel.num_ranks)
        return self._register(whole, _fill(whole, parts, self._group, Exchange.ALL_TO_ALL))

    def _reduce_scatter(self, x: torch.Tensor, op: str, ranks: int, _group: str) -> torch.Tensor:
        assert op == "sum", op
        x = x.contiguous()
        result = torch.empty_like(x.chunk(ranks)[self._base_channel.rank])
        return self._register(result, *_start_reduce_scatter(x, result, self._group))

    def _register(
        self,
        result: torch.Tensor,
        messages: PendingMessages,
        finish: Callable[[], None] = lambda: None,
    ) -> torch.Tensor:
        self._pending[id(result)] = result, messages, finish
        return result

    # --- waiting

    def _finish(self, sent: torch.Tensor) -> bool:
        """Complete a collective; return False if another backend issued it."""
        if id(sent) not in self._pending:
            return False
        with self._base_channel.waiting.running():
            _, messages, finish = self._pending[id(sent)]
            messages.wait()
            finish()
            del self._pending[id(sent)]
        # Messages that were issued earlier have also arrived earlier.
        self._abandoned.clear()
        return True


class _Arriving(Waiting):
    """Waits for these collectives; hands all others, such as all-reduces, to torch's wait."""

    def __init__(self, others: Waiting, finishes: Callable[[torch.Tensor], bool]) -> None:
        super().__init__()
        self._others, self._finishes = others, finishes

    def __call__(self, sent: torch.Tensor) -> torch.Tensor:
        return sent if self._finishes(sent) else self._others(sent)
