"""Shard states: each data-parallel rank stores a shard of the weights and of their state.

Each rank has some rows of a sharded parameter, with their gradient and optimizer state, and updates
these rows. The parameter is all-gathered before its first reader, once per step or once per pass,
and its gradient is reduce-scattered. This is ZeRO's third stage (Rajbhandari et al., SC 2020).
ZeRO's first two stages would gather after the update; this trade gathers in the next step, where
the transfer overlaps with computation (docs/decisions/0016-one-way-to-share-states.md). Pipeline
stages gather before all micro-batches, and reduce after them. Not for choosing parameters: see
search/.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

from steelyard.errors import Mismatch
from steelyard.ir.graph import Graph, Role
from steelyard.ir.optimizer_update import WEIGHT, parameters_named, parameters_of
from steelyard.ir.parallel_layout import DATA
from steelyard.ir.placement import Shard
from steelyard.ir.program import Program
from steelyard.ir.rule import Rule, pattern_of
from steelyard.ir.rule_kinds import StateSharding
from steelyard.ir.sharding_choice import ShardingChoice
from steelyard.ir.step_source import StepSource
from steelyard.passes.data_parallel.shard_parameters import check_shared, gathered, why_not_shared
from steelyard.plans.trade import Offer, Rejection
from steelyard.units import format_bytes

# The minimum size of a parameter: a smaller one costs two more collectives and saves nothing.
_LEAST_BYTES = 16 << 10


@dataclass(frozen=True, kw_only=True)
class ShardStatesRule(StateSharding):
    """``[[shard_states]]``: the state of a parameter that is sharded.

    By default the weight, its gradient and its optimizer state are sharded.
    """

    trade: str = field(init=False, default="shard_states")

    def describe(self) -> str:
        twice = ", gathered twice" if self.gathers > 1 else ""
        bucket = f", buckets of {format_bytes(self.bucket)}" if self.bucket else ""
        return f"{self.parameter} ({self.count}) among {self.ranks} ranks{twice}{bucket}"


class ShardStates:
    """Pays communication, buys memory. The order of summation is the same as with shard_batch."""

    name: ClassVar[str] = ShardStatesRule.trade
    pays: ClassVar[tuple[str, ...]] = ("communication",)
    buys: ClassVar[tuple[str, ...]] = ("memory",)
    is_exact: ClassVar[bool] = True
    is_bitwise: ClassVar[bool] = False
    rule: ClassVar[type[Rule]] = ShardStatesRule

    def offers(
        self,
        program: Program,
        source: StepSource,  # noqa: ARG002 - the program says what there is
    ) -> tuple[tuple[Offer, ...], tuple[Rejection, ...]]:
        """Offer each parameter that divides among the ranks; equal blocks share an offer."""
        ranks, graph = program.layout.data, program.graph
        if ranks == 1:
            return (), ()
        reason = program.update.unshardable if program.update is not None else ""
        by_pattern: dict[str, int] = {}
        for name in _large(graph) if not reason else ():
            if why_not_shared(graph, name, ranks) is None:
                pattern = pattern_of(name.removeprefix(WEIGHT), graph.runs)
                by_pattern[pattern] = by_pattern.get(pattern, 0) + 1
        offers = tuple(
            Offer(
                trade=self.name,
                label=f"{pattern} ({count})" if count > 1 else pattern,
                rules=(ShardStatesRule(ranks=ranks, parameter=pattern, count=count),),
            )
            for pattern, count in by_pattern.items()
            if count == len(parameters_of(graph, pattern))
        )
        if offers:
            return offers, ()
        reason = reason or f"no large parameter has rows that divide among {ranks} ranks"
        label = f"weights over {ranks} ranks"
        return (), (Rejection(trade=self.name, label=label, reason=reason),)

    def rewrite(
        self, program: Program, rules: Sequence[ShardStatesRule], source: StepSource
    ) -> Program:
        if not rules:
            return program
        assert not program.recomputed, "shard_states changes the graph, so it is applied early"
        layout, update = program.layout, program.update
        if any(rule.ranks != layout.data for rule in rules) or layout.data == 1:
            raise Mismatch(
                f"the plan shards weights over {rules[0].ranks} ranks, but the batch over "
                f"{layout.data}",
                expected="the same number of ranks for both",
                remedy="set ranks under [[shard_states]] to the value under [[shard_batch]]",
            )
        if any(rule.what for rule in rules):
            raise Mismatch(
                "the plan shards gradients or optimizer state, but not the weights",
                expected="weights that are sharded as well",
                remedy="remove `what` from the shard_states rules, or plan for this machine",
            )
        if update is not None and update.unshardable:
            raise Mismatch(
                f"the plan shards weights over ranks, but {update.unshardable}",
                expected="an optimizer that updates each element from its own gradient and state",
                remedy="remove the shard_states rules from the plan, or plan again",
            )
        if layout.pipeline > 1 and any(rule.gathers > 1 or rule.bucket for rule in rules):
            raise Mismatch(
                "the plan gathers weights of pipeline stages twice a step or in buckets",
                expected="weights gathered once, one by one, before all micro-batches",
                remedy="remove `gathers` and `bucket` from the shard_states rules, or plan again",
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
                stride=layout.tensor,
                regathered=[name for name, rule in named if rule.gathers > 1],
                together={name: rule.bucket for name, rule in named},
            )  # fmt: skip
        inputs = tuple((name, Shard(0)) for name in names)
        own = ShardingChoice(axis=DATA, num_ranks=layout.data, inputs=inputs)
        shardings = (*program.shardings, own)
        if update is not None:
            update = source.update_in_parts(update, shardings)
        return replace(program.with_graph(graph), shardings=shardings, update=update)


def _large(graph: Graph) -> list[str]:
    return [
        node.name
        for node in graph.inputs()
        if node.outputs
        and graph.storages[node.outputs[0].storage].role is Role.PARAMETER
        and node.outputs[0].nbytes >= _LEAST_BYTES
    ]
