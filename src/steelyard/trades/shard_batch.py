"""Shard the batch: data parallelism, with gradients summed over ranks.

The communication consists of nodes in one rank's graph: bucketed all-reduces of the gradients, and
of the loss. With several micro-batches, the last one exchanges the accumulated gradients, as with
DistributedDataParallel's ``no_sync``. The result is the mean over the same samples, summed in
another order. Random values differ between ranks. Not for delaying waits (see overlap.py) or for
sharding weights or optimizer state (see shard_states.py).
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Self

from steelyard.ir.parallel_layout import DATA, spelled
from steelyard.ir.program import Program
from steelyard.ir.rule import Rule
from steelyard.ir.rule_kinds import BatchSharding
from steelyard.ir.step_source import StepSource
from steelyard.passes.data_parallel.all_reduce import (
    bucketed_all_reduce,
    why_not_reduced,
    with_whole_loss,
)
from steelyard.passes.data_parallel.sync_batchnorm import normalising, synchronised
from steelyard.plans.trade import Offer, Rejection
from steelyard.units import format_bytes


@dataclass(frozen=True, kw_only=True)
class ShardBatchRule(BatchSharding):
    """``[[shard_batch]]``; ``shares`` are the samples of each rank, out of their sum."""

    trade: str = field(init=False, default="shard_batch")

    def describe(self) -> str:
        ranks = f"{self.ranks} ranks" + (f" as {spelled(self.shares)}" if self.shares else "")
        return f"{ranks}, buckets of {format_bytes(self.bucket)}"

    @classmethod
    def problems(cls, rules: Sequence[Self]) -> list[str]:
        return [
            f"shard_batch has {rule.ranks} ranks but {len(rule.shares)} shares"
            for rule in rules
            if rule.shares and len(rule.shares) != rule.ranks
        ]


class ShardBatch:
    """Pays communication, buys computation and memory."""

    name: ClassVar[str] = ShardBatchRule.trade
    pays: ClassVar[tuple[str, ...]] = ("communication",)
    buys: ClassVar[tuple[str, ...]] = ("computation", "memory")
    is_exact: ClassVar[bool] = True
    is_bitwise: ClassVar[bool] = False
    rule: ClassVar[type[Rule]] = ShardBatchRule

    def offers(
        self, program: Program, source: StepSource
    ) -> tuple[tuple[Offer, ...], tuple[Rejection, ...]]:
        shares = [k for k in source.sharers() if k > 1]
        reason = source.why_not_shared() if shares else "the batch has too few samples"
        reason = reason or why_not_reduced(program.graph)
        if reason is not None:
            label = "the batch among ranks"
            return (), (Rejection(trade=self.name, label=label, reason=reason),)
        refusals: tuple[Rejection, ...] = ()
        if normalising(program.graph):
            label = "with BatchNorm statistics over each rank's own samples"
            lossy = (
                "is lossy, because each rank would normalize differently; statistics over all "
                "samples are used"
            )
            refusals = (Rejection(trade=self.name, label=label, reason=lossy),)
        offers = (
            Offer(
                trade=self.name,
                label=f"among {k} ranks",
                rules=(ShardBatchRule(ranks=k, bucket=BUCKET_BYTES),),
            )
            for k in shares
        )
        return tuple(offers), refusals

    def rewrite(
        self,
        program: Program,
        rules: Sequence[ShardBatchRule],
        source: StepSource,
    ) -> Program:
        ranks = program.layout.data
        if not rules or ranks == 1:
            return program
        if program.layout.pipeline > 1:
            return program  # ranks of one stage reduce gradients after all micro-batches
        assert not program.recomputed, "shard_batch changes the graph, so it is applied early"
        # The distance between ranks with the same shard of the model is the number of shards.
        stride = program.layout.tensor
        before = program.graph
        graph = synchronised(before, layout=program.layout, transport=source.transport)
        if graph is not before:
            graph = source.rewritten(graph)
        graph = with_whole_loss(
            graph, num_ranks=ranks, transport=source.transport, axis=DATA, stride=stride,
            repeats=program.repeats,
        )  # fmt: skip
        graph = bucketed_all_reduce(
            graph,
            bucket_bytes=max(rule.bucket for rule in rules),
            num_ranks=ranks,
            transport=source.transport,
            axis=DATA,
            stride=stride,
            repeats=program.repeats,
        )
        return program.with_graph(graph)


# The default of DistributedDataParallel; a search also tries other sizes.
BUCKET_BYTES = 25 * 2**20
