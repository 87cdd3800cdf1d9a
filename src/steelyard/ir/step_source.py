"""The interface through which trades get the training step at other batch sizes, or sharded.

Not for capturing it: see capture/.
"""

from dataclasses import dataclass
from typing import Protocol

from steelyard.ir.collective import Transport
from steelyard.ir.graph import Graph
from steelyard.ir.parallel_layout import ParallelLayout
from steelyard.ir.program import Pipeline, Program
from steelyard.ir.sharding_choice import Region, ShardingChoice


class StepSource(Protocol):
    """The captured step. ``graph`` returns it for one part of the global batch.

    The global batch is cut into ``micro_batches`` equal parts; the graph is for ``share`` of them
    together.
    """

    @property
    def transport(self) -> Transport:
        """The backend that carries the collectives of this step."""
        ...

    def graph(self, *, micro_batches: int, share: int = 1) -> Graph: ...

    def rewritten(self, graph: Graph) -> Graph:
        """Register a graph that was derived from one of these, and return it with known costs."""
        ...

    def regions(self, graph: Graph, *, num_ranks: int) -> tuple[Region, ...]:
        """Return the regions of a graph whose parameters are best sharded together."""
        ...

    def in_parts(self, graph: Graph, choice: ShardingChoice, *, rank: int) -> Graph:
        """Return one rank's graph under a sharding of tensors."""
        ...

    def update_in_parts(self, update: Program, shardings: tuple[ShardingChoice, ...]) -> Program:
        """Return the optimizer step on one rank's shards, possibly sharded along several axes."""
        ...

    def in_stages(
        self, program: Program, *, ends: tuple[str, ...], schedule: str, num_ranks: int
    ) -> Pipeline:
        """Cut a program after the modules ``ends`` into stages, with the schedule of all ranks."""
        ...

    def divisors(self) -> tuple[int, ...]:
        """Return the possible numbers of equal parts of the batch, 1 first."""
        ...

    def why_not_split(self) -> str | None:
        """Return the reason why cutting the batch would change the training result, or None."""
        ...

    def is_no_faster(self, *, micro_batches: int, than: int = 1, share: int = 1) -> bool:
        """True if a step in ``micro_batches`` parts takes at least as long as in ``than`` parts.

        ``than`` divides ``micro_batches``. The result is False if this is not known.
        """
        ...

    @property
    def split_doubt(self) -> float:
        """The relative doubt of the time of a step in micro-batches, as long as it is not
        calibrated.
        """
        ...

    def is_split_calibrated(self, *, micro_batches: int, share: int = 1) -> bool:
        """True if the costs of a step in ``micro_batches`` parts need no further calibration."""
        ...

    def calibrate_split(self, *, micro_batches: int, share: int = 1) -> None:
        """Make the costs of a step in ``micro_batches`` parts as accurate as those of the whole.

        A source without measured costs does nothing.
        """
        ...

    def sharers(self) -> tuple[int, ...]:
        """Return the possible numbers of ranks that share the batch equally, 1 first."""
        ...

    def why_not_shared(self) -> str | None:
        """Like ``why_not_split``, for parts that are computed at the same time.

        Statistics over the batch can then be computed over all parts.
        """
        ...

    def leaner_settings(self) -> tuple[str, ...]:
        """Return settings of the user's optimizer that would lower the memory that its step needs.

        One of them is ``foreach=False``.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardedSource:
    """The step of one rank as a step source: the rank's share of the batch in equal parts."""

    source: StepSource
    layout: ParallelLayout
    rank: int = 0

    @property
    def transport(self) -> Transport:
        return self.source.transport

    def graph(self, *, micro_batches: int, share: int = 1) -> Graph:
        own = self.layout.share_of(self.rank)
        return self.source.graph(micro_batches=micro_batches * self.layout.units, share=share * own)

    def rewritten(self, graph: Graph) -> Graph:
        return self.source.rewritten(graph)

    def regions(self, graph: Graph, *, num_ranks: int) -> tuple[Region, ...]:
        return self.source.regions(graph, num_ranks=num_ranks)

    def in_parts(self, graph: Graph, choice: ShardingChoice, *, rank: int) -> Graph:
        return self.source.in_parts(graph, choice, rank=rank)

    def update_in_parts(self, update: Program, shardings: tuple[ShardingChoice, ...]) -> Program:
        return self.source.update_in_parts(update, shardings)

    def in_stages(
        self, program: Program, *, ends: tuple[str, ...], schedule: str, num_ranks: int
    ) -> Pipeline:
        return self.source.in_stages(program, ends=ends, schedule=schedule, num_ranks=num_ranks)

    def divisors(self) -> tuple[int, ...]:
        units = self.layout.units
        return tuple(k // units for k in self.source.divisors() if k % units == 0)

    def why_not_split(self) -> str | None:
        return self.source.why_not_split()

    def is_no_faster(self, *, micro_batches: int, than: int = 1, share: int = 1) -> bool:
        units, own = self.layout.units, self.layout.share_of(self.rank)
        return self.source.is_no_faster(
            micro_batches=micro_batches * units, than=than * units, share=share * own
        )

    @property
    def split_doubt(self) -> float:
        return self.source.split_doubt

    def is_split_calibrated(self, *, micro_batches: int, share: int = 1) -> bool:
        units, own = self.layout.units, self.layout.share_of(self.rank)
        return self.source.is_split_calibrated(
            micro_batches=micro_batches * units, share=share * own
        )

    def calibrate_split(self, *, micro_batches: int, share: int = 1) -> None:
        units, own = self.layout.units, self.layout.share_of(self.rank)
        self.source.calibrate_split(micro_batches=micro_batches * units, share=share * own)

    def sharers(self) -> tuple[int, ...]:
        return self.source.sharers()

    def why_not_shared(self) -> str | None:
        return self.source.why_not_shared()

    def leaner_settings(self) -> tuple[str, ...]:
        return self.source.leaner_settings()
