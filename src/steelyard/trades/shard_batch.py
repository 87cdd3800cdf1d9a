"""Shard the batch: each rank works on an equal share of it, and gradients are summed over ranks.

Data parallelism, as nodes of one rank's graph: buckets of all-reduces behind the backward pass's
gradients, and the loss of all; of several micro-batches the last exchanges what all have added up,
as under DistributedDataParallel's ``no_sync``. What is summed is the mean over the same samples in
another order.
Random values are each rank's own. Not for when results are waited for: see overlap.py; nor for
giving a rank its part of the weights or of what the optimizer keeps.
"""

from collections.abc import Sequence
from typing import Annotated, ClassVar

from pydantic import BeforeValidator, Field

from steelyard.ir.parallel_layout import DATA
from steelyard.ir.program import Program
from steelyard.ir.rule import Rule
from steelyard.ir.step_source import StepSource
from steelyard.passes.data_parallel.all_reduce import (
    bucketed_all_reduce,
    why_not_reduced,
    with_whole_loss,
)
from steelyard.passes.data_parallel.sync_batchnorm import normalising, synchronised
from steelyard.plans.rule_table import (
    MOST_RANKS,
    OMITTED,
    Bytes,
    Positive,
    Ranks,
    RuleTable,
    as_tuple,
)
from steelyard.plans.trade import Offer, Rejection


class ShardBatchTable(RuleTable):
    """``[[shard_batch]]``; ``shares`` are the samples that each rank takes, of as many as they add
    up to."""

    degree: Ranks
    shares: Annotated[
        tuple[Positive, ...], BeforeValidator(as_tuple), Field(max_length=MOST_RANKS), OMITTED
    ] = ()
    bucket_bytes: Annotated[Bytes, Field(alias="bucket")]

    @classmethod
    def problems(cls, rules: Sequence[Rule]) -> list[str]:
        return [
            f"shard_batch is among {rule.degree} ranks and has {len(rule.shares)} shares"
            for rule in rules
            if rule.shares and len(rule.shares) != rule.degree
        ]


class ShardBatch:
    """Pays communication, buys computation and memory."""

    name: ClassVar[str] = "shard_batch"
    pays: ClassVar[tuple[str, ...]] = ("communication",)
    buys: ClassVar[tuple[str, ...]] = ("computation", "memory")
    is_exact: ClassVar[bool] = True
    is_bitwise: ClassVar[bool] = False
    table: ClassVar[type[RuleTable]] = ShardBatchTable

    def offers(
        self, program: Program, source: StepSource
    ) -> tuple[tuple[Offer, ...], tuple[Rejection, ...]]:
        shares = [k for k in source.sharers() if k > 1]
        reason = source.why_not_shared() if shares else "the batch has too few examples"
        reason = reason or why_not_reduced(program.graph)
        if reason is not None:
            label = "the batch among ranks"
            return (), (Rejection(trade=self.name, label=label, reason=reason),)
        refusals: tuple[Rejection, ...] = ()
        if normalising(program.graph):
            label = "with BatchNorm's statistics of each rank's own samples"
            lossy = "is lossy, each rank would normalise otherwise; those of all samples are taken"
            refusals = (Rejection(trade=self.name, label=label, reason=lossy),)
        offers = (
            Offer(
                trade=self.name,
                label=f"among {k} ranks",
                rules=(Rule(trade=self.name, degree=k, bucket_bytes=BUCKET_BYTES),),
            )
            for k in shares
        )
        return tuple(offers), refusals

    def rewrite(
        self,
        program: Program,
        rules: Sequence[Rule],
        source: StepSource,
    ) -> Program:
        ranks = program.layout.batch
        if not rules or ranks == 1:
            return program
        if program.layout.pipeline > 1:
            return program  # ranks with the same stages sum up behind all micro-batches
        assert not program.again, "shard_batch changes the graph, so it is applied early"
        # Those that hold the same part of a model are as far apart as its parts are many.
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
            bucket_bytes=max(rule.bucket_bytes for rule in rules),
            num_ranks=ranks,
            transport=source.transport,
            axis=DATA,
            stride=stride,
            repeats=program.repeats,
        )
        return program.with_graph(graph)


# What stock DistributedDataParallel takes; a search tries others.
BUCKET_BYTES = 25 * 2**20
