"""Shard the layers: pipeline parallelism over micro-batches.

A rank stores and updates only its own layers. Activations and their gradients are sent between
neighbours, and ranks are idle while the pipeline fills and drains. Several such groups of ranks may
share the batch: ranks of the same stage then reduce their gradients after the passes. The ranks of
a stage may also shard its tensors: its lines then contain their collectives. The trade is applied
last, to the lines that all other trades produced. Not for the order of actions, which is one of
torch's schedules.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

from steelyard.errors import Mismatch
from steelyard.ir.graph import Node
from steelyard.ir.program import Program
from steelyard.ir.rule import Rule
from steelyard.ir.rule_kinds import PipelineStageEnd
from steelyard.ir.step_source import StepSource
from steelyard.passes.pipeline.stage_boundaries import balanced_ends
from steelyard.plans.trade import Offer, Rejection

# The number of stages per rank for each of torch's schedules that is offered. LoopedBFS saves more
# activations than Interleaved1F1B for the same time, and so does GPipe compared with 1F1B; but 1F1B
# does not accept a single micro-batch.
SCHEDULES = {
    "GPipe": 1, "1F1B": 1, "Interleaved1F1B": 2, "InterleavedZeroBubble": 2, "ZBVZeroBubble": 2,
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class ShardPipelineRule(PipelineStageEnd):
    """``[[shard_pipeline]]``: one stage ends after each of these modules."""

    trade: str = field(init=False, default="shard_pipeline")


class ShardPipeline:
    """Pays communication, buys computation and memory. Results equal those with micro-batches
    alone.
    """

    name: ClassVar[str] = ShardPipelineRule.trade
    pays: ClassVar[tuple[str, ...]] = ("communication",)
    buys: ClassVar[tuple[str, ...]] = ("computation", "memory")
    is_exact: ClassVar[bool] = True
    is_bitwise: ClassVar[bool] = False
    rule: ClassVar[type[Rule]] = ShardPipelineRule

    def offers(
        self,
        program: Program,
        source: StepSource,  # noqa: ARG002 - the modules decide, not the batch
    ) -> tuple[tuple[Offer, ...], tuple[Rejection, ...]]:
        """Offer each schedule, with stages of about equal computation."""
        ranks = program.layout.pipeline
        if ranks == 1:
            return (), ()
        reason = _why_not(program)
        offers = () if reason else tuple(self._offers(program, ranks))
        if offers:
            return offers, ()
        reason = reason or f"the model has too few modules for {ranks} stages"
        label = f"layers on {ranks} ranks"
        return (), (Rejection(trade=self.name, label=label, reason=reason),)

    def _offers(self, program: Program, ranks: int) -> list[Offer]:
        found = []
        for schedule, each in SCHEDULES.items():
            graph = program.graph
            ends = balanced_ends(graph, each * ranks, weight=_weight, handing=float)
            if ends:
                rules = rules_for(ends, schedule=schedule, ranks=ranks)
                label = f"{schedule}, {each * ranks} stages on {ranks} ranks"
                found.append(Offer(trade=self.name, label=label, rules=rules))
        return found

    def rewrite(
        self, program: Program, rules: Sequence[ShardPipelineRule], source: StepSource
    ) -> Program:
        ranks = program.layout.pipeline
        if not rules or ranks == 1:
            return program
        settings = {(rule.ranks, rule.schedule) for rule in rules}
        if len(settings) > 1:
            raise Mismatch(
                "the shard_pipeline rules have different ranks or schedules",
                expected="the same ranks and schedule in each rule, because all are stage ends "
                "of one pipeline",
                remedy="set the same ranks and schedule in all rules, or plan again",
            )
        reason = _why_not(program)
        if reason:
            raise Mismatch(
                f"the plan assigns layers to {ranks} ranks, but {reason}",
                expected="a step whose micro-batches run through pipeline stages in sequence",
                remedy="remove the shard_pipeline rules from the plan, or plan again",
            )
        pipeline = source.in_stages(
            program,
            ends=tuple(rule.behind for rule in rules),
            schedule=rules[0].schedule,
            num_ranks=ranks,
        )
        program = program.with_graph(pipeline.stages.graph)
        return replace(program, pipeline=pipeline)


def rules_for(ends: Sequence[str], *, schedule: str, ranks: int) -> tuple[Rule, ...]:
    return tuple(ShardPipelineRule(ranks=ranks, schedule=schedule, behind=end) for end in ends)


def _why_not(program: Program) -> str:
    if program.layout.shares:
        return "groups of pipeline ranks need equal shares of the batch"
    if program.is_moving or program.quantized:
        return "offloaded and 8-bit values are not supported with pipeline stages yet"
    if program.update is not None and program.update.undivided:
        return program.update.undivided
    if program.graph.decomposition.startswith("inductor"):
        return "stages are run by generated Python, not by Inductor"
    return ""


def _weight(node: Node) -> float:
    """Return the node's cost in bytes moved, with FLOPs converted at a fixed rate."""
    return node.flops / _FLOPS_PER_BYTE + node.moved_bytes if not node.is_free else 0.0


_FLOPS_PER_BYTE = 10
