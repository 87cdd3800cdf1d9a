"""Collectives among ranks and transfers to offload memory: their kind, bytes and buffers.

Not for their duration (see predict/cost_table.py) or for inserting them into a step (see passes/).
"""

from dataclasses import dataclass
from enum import StrEnum

# The link name of messages through shared memory, on any mesh axis.
SLOTS = "slots"
# Bytes of the headers that gloo sends for each piece: the sender announces the piece and its type,
# the receiver grants room. They were counted by the kernel (docs/log.md, 2026-11-26): 48 bytes
# each.
GLOO_SENDS, GLOO_GETS = 96, 48
_HEADER_BYTES = GLOO_SENDS + GLOO_GETS
# An all-reduce is split into pieces of at most this size, and of at least one element, commonly of
# 4 bytes.
_LARGEST_PIECE, _ITEM_BYTES = 1 << 20, 4


class Exchange(StrEnum):
    """The operation on one tensor among the ranks of a mesh axis."""

    ALL_REDUCE = "all-reduce"
    ALL_GATHER = "all-gather"
    REDUCE_SCATTER = "reduce-scatter"
    ALL_TO_ALL = "all-to-all"
    # Transfers between a rank's device and offload memory, over axes named in
    # hardware/cluster.py.
    SEND = "send to offload memory"
    FETCH = "fetch from offload memory"


@dataclass(frozen=True, slots=True, kw_only=True)
class Collective:
    """One collective, from the call that issues it to the call that waits for it.

    Each rank sends ``sent_bytes`` in ``hops`` messages, sequentially unless ``is_direct``.
    ``adds_headers``: the backend adds headers to the messages. ``held_bytes`` are the backend's own
    buffers, which exist until the wait completes; arguments and results are not included. Every
    ``stride``-th rank takes part; ``places`` are the participants among pipeline ranks.
    ``is_pinned``: ranks exchange through shared memory.
    """

    kind: Exchange
    axis: str
    num_ranks: int
    sent_bytes: int
    hops: int
    held_bytes: int = 0
    stride: int = 1
    places: tuple[int, ...] = ()
    is_direct: bool = False
    is_pinned: bool = False
    adds_headers: bool = False

    @property
    def waits(self) -> int:
        """Number of messages whose latencies add up."""
        return min(self.hops, 1) if self.is_direct else self.hops

    @property
    def link(self) -> str:
        """Name of the link in a machine's costs that carries this collective."""
        return SLOTS if self.is_pinned else self.axis

    @property
    def whole_bytes(self) -> int:
        """Bytes of the full tensor over all ranks, including all shards of a ring."""
        return self.sent_bytes // self.hops * self.num_ranks if self.hops else 0

    @property
    def wire_bytes(self) -> int:
        """Bytes that the busiest rank hands to its connections, headers included.

        gloo sends headers for each piece sent and received (gloo/allreduce.cc,
        transport/tcp/pair.cc).
        """
        if not self.adds_headers or not self.hops:
            return self.sent_bytes
        is_ring = self.kind is Exchange.ALL_REDUCE
        header_bytes = self._ring_header_bytes if is_ring else self.hops * _HEADER_BYTES
        return self.sent_bytes + header_bytes

    @property
    def _ring_header_bytes(self) -> int:
        """Header bytes of a ring all-reduce: a reduce-scatter and an all-gather of pieces.

        If a tensor is tiny, some pieces are empty, and gloo sends no header for them.
        """
        n, total_bytes = self.num_ranks, self.whole_bytes // _ITEM_BYTES * _ITEM_BYTES
        each = max(2, -(-self.sent_bytes // self.hops // _LARGEST_PIECE))
        piece = max(1, -(-total_bytes // (each * n * _ITEM_BYTES))) * _ITEM_BYTES
        pieces = -(-total_bytes // piece)
        pieces_of = [min(each, max(0, pieces - share * each)) for share in range(n)]
        # In each of the two rounds, a rank sends all shares but one, and receives all but one.
        return max(
            GLOO_SENDS * (2 * pieces - pieces_of[r] - pieces_of[r - 1])
            + GLOO_GETS * (2 * pieces - pieces_of[r] - pieces_of[r + 1 - n])
            for r in range(n)
        )

    @property
    def is_sum(self) -> bool:
        """True for collectives that sum the tensors of all ranks."""
        return self.kind in (Exchange.ALL_REDUCE, Exchange.REDUCE_SCATTER, Exchange.ALL_TO_ALL)

    @property
    def is_transfer(self) -> bool:
        """True for transfers between device and offload memory, not between ranks."""
        return self.kind in (Exchange.SEND, Exchange.FETCH)


@dataclass(frozen=True, slots=True, kw_only=True)
class Transport:
    """The behaviour of a communication backend, as seen from the rank that calls it.

    ``keeps_input``: the argument must stay alive until the wait completes. ``is_direct``: except in
    an all-reduce, a rank sends each peer its part at once. ``is_pinned``: ranks exchange through
    shared memory. ``adds_headers``: the backend adds headers to the payload, see ``wire_bytes``.
    """

    name: str
    keeps_input: frozenset[Exchange] = frozenset()
    is_direct: bool = False
    is_pinned: bool = False
    adds_headers: bool = False

    def collective(
        self, kind: Exchange, *, axis: str, num_ranks: int, nbytes: int, stride: int = 1
    ) -> Collective:
        """Return the collective of a tensor with ``nbytes`` in total, as a ring."""
        # A ring passes every shard but the rank's own: once to gather, and once more to reduce
        # first.
        hops = (num_ranks - 1) * (2 if kind is Exchange.ALL_REDUCE else 1)
        shard_bytes = -(-nbytes // num_ranks)
        # The buffer of one received part is the result itself.
        has_buffers = self.is_direct and kind is Exchange.REDUCE_SCATTER
        return Collective(
            kind=kind,
            axis=axis,
            num_ranks=num_ranks,
            sent_bytes=hops * shard_bytes,
            hops=hops,
            held_bytes=max(0, num_ranks - 2) * shard_bytes if has_buffers else 0,
            stride=stride,
            is_direct=self.is_direct and kind is not Exchange.ALL_REDUCE,
            is_pinned=self.is_pinned,
            adds_headers=self.adds_headers,
        )


# Measured in torch 2.13 and verified by tests/system/dist. All collectives but all-reduces send
# straight to the peer (docs/decisions/0034-straight-to-each-rank.md): gloo's own collectives hold
# copies.
GLOO = Transport(
    name="gloo",
    keeps_input=frozenset({Exchange.ALL_GATHER, Exchange.ALL_TO_ALL, Exchange.REDUCE_SCATTER}),
    is_direct=True,
    adds_headers=True,
)
# Ranks write into each other's slots and read received data in place: nothing is copied.
THROUGH_SLOTS = Transport(name="slots", is_pinned=True)
# NCCL's own buffers have not been measured and are not counted. torch keeps the arguments alive
# until the wait, as with gloo.
NCCL = Transport(name="nccl", keeps_input=GLOO.keeps_input)
