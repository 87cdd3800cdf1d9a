"""What is exchanged among ranks, or with offload memory: the kind, the bytes each sends, what is
held.

Not for how long it takes (predict/cost_table.py), nor for putting it into a step: see passes/.
"""

from dataclasses import dataclass
from enum import StrEnum

# The link of what goes through memory that ranks share, whichever axis it goes along.
SLOTS = "slots"
# What gloo says of each piece: who sends it that it is ready and what it is, and who gets it that
# there is room. Counted by the kernel (docs/log.md, 2026-11-26): 48 bytes each.
GLOO_SENDS, GLOO_GETS = 96, 48
_SAID_BYTES = GLOO_SENDS + GLOO_GETS
# Of an all-reduce no piece is larger; and none smaller than an element, of which most have so much.
_LARGEST_PIECE, _ITEM_BYTES = 1 << 20, 4


class Exchange(StrEnum):
    """What is done with one tensor among the ranks of a mesh axis."""

    ALL_REDUCE = "all-reduce"
    ALL_GATHER = "all-gather"
    REDUCE_SCATTER = "reduce-scatter"
    ALL_TO_ALL = "all-to-all"
    # Between a rank's own near and offload memory, over the axes that hardware/cluster.py names.
    SEND = "send far"
    FETCH = "fetch from far"


@dataclass(frozen=True, slots=True, kw_only=True)
class Collective:
    """One exchange, from the call that issues it to the call that waits for it.

    Each rank sends ``sent_bytes`` in ``hops`` messages, one after the other unless it
    ``is_direct``, of which the backend ``says`` something besides. ``held_bytes`` are the backend's
    own, besides arguments and results, until the wait is over. Of all ranks there are every
    ``stride``-th takes part; of those of a pipeline those at these ``places``. What ``is_pinned``
    goes through memory that they share.
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
    says: bool = False

    @property
    def waits(self) -> int:
        """How many of its messages are on their way one after the other."""
        return min(self.hops, 1) if self.is_direct else self.hops

    @property
    def link(self) -> str:
        """By which name a machine's costs have what carries it."""
        return SLOTS if self.is_pinned else self.axis

    @property
    def whole_bytes(self) -> int:
        """What is exchanged, seen from all ranks together: a ring's shares, put side by side."""
        return self.sent_bytes // self.hops * self.num_ranks if self.hops else 0

    @property
    def wire_bytes(self) -> int:
        """What the rank that says most hands to its connections: what it sends, and what gloo says
        of each piece of that and of each it gets (gloo/allreduce.cc, transport/tcp/pair.cc)."""
        if not self.says or not self.hops:
            return self.sent_bytes
        is_around = self.kind is Exchange.ALL_REDUCE
        said = self._said_around_twice if is_around else self.hops * _SAID_BYTES
        return self.sent_bytes + said

    @property
    def _said_around_twice(self) -> int:
        """Of pieces summed up around a ring and then gathered; those of tiny tensors are empty, and
        of these nothing is said."""
        n, whole = self.num_ranks, self.whole_bytes // _ITEM_BYTES * _ITEM_BYTES
        each = max(2, -(-self.sent_bytes // self.hops // _LARGEST_PIECE))
        piece = max(1, -(-whole // (each * n * _ITEM_BYTES))) * _ITEM_BYTES
        pieces = -(-whole // piece)
        of = [min(each, max(0, pieces - share * each)) for share in range(n)]
        # One share a rank does not send, and one it does not get, in each of both rounds.
        return max(
            GLOO_SENDS * (2 * pieces - of[r] - of[r - 1])
            + GLOO_GETS * (2 * pieces - of[r] - of[r + 1 - n])
            for r in range(n)
        )

    @property
    def is_sum(self) -> bool:
        """True for exchanges that add up the tensors of all ranks."""
        return self.kind in (Exchange.ALL_REDUCE, Exchange.REDUCE_SCATTER, Exchange.ALL_TO_ALL)

    @property
    def is_far(self) -> bool:
        """Between near and offload memory, not between ranks."""
        return self.kind in (Exchange.SEND, Exchange.FETCH)


@dataclass(frozen=True, slots=True, kw_only=True)
class Transport:
    """How a backend carries exchanges out, as seen from the rank that asks for them.

    ``keeps_input``: the argument must stay until the wait is over. ``is_direct``: but for a sum for
    all, each rank is sent what every other one has for it, in one go. ``is_pinned``: through memory
    that ranks share. ``says``: what is sent is more than was asked for, see ``wire_bytes``.
    """

    name: str
    keeps_input: frozenset[Exchange] = frozenset()
    is_direct: bool = False
    is_pinned: bool = False
    says: bool = False

    def collective(
        self, kind: Exchange, *, axis: str, num_ranks: int, nbytes: int, stride: int = 1
    ) -> Collective:
        """The exchange of a tensor that is ``nbytes`` large as a whole, around a ring."""
        # A ring passes every share but one's own once to gather, and once more to reduce first.
        hops = (num_ranks - 1) * (2 if kind is Exchange.ALL_REDUCE else 1)
        each = -(-nbytes // num_ranks)
        # One part that comes lies where the result will.
        is_held = self.is_direct and kind is Exchange.REDUCE_SCATTER
        return Collective(
            kind=kind,
            axis=axis,
            num_ranks=num_ranks,
            sent_bytes=hops * each,
            hops=hops,
            held_bytes=max(0, num_ranks - 2) * each if is_held else 0,
            stride=stride,
            is_direct=self.is_direct and kind is not Exchange.ALL_REDUCE,
            is_pinned=self.is_pinned,
            says=self.says,
        )


# Metered in torch 2.13; tests/dist holds it. All but all-reduces goes straight to whom it is for
# (docs/decisions/0034-straight-to-each-rank.md): gloo's own hold copies.
GLOO = Transport(
    name="gloo",
    keeps_input=frozenset({Exchange.ALL_GATHER, Exchange.ALL_TO_ALL, Exchange.REDUCE_SCATTER}),
    is_direct=True,
    says=True,
)
# Each writes to the others what is theirs, and reads what came where it lies: nothing is copied.
THROUGH_SLOTS = Transport(name="slots", is_pinned=True)
# What it holds besides arguments and results was never metered here, and is not reckoned; torch
# keeps arguments for it until the wait, as for gloo.
NCCL = Transport(name="nccl", keeps_input=GLOO.keeps_input)
