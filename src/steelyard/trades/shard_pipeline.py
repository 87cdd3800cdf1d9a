"""Shard the layers: each rank holds some, and micro-batches go through them as on a belt.

What a rank does not hold it neither keeps nor updates; activations and their gradients travel
between neighbours, and while the belt fills and empties ranks wait. Several such groups of ranks
may share the batch: those with the same stages sum up their gradients behind the passes. Struck
last, on the lines that all else has settled. The ranks of a stage may share its tensors: its lines
then hold exchanges among them. Not for when who works: the table is one of torch's schedules.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, ClassVar

from pydantic import Field

from steelyard.errors import Mismatch
from steelyard.ir.graph import Node
from steelyard.ir.program import Program
from steelyard.ir.rule import Rule
from steelyard.ir.step_source import StepSource
from steelyard.passes.pipeline.stage_boundaries import balanced_ends
from steelyard.plans.rule_table import Ranks, RuleTable
from steelyard.plans.trade import Offer, Rejection

# Stages to a rank, under each of torch's schedules that is offered. LoopedBFS keeps more than
# Interleaved1F1B for the same time, and GPipe than 1F1B, which takes no single micro-batch though.
SCHEDULES = {
    "GPipe": 1, "1F1B": 1, "Interleaved1F1B": 2, "InterleavedZeroBubble": 2, "ZBVZeroBubble": 2,
}  # fmt: skip


class ShardPipelineTable(RuleTable):
    """``[[shard_pipeline]]``: a stage ends behind each of these modules."""

    most: ClassVar[int] = 10_000

    degree: Ranks
    op: Annotated[str, Field(alias="schedule")]
    module: Annotated[str, Field(alias="behind")]


class ShardPipeline:
    """Pays communication, buys computation and memory. The values are those of micro-batches."""

    name: ClassVar[str] = "shard_pipeline"
    pays: ClassVar[tuple[str, ...]] = ("communication",)
    buys: ClassVar[tuple[str, ...]] = ("computation", "memory")
    is_exact: ClassVar[bool] = True
    is_bitwise: ClassVar[bool] = False
    table: ClassVar[type[RuleTable]] = ShardPipelineTable

    def offers(
        self,
        program: Program,
        source: StepSource,  # noqa: ARG002 - the modules decide, not the batch
    ) -> tuple[tuple[Offer, ...], tuple[Rejection, ...]]:
        """Each schedule, on stages that are to compute about equally much."""
        ranks = program.layout.pipeline
        if ranks == 1:
            return (), ()
        reason = _why_not(program)
        offers = () if reason else tuple(self._offered(program, ranks))
        if offers:
            return offers, ()
        reason = reason or f"the model has too few modules for {ranks} stages"
        label = f"layers on {ranks} ranks"
        return (), (Rejection(trade=self.name, label=label, reason=reason),)

    def _offered(self, program: Program, ranks: int) -> list[Offer]:
        found = []
        for schedule, each in SCHEDULES.items():
            graph = program.graph
            ends = balanced_ends(graph, each * ranks, weight=_about, handing=float)
            if ends:
                rules = rules_for(ends, schedule=schedule, ranks=ranks)
                label = f"{schedule}, {each * ranks} stages on {ranks} ranks"
                found.append(Offer(trade=self.name, label=label, rules=rules))
        return found

    def rewrite(self, program: Program, rules: Sequence[Rule], source: StepSource) -> Program:
        ranks = program.layout.pipeline
        if not rules or ranks == 1:
            return program
        said = {(rule.degree, rule.op) for rule in rules}
        if len(said) > 1:
            raise Mismatch(
                "the shard_pipeline rules do not agree on ranks or schedule",
                expected="the same of both in each, as all are ends of stages of one pipeline",
                remedy="give all the same ranks and schedule, or plan again",
            )
        reason = _why_not(program)
        if reason:
            raise Mismatch(
                f"the plan lays the layers on {ranks} ranks, and {reason}",
                expected="a step whose micro-batches go through stages one after another",
                remedy="take the shard_pipeline rules out of the plan, or plan again",
            )
        pipeline = source.in_stages(
            program,
            ends=tuple(rule.module for rule in rules),
            schedule=rules[0].op,
            num_ranks=ranks,
        )
        program = program.with_graph(pipeline.stages.graph)
        return replace(program, pipeline=pipeline)


def rules_for(ends: Sequence[str], *, schedule: str, ranks: int) -> tuple[Rule, ...]:
    trade = ShardPipeline.name
    return tuple(Rule(trade=trade, module=end, op=schedule, degree=ranks) for end in ends)


def _why_not(program: Program) -> str:
    if program.layout.shares:
        return "groups of ranks that share layers share the batch equally or not at all"
    if program.is_moving or program.coded:
        return "values that wait in offload memory or in 8 bits do not go through stages yet"
    if program.update is not None and program.update.undivided:
        return program.update.undivided
    if program.graph.decomposition.startswith("inductor"):
        return "stages are run by generated Python, not by Inductor"
    return ""


def _about(node: Node) -> float:
    """What it computes and moves, in the same coin: so many operations for each byte."""
    return node.flops / _FLOPS_PER_BYTE + node.moved_bytes if not node.is_free else 0.0


_FLOPS_PER_BYTE = 10
