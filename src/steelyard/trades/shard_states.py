"""Shard states: each data-parallel rank stores a shard of the weights and of their state.

Each rank has some rows of a sharded parameter, with their gradient and optimizer state, and
updates these rows. The parameter is all-gathered before its first reader, once a step or once for
each pass, and its gradient is reduce-scattered: ZeRO's third stage (Rajbhandari et al., SC 2020).
The first two stages would gather after the update; this gathers in the next step, where the
transfer overlaps with computation (docs/decisions/0016-one-way-to-share-states.md). Pipeline
stages gather before all micro-batches, and reduce after them. Not for choosing parameters: see
search/.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from steelyard.errors import Mismatch
from steelyard.ir.graph import Graph, Role
from steelyard.ir.optimizer_update import WEIGHT, parameters_named, parameters_of
from steelyard.ir.parallel_layout import DATA
from steelyard.ir.placement import Shard
from steelyard.ir.program import Program
from steelyard.ir.rule import Rule, pattern_of
from steelyard.ir.sharding_choice import ShardingChoice
from steelyard.ir.step_source import StepSource
from steelyard.passes.data_parallel.shard_parameters import check_shared, gathered, why_not_shared
from steelyard.plans.rule_table import (
    MOST_PARAMETERS,
    OMITTED,
    BytesOrNone,
    Parameter,
    Positive,
    Ranks,
    RuleTable,
)
from steelyard.plans.trade import Offer, Rejection

# Minimum size of a parameter: less costs two more collectives and saves nothing.
_LEAST_BYTES = 16 << 10


class ShardStatesTable(RuleTable):
    """``[[shard_states]]``: the state of a parameter that is sharded.

    By default the weight, its gradient and its optimizer state are sharded.
    """

    most: ClassVar[int] = MOST_PARAMETERS

    degree: Ranks
    module: Parameter
    op: Annotated[Literal["optimizer", "gradient", ""], Field(alias="what"), OMITTED] = ""
    times: Annotated[int, Field(ge=1, le=2, alias="gathers"), OMITTED] = 1
    # By default each parameter is gathered by itself.
    bucket_bytes: Annotated[BytesOrNone, Field(alias="bucket"), OMITTED] = 0
    count: Positive = 1


class ShardStates:
    """Pays communication, buys memory. Sums are added in the same order as with shard_batch."""

    name: ClassVar[str] = "shard_states"
    pays: ClassVar[tuple[str, ...]] = ("communication",)
    buys: ClassVar[tuple[str, ...]] = ("memory",)
    is_exact: ClassVar[bool] = True
    is_bitwise: ClassVar[bool] = False
    table: ClassVar[type[RuleTable]] = ShardStatesTable

    def offers(
        self,
        program: Program,
        source: StepSource,  # noqa: ARG002 - the program says what there is
    ) -> tuple[tuple[Offer, ...], tuple[Rejection, ...]]:
        """Offer each parameter that divides among the ranks; equal blocks share an offer."""
        ranks, graph = program.layout.data, program.graph
        if ranks == 1:
            return (), ()
        reason = program.update.unparted if program.update is not None else ""
        by_pattern: dict[str, int] = {}
        for name in _large(graph) if not reason else ():
            if why_not_shared(graph, name, ranks) is None:
                pattern = pattern_of(name.removeprefix(WEIGHT), graph.runs)
                by_pattern[pattern] = by_pattern.get(pattern, 0) + 1
        offers = tuple(
            Offer(
                trade=self.name,
                label=f"{pattern} ({count})" if count > 1 else pattern,
                rules=(Rule(trade=self.name, module=pattern, degree=ranks, count=count),),
            )
            for pattern, count in by_pattern.items()
            if count == len(parameters_of(graph, pattern))
        )
        if offers:
            return offers, ()
        reason = reason or f"no large parameter has rows that divide among {ranks} ranks"
        label = f"weights among {ranks} ranks"
        return (), (Rejection(trade=self.name, label=label, reason=reason),)

    def rewrite(self, program: Program, rules: Sequence[Rule], source: StepSource) -> Program:
        if not rules:
            return program
        assert not program.again, "shard_states changes the graph, so it is applied early"
        layout, update = program.layout, program.update
        if any(rule.degree != layout.data for rule in rules) or layout.data == 1:
            raise Mismatch(
                f"the plan shares weights among {rules[0].degree} ranks, and the batch among "
                f"{layout.data}",
                expected="the same number of ranks for both",
                remedy="set ranks under [[shard_states]] to that under [[shard_batch]]",
            )
        if any(rule.op for rule in rules):
            raise Mismatch(
                "the plan holds weights whole, and what belongs to them in shares",
                expected="weights in shares too, which is what runs here",
                remedy="take `what` out of the shard_states rules, or plan for this machine",
            )
        if update is not None and update.unparted:
            raise Mismatch(
                f"the plan shares weights among ranks, and {update.unparted}",
                expected="an optimizer that changes each element by its own gradient and state",
                remedy="take the shard_states rules out of the plan, or plan again",
            )
        if layout.pipeline > 1 and any(rule.times > 1 or rule.bucket_bytes for rule in rules):
            raise Mismatch(
                "the plan has stages gather weights twice a step, or several at once",
                expected="once, each by itself, in front of all micro-batches, as stages do",
                remedy="take `gathers` and `bucket` out of the shard_states rules, or plan again",
            )
        named = [(name, rule) for rule in rules for name in parameters_named(program.graph, rule)]
        names = [name for name, _ in named]
        if layout.pipeline > 1:
            graph = program.graph  # stages work on whole weights, gathered once for all passes
            for name in names:
                check_shared(graph, name, layout.data)
        else:
            graph = gathered(
                program.graph, names, num_ranks=layout.data, transport=source.transport, axis=DATA,
                stride=layout.tensor, again=[name for name, rule in named if rule.times > 1],
                together={name: rule.bucket_bytes for name, rule in named},
            )  # fmt: skip
        inputs = tuple((name, Shard(0)) for name in names)
        own = ShardingChoice(axis=DATA, num_ranks=layout.data, inputs=inputs)
        partings = (*program.partings, own)
        if update is not None:
            update = source.update_in_parts(update, partings)
        return replace(program.with_graph(graph), partings=partings, update=update)


def _large(graph: Graph) -> list[str]:
    return [
        node.name
        for node in graph.inputs()
        if node.outputs
        and graph.storages[node.outputs[0].storage].role is Role.PARAMETER
        and node.outputs[0].nbytes >= _LEAST_BYTES
    ]
