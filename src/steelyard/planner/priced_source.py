"""The step at other batch sizes and layouts, measured as soon as each variant is captured.

Not for measuring: see cost_provider.py. Not for capturing: see capture/step.py.
"""

from steelyard.capture.step import CapturedStep
from steelyard.errors import Mismatch
from steelyard.ir.collective import Transport
from steelyard.ir.graph import Graph
from steelyard.ir.program import Pipeline, Program
from steelyard.ir.sharding_choice import Region, ShardingChoice
from steelyard.planner.cost_provider import CostProvider

# Before they are calibrated, steps in two micro-batches were estimated 3 to 5 % too fast (README's
# model, 2026-11-29); after it, their times are certain to 6 %.
_SPLIT_DOUBT = 0.03


class PricedSource:
    """The step at other batch sizes; each variant is measured as soon as it is captured."""

    def __init__(self, source: CapturedStep, prices: CostProvider) -> None:
        self._source = source
        self._prices = prices
        self._updates: dict[tuple[ShardingChoice, ...], Program] = {}

    @property
    def transport(self) -> Transport:
        return self._source.transport

    def graph(self, *, micro_batches: int, share: int = 1) -> Graph:
        graph = self._source.graph(micro_batches=micro_batches, share=share)
        self._prices.measure(graph)
        # Unequal shares of the batch are not calibrated; they are assumed to behave like the same
        # number of equal shares.
        if micro_batches > 1 and share == 1:
            cut = Program.plain(graph).repeated(micro_batches)
            if self._calibrates_late and not self._prices.is_split_known(cut):
                self._prices.estimate_cut(cut)
            else:
                self._prices.check_cut(self._source, cut)
        return graph

    @property
    def split_doubt(self) -> float:
        return _SPLIT_DOUBT if self._calibrates_late else 0.0

    @property
    def _calibrates_late(self) -> bool:
        """True if splits are calibrated only when they are chosen.

        On several ranks every layout computes parts of the batch, so they are compared calibrated.
        On a device that is not here no step is run.
        """
        cluster = self._prices.cluster
        return cluster.is_here and cluster.num_devices == 1

    def is_split_calibrated(self, *, micro_batches: int, share: int = 1) -> bool:
        if micro_batches == 1 or share > 1 or not self._calibrates_late:
            return True
        return self._prices.is_split_known(self._cut(micro_batches))

    def calibrate_split(self, *, micro_batches: int, share: int = 1) -> None:
        """Capture the step in ``micro_batches`` parts as it runs, and calibrate it.

        If a calibration is known, this graph was captured before.
        """
        if micro_batches == 1 or share > 1:
            return
        if not self._prices.is_split_known(self._cut(micro_batches)):
            self._source.captured(micro_batches=micro_batches)
        self._prices.check_cut(self._source, self._cut(micro_batches))

    def _cut(self, micro_batches: int) -> Program:
        return Program.plain(self.graph(micro_batches=micro_batches)).repeated(micro_batches)

    def rewritten(self, graph: Graph) -> Graph:
        self._prices.measure(graph)
        for node in graph.nodes:
            if node.body is not None and node.signature in self._prices.failed:
                raise Mismatch(
                    f"the result of {node.path or 'the loss'} cannot be computed in slices",
                    expected="operators that give the same result on some of the rows as on all",
                    remedy="remove the chunk rule from the plan, or plan again",
                )
        return graph

    def regions(self, graph: Graph, *, num_ranks: int) -> tuple[Region, ...]:
        return self._source.regions(graph, num_ranks=num_ranks)

    def in_parts(self, graph: Graph, choice: ShardingChoice, *, rank: int) -> Graph:
        graph = self._source.in_parts(graph, choice, rank=rank)
        self._prices.measure(graph)
        return graph

    def update_in_parts(self, update: Program, shardings: tuple[ShardingChoice, ...]) -> Program:
        if shardings not in self._updates:
            self._updates[shardings] = self._source.update_in_parts(update, shardings)
            self._prices.measure(self._updates[shardings].graph)
        return self._updates[shardings]

    def in_stages(
        self, program: Program, *, ends: tuple[str, ...], schedule: str, num_ranks: int
    ) -> Pipeline:
        found = self._source.in_stages(program, ends=ends, schedule=schedule, num_ranks=num_ranks)
        self._prices.measure(found.stages.graph, *(update.graph for update in found.updates))
        return found

    def divisors(self) -> tuple[int, ...]:
        return self._source.divisors()

    def is_no_faster(self, *, micro_batches: int, than: int = 1, share: int = 1) -> bool:
        """Compare the sums of operator times, so that no whole step has to run."""
        cut, whole = (
            self._source.graph(micro_batches=parts, share=share) for parts in (micro_batches, than)
        )
        self._prices.measure(cut, whole)
        programs = (Program.plain(cut).repeated(micro_batches // than), Program.plain(whole))
        return self._prices.are_no_faster(*programs)

    def why_not_split(self) -> str | None:
        return self._source.why_not_split()

    def sharers(self) -> tuple[int, ...]:
        return self._source.sharers()

    def why_not_shared(self) -> str | None:
        return self._source.why_not_shared()

    def leaner_settings(self) -> tuple[str, ...]:
        return self._source.leaner_settings()
