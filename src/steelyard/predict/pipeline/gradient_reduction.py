"""The collectives of a pipelined step outside of its micro-batches.

After the micro-batches, ranks of one pipeline all-reduce the gradients of weights that several
stages share. Replicas of the pipeline all-reduce all gradients and the loss. Before the
micro-batches, replicas all-gather weights of which each has a shard. Not for the passes in between:
see step.py.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from steelyard.ir.collective import GLOO, GLOO_GETS, GLOO_SENDS, Collective, Exchange, Transport
from steelyard.ir.parallel_layout import DATA, PIPELINE, ParallelLayout

Seconds = Callable[[Collective], float]


class Trained(NamedTuple):
    """The bytes of a gradient; the gradient of a sharded weight is reduce-scattered by rows."""

    nbytes: int
    is_shared: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientReductions:
    """The collectives of gradients, sharded weights and the loss.

    ``shared`` lists sets of ranks in one pipeline with the bytes of the gradients that they
    all-reduce. ``trained`` lists the gradients of each rank of a pipeline, which it reduces with
    its replicas. ``gathered`` lists, for each rank, the sizes of the sharded weights that are
    all-gathered before the passes. All of them use ``transport``, except for the loss, which is on
    the host.
    """

    layout: ParallelLayout
    shared: tuple[tuple[frozenset[int], int], ...]
    trained: tuple[tuple[Trained, ...], ...]
    loss_bytes: int
    gathered: tuple[tuple[int, ...], ...]
    transport: Transport = GLOO

    def begin(self, seconds: Seconds) -> float:
        """Return the time at which the last rank has gathered its weights."""
        return max(sum(map(seconds, self._gathers(rank))) for rank in range(len(self.gathered)))

    def ends(self, ends: Sequence[float], seconds: Seconds) -> list[float]:
        """Return the time at which each rank is done, given when it was done with its passes."""
        found = list(ends)
        for ranks, nbytes in self.shared:
            reduced = max(found[rank] for rank in ranks) + seconds(self._among(ranks, nbytes))
            found = [reduced if rank in ranks else end for rank, end in enumerate(found)]
        return [
            end + sum(seconds(each) for each in self._with_replicas(rank))
            for rank, end in enumerate(found)
        ]

    def loss_seconds(self, seconds: Seconds) -> float:
        """Return the seconds until the last stage has the loss of all replicas."""
        return sum(seconds(each) for each in self.loss_collectives())

    def collectives_of(self, rank: int) -> Iterator[Collective]:
        """Yield the collectives of one rank."""
        yield from (self._among(ranks, n) for ranks, n in self.shared if rank in ranks)
        yield from self._with_replicas(rank)
        yield from self._gathers(rank)

    def loss_collectives(self) -> Iterator[Collective]:
        """Yield the collectives that reduce the loss over replicas."""
        return self._of_replicas(self.loss_bytes, GLOO)

    def loss_broadcast_bytes(self, rank: int, rank_of_loss: int) -> int:
        """Return the bytes that a rank sends when the loss is broadcast from ``rank_of_loss``.

        gloo broadcasts along a binomial tree (gloo/broadcast.cc).
        """
        ranks = len(self.trained)
        place = (rank - rank_of_loss) % ranks
        steps = (1 << i for i in range(ranks.bit_length()))
        to = sum(step > place and place + step < ranks for step in steps)
        return to * (self.loss_bytes + GLOO_SENDS) + (GLOO_GETS if place else 0)

    def _with_replicas(self, rank: int) -> Iterator[Collective]:
        for one in self.trained[rank]:
            kind = Exchange.REDUCE_SCATTER if one.is_shared else Exchange.ALL_REDUCE
            yield from self._of_replicas(one.nbytes, self.transport, kind)

    def _gathers(self, rank: int) -> Iterator[Collective]:
        for nbytes in self.gathered[rank]:
            yield from self._of_replicas(nbytes, self.transport, Exchange.ALL_GATHER)

    def _of_replicas(
        self, nbytes: int, transport: Transport, kind: Exchange = Exchange.ALL_REDUCE
    ) -> Iterator[Collective]:
        if self.layout.data > 1:
            yield transport.collective(
                kind, axis=DATA, num_ranks=self.layout.data, nbytes=nbytes,
                stride=self.layout.tensor,
            )  # fmt: skip

    def _among(self, ranks: frozenset[int], nbytes: int) -> Collective:
        # Ranks of one pipeline have the largest stride of the layout.
        stride = self.layout.data * self.layout.tensor
        collective = self.transport.collective(
            Exchange.ALL_REDUCE, axis=PIPELINE, num_ranks=len(ranks), nbytes=nbytes, stride=stride
        )
        return replace(collective, places=tuple(sorted(ranks)))
