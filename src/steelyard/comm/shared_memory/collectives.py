"""Exchanges of ranks of one host, through memory that they share: each writes what is for another
rank where that one reads it, and adds up or copies what it finds there.

Stands in place of torch's calls (Channel.calls). Whoever issues an exchange writes, whoever waits
reads; between the two nothing moves, and no thread takes a turn. Of two ranks each adds up all; of
more, each adds up a part and hands the sum on, so that all have the same. Not for the slots: see
same_host.py, nor for how many there have to be: ir/message_slots.py.
"""

from collections.abc import Callable
from dataclasses import replace

import torch
import torch.distributed as dist

from steelyard.comm.channel import Channel, Waiting
from steelyard.comm.json_gather import gathered
from steelyard.comm.shared_memory.transport import pinned_among
from steelyard.ir.message_slots import CollectiveSlots

_Finish = Callable[[], object]


class SharedMemoryCollectives:
    """``over`` is the channel of the axis, whose time of waiting is counted on."""

    def __init__(self, rounds: CollectiveSlots, over: Channel) -> None:
        group = over.process_group
        assert group is not None, "these ranks are no processes"
        rounds = _of_all(rounds, group)
        self._pinned = pinned_among(rounds.edges, group=group, device=over.device)
        self._num_ranks, self._rank, self._over = over.num_ranks, over.rank, over
        self._others = [rank for rank in range(over.num_ranks) if rank != over.rank]
        self._index = {pair: index for index, pair in enumerate(rounds.pairs)}
        self.held_bytes = self._pinned.held_bytes
        self._number = 0
        # By what was returned when it was issued, which whoever waits hands in.
        self._under_way: dict[int, tuple[torch.Tensor, _Finish]] = {}

    @property
    def channel(self) -> Channel:
        calls: dict[str, Callable[..., torch.Tensor]] = {
            "_c10d_functional.all_reduce.default": self._all_reduce,
            "_c10d_functional.all_reduce_.default": self._all_reduce_in_place,
            "_c10d_functional.reduce_scatter_tensor.default": self._reduce_scatter,
            "_c10d_functional.all_to_all_single.default": self._all_to_all,
            "steelyard.all_gather": self._all_gather,
        }
        return replace(self._over, calls=calls, waiting=_PendingRead(self._finished))

    def begin(self) -> None:
        """A step; what was left behind by one that was broken off is nobody's."""
        self._under_way.clear()
        self._number = 0
        self._pinned.begin()

    def close(self) -> None:
        self._pinned.close()

    def watching(self, *, watches: bool) -> bool:
        """From now on, or not; whether it was so before."""
        before, self._pinned.watches = self._pinned.watches, watches
        return before

    # --- issuing

    def _all_reduce(self, x: torch.Tensor, op: str, group: str) -> torch.Tensor:
        return self._all_reduce_in_place(x.clone(), op, group)

    def _all_reduce_in_place(self, x: torch.Tensor, op: str, _group: str) -> torch.Tensor:
        assert op == "sum", op
        flat, number = x.view(-1), self._next()
        if self._num_ranks == 2:
            self._write(self._others[0], number, flat)
            return self._issued(x, lambda: self._add_up(flat, number))
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

        return self._issued(x, finish)

    def _reduce_scatter(
        self, x: torch.Tensor, op: str, num_ranks: int, _group: str
    ) -> torch.Tensor:
        assert op == "sum", op
        number, parts = self._handed_out(x)
        assert len(parts) == num_ranks, "one for each"
        own = parts[self._rank].clone()
        return self._issued(own, lambda: self._add_up(own, number))

    def _all_gather(self, share: torch.Tensor, num_ranks: int, _group: str) -> torch.Tensor:
        number = self._next()
        for rank in self._others:
            self._write(rank, number, share)
        whole = share.new_empty((num_ranks * share.shape[0], *share.shape[1:]))
        return self._filled(whole, number, share)

    def _all_to_all(
        self, x: torch.Tensor, _given: list[int], _taken: list[int], _group: str
    ) -> torch.Tensor:
        number, parts = self._handed_out(x)
        return self._filled(torch.empty_like(x), number, parts[self._rank])

    def _handed_out(self, x: torch.Tensor) -> tuple[int, tuple[torch.Tensor, ...]]:
        """To each its rows."""
        number, parts = self._next(), x.chunk(self._num_ranks)
        for rank in self._others:
            self._write(rank, number, parts[rank])
        return number, parts

    def _filled(self, whole: torch.Tensor, number: int, own: torch.Tensor) -> torch.Tensor:
        """With this rank's own part now, and with what the others wrote when it is waited for."""
        parts = whole.chunk(self._num_ranks)
        parts[self._rank].copy_(own)

        def finish() -> None:
            for rank in self._others:
                parts[rank].copy_(self._read(rank, number, parts[rank]))

        return self._issued(whole, finish)

    # --- waiting

    def _finished(self, sent: torch.Tensor) -> torch.Tensor:
        _, finish = self._under_way.pop(id(sent))
        finish()
        return sent

    def _add_up(self, own: torch.Tensor, number: int) -> None:
        for rank in self._others:
            own.add_(self._read(rank, number, own))

    # --- slots

    def _next(self) -> int:
        self._number += 1
        return self._number

    def _issued(self, result: torch.Tensor, finish: _Finish) -> torch.Tensor:
        self._under_way[id(result)] = result, finish
        return result

    def _write(self, rank: int, number: int, value: torch.Tensor, *, sums: bool = False) -> None:
        self._pinned.send(self._edge(self._rank, rank, sums=sums), number, [value])
        self._over.waiting.moved_bytes += value.nbytes

    def _read(
        self, rank: int, number: int, like: torch.Tensor, *, sums: bool = False
    ) -> torch.Tensor:
        """What that rank has written, where it lies."""
        edge = self._edge(rank, self._rank, sums=sums)
        with self._over.waiting.running():
            (value,) = self._pinned.receive(edge, number, [(like.shape, like.dtype)])
        return value

    def _edge(self, source: int, target: int, *, sums: bool) -> int:
        return self._index[source, target] + (len(self._index) if sums else 0)


def _of_all(own: CollectiveSlots, group: dist.ProcessGroup) -> CollectiveSlots:
    """Ranks that work on more samples than others may have more under way at one time."""
    everyones = gathered(own, CollectiveSlots, group=group)
    return replace(
        own,
        part_bytes=max(rounds.part_bytes for rounds in everyones),
        sum_bytes=max(rounds.sum_bytes for rounds in everyones),
        count=max(rounds.count for rounds in everyones),
    )


class _PendingRead(Waiting):
    """What others wrote is read when it is waited for."""

    def __init__(self, finished: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self._finished = finished

    def __call__(self, sent: torch.Tensor) -> torch.Tensor:
        return self._finished(sent)
