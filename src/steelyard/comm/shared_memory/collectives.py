"""Collectives of ranks that share memory. Each rank writes its parts directly into the readers'
slots, and adds up or copies the parts that it finds in its own.

They replace torch's calls (Channel.calls). Issuing a collective writes and waiting for it reads;
nothing is transferred in between and no thread is involved. If there are two ranks, each adds up
everything. If there are more, each adds up a part and passes the sum on, so that all ranks get the
same bits. Not for the slots (see same_host.py) or their number (see ir/message_slots.py).
"""

from collections.abc import Callable
from dataclasses import replace

import torch
import torch.distributed as dist

from steelyard.comm.channel import Channel, Waiting
from steelyard.comm.json_gather import gathered
from steelyard.comm.shared_memory.transport import shared_memory_transport
from steelyard.ir.message_slots import CollectiveSlots

_Finish = Callable[[], object]


class SharedMemoryCollectives:
    """The collectives of one mesh axis. ``base_channel`` is the channel of the axis, whose timer
    counts the waits."""

    def __init__(self, rounds: CollectiveSlots, base_channel: Channel) -> None:
        group = base_channel.process_group
        assert group is not None, "these ranks are processes of a group"
        rounds = _max_over_ranks(rounds, group)
        self._transport = shared_memory_transport(
            rounds.edges, group=group, device=base_channel.device
        )
        self._num_ranks, self._rank, self._base_channel = (
            base_channel.num_ranks,
            base_channel.rank,
            base_channel,
        )
        self._others = [rank for rank in range(base_channel.num_ranks) if rank != base_channel.rank]
        self._index = {pair: index for index, pair in enumerate(rounds.pairs)}
        self.held_bytes = self._transport.held_bytes
        self._number = 0
        # Pending collectives by the id of their result tensor, which is the argument of the wait.
        self._pending: dict[int, tuple[torch.Tensor, _Finish]] = {}

    @property
    def channel(self) -> Channel:
        calls: dict[str, Callable[..., torch.Tensor]] = {
            "_c10d_functional.all_reduce.default": self._all_reduce,
            "_c10d_functional.all_reduce_.default": self._all_reduce_in_place,
            "_c10d_functional.reduce_scatter_tensor.default": self._reduce_scatter,
            "_c10d_functional.all_to_all_single.default": self._all_to_all,
            "steelyard.all_gather": self._all_gather,
        }
        return replace(self._base_channel, calls=calls, waiting=_PendingRead(self._complete))

    def begin(self) -> None:
        """Begin a step; collectives left over from an interrupted step are dropped."""
        self._pending.clear()
        self._number = 0
        self._transport.begin()

    def close(self) -> None:
        self._transport.close()

    def set_polling(self, *, polls: bool) -> bool:
        """Enable or disable busy polling before a wait sleeps; return the previous setting."""
        before, self._transport.polls = self._transport.polls, polls
        return before

    # --- issuing

    def _all_reduce(self, x: torch.Tensor, op: str, group: str) -> torch.Tensor:
        return self._all_reduce_in_place(x.clone(), op, group)

    def _all_reduce_in_place(self, x: torch.Tensor, op: str, _group: str) -> torch.Tensor:
        assert op == "sum", op
        flat, number = x.view(-1), self._next_number()
        if self._num_ranks == 2:
            self._write(self._others[0], number, flat)
            return self._register(x, lambda: self._add_up(flat, number))
        parts = flat.tensor_split(self._num_ranks)
        for rank in self._others:
            self._write(rank, number, parts[rank])

        def finish() -> None:
            own = parts[self._rank]
            self._add_up(own, number)
            for rank in self._others:
                self._write(rank, number, own, sums=True)
            for rank in self._others:
                parts[rank].copy_(self._read(rank, number, parts[rank], sums=True))

        return self._register(x, finish)

    def _reduce_scatter(
        self, x: torch.Tensor, op: str, num_ranks: int, _group: str
    ) -> torch.Tensor:
        assert op == "sum", op
        number, parts = self._send_chunks(x)
        assert len(parts) == num_ranks, "one for each"
        own = parts[self._rank].clone()
        return self._register(own, lambda: self._add_up(own, number))

    def _all_gather(self, share: torch.Tensor, num_ranks: int, _group: str) -> torch.Tensor:
        number = self._next_number()
        for rank in self._others:
            self._write(rank, number, share)
        whole = share.new_empty((num_ranks * share.shape[0], *share.shape[1:]))
        return self._receive_into(whole, number, share)

    def _all_to_all(
        self, x: torch.Tensor, _given: list[int], _taken: list[int], _group: str
    ) -> torch.Tensor:
        number, parts = self._send_chunks(x)
        return self._receive_into(torch.empty_like(x), number, parts[self._rank])

    def _send_chunks(self, x: torch.Tensor) -> tuple[int, tuple[torch.Tensor, ...]]:
        """Send every other rank its chunk of ``x``."""
        number, parts = self._next_number(), x.chunk(self._num_ranks)
        for rank in self._others:
            self._write(rank, number, parts[rank])
        return number, parts

    def _receive_into(self, whole: torch.Tensor, number: int, own: torch.Tensor) -> torch.Tensor:
        """Copy this rank's own part into ``whole`` now, and the other parts when the caller waits
        for the result.
        """
        parts = whole.chunk(self._num_ranks)
        parts[self._rank].copy_(own)

        def finish() -> None:
            for rank in self._others:
                parts[rank].copy_(self._read(rank, number, parts[rank]))

        return self._register(whole, finish)

    # --- waiting

    def _complete(self, sent: torch.Tensor) -> torch.Tensor:
        _, finish = self._pending.pop(id(sent))
        finish()
        return sent

    def _add_up(self, own: torch.Tensor, number: int) -> None:
        for rank in self._others:
            own.add_(self._read(rank, number, own))

    # --- slots

    def _next_number(self) -> int:
        self._number += 1
        return self._number

    def _register(self, result: torch.Tensor, finish: _Finish) -> torch.Tensor:
        self._pending[id(result)] = result, finish
        return result

    def _write(self, rank: int, number: int, value: torch.Tensor, *, sums: bool = False) -> None:
        self._transport.send(self._edge(self._rank, rank, sums=sums), number, [value])
        self._base_channel.waiting.moved_bytes += value.nbytes

    def _read(
        self, rank: int, number: int, like: torch.Tensor, *, sums: bool = False
    ) -> torch.Tensor:
        """Return the value that ``rank`` has written, as a tensor on the slot itself."""
        edge = self._edge(rank, self._rank, sums=sums)
        with self._base_channel.waiting.running():
            (value,) = self._transport.receive(edge, number, [(like.shape, like.dtype)])
        return value

    def _edge(self, source: int, target: int, *, sums: bool) -> int:
        return self._index[source, target] + (len(self._index) if sums else 0)


def _max_over_ranks(own: CollectiveSlots, group: dist.ProcessGroup) -> CollectiveSlots:
    """Return the maximum over the ranks: a rank with more samples may have more collectives in
    flight.
    """
    all_rounds = gathered(own, CollectiveSlots, group=group)
    return replace(
        own,
        part_bytes=max(rounds.part_bytes for rounds in all_rounds),
        sum_bytes=max(rounds.sum_bytes for rounds in all_rounds),
        count=max(rounds.count for rounds in all_rounds),
    )


class _PendingRead(Waiting):
    """Waits for a collective by reading the slots that other ranks have written."""

    def __init__(self, complete: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self._complete = complete

    def __call__(self, sent: torch.Tensor) -> torch.Tensor:
        return self._complete(sent)
