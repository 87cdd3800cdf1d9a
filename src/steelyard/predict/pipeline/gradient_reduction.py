"""What ranks of pipelines sum up behind all micro-batches: gradients of what several of them hold,
and, where groups of ranks share the batch, of all that is trained, and the loss. And what they
gather in front of these, of weights that such groups hold in shares.

Not for the passes between: see step.py.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from steelyard.ir.collective import GLOO, GLOO_GETS, GLOO_SENDS, Collective, Exchange, Transport
from steelyard.ir.parallel_layout import DATA, PIPELINE, ParallelLayout

Seconds = Callable[[Collective], float]


class Trained(NamedTuple):
    """A gradient; of a shared weight each rank gets its rows of the sum."""

    nbytes: int
    is_shared: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientReductions:
    """``shared``: ranks of one pipeline and the bytes of what they sum up among them; ``trained``:
    of each of its ranks, each gradient, which it sums up with its like in the others;
    ``gathered``: of each weight that these share, and that is put together in front of the passes.
    All that goes over ``transport``, but the loss, which lies on the host.
    """

    layout: ParallelLayout
    shared: tuple[tuple[frozenset[int], int], ...]
    trained: tuple[tuple[Trained, ...], ...]
    loss_bytes: int
    gathered: tuple[tuple[int, ...], ...]
    transport: Transport = GLOO

    def begin(self, seconds: Seconds) -> float:
        """When the last has its weights."""
        return max(sum(map(seconds, self._gathers(rank))) for rank in range(len(self.gathered)))

    def ends(self, ends: Sequence[float], seconds: Seconds) -> list[float]:
        """When each rank is done, which was done with its passes by then."""
        found = list(ends)
        for ranks, nbytes in self.shared:
            together = max(found[rank] for rank in ranks) + seconds(self._among(ranks, nbytes))
            found = [together if rank in ranks else end for rank, end in enumerate(found)]
        return [
            end + sum(seconds(each) for each in self._with_replicas(rank))
            for rank, end in enumerate(found)
        ]

    def loss_seconds(self, seconds: Seconds) -> float:
        """Until the rank that has the loss knows that of all."""
        return sum(seconds(each) for each in self.of_loss())

    def of(self, rank: int) -> Iterator[Collective]:
        yield from (self._among(ranks, n) for ranks, n in self.shared if rank in ranks)
        yield from self._with_replicas(rank)
        yield from self._gathers(rank)

    def of_loss(self) -> Iterator[Collective]:
        return self._of_replicas(self.loss_bytes, GLOO)

    def told_bytes(self, rank: int, rank_of_loss: int) -> int:
        """What a rank sends of the loss that one of them has: gloo hands it on along a binomial
        tree (gloo/broadcast.cc)."""
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
        if self.layout.batch > 1:
            yield transport.collective(
                kind, axis=DATA, num_ranks=self.layout.batch, nbytes=nbytes,
                stride=self.layout.tensor,
            )  # fmt: skip

    def _among(self, ranks: frozenset[int], nbytes: int) -> Collective:
        # Ranks of one pipeline are as far apart as can be.
        stride = self.layout.batch * self.layout.tensor
        made = self.transport.collective(
            Exchange.ALL_REDUCE, axis=PIPELINE, num_ranks=len(ranks), nbytes=nbytes, stride=stride
        )
        return replace(made, places=tuple(sorted(ranks)))
