"""The training step at other batch sizes, as whoever rewrites it may ask for it.

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
    """The global batch in ``micro_batches`` equal parts, and the graph of one, or of so many of
    them together as ``share`` says."""

    @property
    def transport(self) -> Transport:
        """What carries the exchanges of ranks that hold it."""
        ...

    def graph(self, *, micro_batches: int, share: int = 1) -> Graph: ...

    def rewritten(self, graph: Graph) -> Graph:
        """A graph that a trade made of one of these, once it is known here too."""
        ...

    def regions(self, graph: Graph, *, num_ranks: int) -> tuple[Region, ...]:
        """What could be cut together, of a graph's parameters."""
        ...

    def in_parts(self, graph: Graph, choice: ShardingChoice, *, rank: int) -> Graph:
        """The graph of one of the ranks among which tensors lie in parts."""
        ...

    def update_in_parts(self, update: Program, partings: tuple[ShardingChoice, ...]) -> Program:
        """The optimizer's step on one rank's parts, and parts of parts."""
        ...

    def in_stages(
        self, program: Program, *, ends: tuple[str, ...], schedule: str, num_ranks: int
    ) -> Pipeline:
        """Its lines cut behind these modules, and the order in which ranks take the stages up."""
        ...

    def divisors(self) -> tuple[int, ...]:
        """Into how many equal parts the batch can be cut, 1 first."""
        ...

    def why_not_split(self) -> str | None:
        """Why cutting the batch would change what is trained; None where it would not."""
        ...

    def is_no_faster(self, *, micro_batches: int, than: int = 1, share: int = 1) -> bool:
        """Whether the operators of the step in so many micro-batches surely take no less time than
        in ``than``, which divides them; False where that is not known."""
        ...

    def sharers(self) -> tuple[int, ...]:
        """Among how many ranks the batch can be shared equally, 1 first."""
        ...

    def why_not_shared(self) -> str | None:
        """As ``why_not_split``, of parts that are computed at one time, so that statistics can be
        those of all of them."""
        ...

    def leaner_settings(self) -> tuple[str, ...]:
        """Settings that the user's optimizer has and that lower the memory of its step, such as
        ``foreach=False``."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardedSource:
    """The step of one rank, as its source: its share of the batch in equal parts."""

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

    def update_in_parts(self, update: Program, partings: tuple[ShardingChoice, ...]) -> Program:
        return self.source.update_in_parts(update, partings)

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

    def sharers(self) -> tuple[int, ...]:
        return self.source.sharers()

    def why_not_shared(self) -> str | None:
        return self.source.why_not_shared()

    def leaner_settings(self) -> tuple[str, ...]:
        return self.source.leaner_settings()
