"""Converts a layout of a deep model to the rules of a plan file.

The capture has three blocks, and the rules of the middle one apply to all blocks. Not for choosing
the layout: see search.py.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Literal

from steelyard.ir.graph import Graph, OutputKind, path_matches
from steelyard.ir.model_blocks import ActivationPolicy, Blocks
from steelyard.ir.placement import Shard
from steelyard.ir.rule import CallRule, CallSite, Rule, rule_for
from steelyard.ir.rule_kinds import (
    CollectiveOverlap,
    PipelineStageEnd,
    Recomputation,
    StateOffload,
    StateSharding,
    TensorSharding,
    ValueOffload,
)
from steelyard.ir.sharding_choice import Region
from steelyard.plans.trade import Trade, rule_type
from steelyard.predict.analytic.node_assignment import MIDDLE
from steelyard.predict.analytic.saved_activations import saved_calls
from steelyard.search.cluster.search import ClusterPlan
from steelyard.search.layout_rules import batch_rules

# The sharded state for each ZeRO stage. Sharded weights imply sharded gradients and optimizer
# state.
SHARDED_STATE: dict[int, Literal["optimizer", "gradient", ""]] = {
    1: "optimizer", 2: "gradient", 3: "",
}  # fmt: skip


def to_rules(
    plan: ClusterPlan,
    graph: Graph,
    regions: Sequence[Region],
    blocks: Blocks,
    trades: Sequence[Trade],
) -> tuple[Rule, ...]:
    """Return the rules of a cluster plan, of the types of these trades.

    ``graph`` is the capture of three blocks on one device; ``regions`` are its tensor-parallel
    regions.
    """
    layout = plan.layout
    rules = [*batch_rules(layout, trades)]
    if layout.overlaps:
        rules.append(rule_type(trades, CollectiveOverlap)(window=1))
    if layout.tensor > 1:
        tensor = rule_type(trades, TensorSharding)
        rules += _tensor_rules(regions, blocks, layout.tensor, tensor)
    if layout.state_stage:
        states = rule_type(trades, StateSharding)
        what = SHARDED_STATE[layout.state_stage]
        rules += [
            states(ranks=layout.data, parameter=pattern, what=what, count=count)
            for pattern, count in _trained(graph, blocks)
        ]
    if layout.pipeline > 1:
        stage_end = rule_type(trades, PipelineStageEnd)
        rules += [
            stage_end(
                ranks=layout.pipeline,
                schedule=layout.schedule,
                behind=f"{blocks.path}.{blocks.first + end - 1}",
            )
            for end in _stage_ends(plan)
        ]
    if layout.offloads_state:
        offload = rule_type(trades, StateOffload)
        rules += [
            offload(parameter=pattern, count=count) for pattern, count in _trained(graph, blocks)
        ]
    rules += _policy_rules(plan, blocks, partial(_block_rules, graph, blocks, trades))
    return tuple(sorted(rules))


def _tensor_rules(
    regions: Sequence[Region], blocks: Blocks, ranks: int, rule: type[TensorSharding]
) -> Iterator[TensorSharding]:
    placements = {
        key.partition(":")[2]: placement
        for region in regions
        for key, placement in region.inputs
        if isinstance(placement, Shard)
    }
    for pattern, count, name in _patterns(placements, blocks):
        yield rule(
            ranks=ranks, parameter=pattern, count=count,
            dim=placements[name].dim, groups=placements[name].groups,
        )  # fmt: skip


def _trained(graph: Graph, blocks: Blocks) -> Iterator[tuple[str, int]]:
    """Yield the name pattern of each trained parameter, and how many there are in the whole
    model.
    """
    names = [o.target.partition(":")[2] for o in graph.outputs if o.kind is OutputKind.GRADIENT]
    yield from ((pattern, count) for pattern, count, _ in _patterns(names, blocks))


def _patterns(
    names: Sequence[str] | dict[str, Shard], blocks: Blocks
) -> Iterator[tuple[str, int, str]]:
    """Yield each name pattern, the number of its tensors in the whole model, and one of these."""
    middle = f"{blocks.path}.{blocks.first + MIDDLE}."
    for name in names:
        if blocks.count and name.startswith(middle):
            inside = name.removeprefix(middle)
            earlier = (f"{blocks.path}.{i}.{inside}" for i in range(blocks.first))
            pattern = f"{blocks.path}.*.{inside}"
            count = blocks.count + sum(name in names for name in earlier)
            yield pattern, count, name
        elif not (blocks.count and path_matches(name, f"{blocks.path}.*.{_inside(name, blocks)}")):
            yield name, 1, name


def _inside(name: str, blocks: Blocks) -> str:
    return name.removeprefix(f"{blocks.path}.").partition(".")[2]


def _stage_ends(plan: ClusterPlan) -> list[int]:
    """Return the number of blocks before the end of each stage but the last.

    Virtual stages are assigned to the ranks in turn.
    """
    layout = plan.layout
    counts = [sum(count for _, count in stage) // layout.virtual for stage in plan.stages]
    so_far, ends = 0, []
    for count in counts * layout.virtual:
        so_far += count
        ends.append(so_far)
    return ends[:-1]


def _policy_rules(
    plan: ClusterPlan, blocks: Blocks, to_rules: Callable[[ActivationPolicy], Sequence[CallRule]]
) -> list[CallRule]:
    """Return the recompute and offload rules of all blocks.

    ``to_rules`` returns the rules of a policy, with module paths inside a block.
    """
    policies = {policy for stage in plan.stages for policy, _ in stage}
    rules_of = {policy: to_rules(policy) for policy in policies}
    if len(policies) == 1 and blocks.first == 0:
        (policy_rules,) = rules_of.values()
        return [
            replace(rule, module=_within(f"{blocks.path}.*", rule.module), count=blocks.count)
            for rule in policy_rules
        ]
    return [
        replace(rule, module=_within(f"{blocks.path}.{blocks.first + number}", rule.module))
        for number, policy in policies_by_block(plan)
        for rule in rules_of[policy]
    ]


def _block_rules(
    graph: Graph, blocks: Blocks, trades: Sequence[Trade], policy: ActivationPolicy
) -> list[CallRule]:
    found: list[CallRule] = [
        rule_for(rule_type(trades, Recomputation), site) for site in policy.recomputed
    ]
    if policy.is_offloaded:
        offload = rule_type(trades, ValueOffload)
        found += [rule_for(offload, site) for site in offloaded_calls(graph, blocks, policy)]
    return found


def offloaded_calls(graph: Graph, blocks: Blocks, policy: ActivationPolicy) -> Iterator[CallSite]:
    """Yield the calls of a block whose outputs stay saved, with module paths inside the block."""
    block_path = f"{blocks.path}.{blocks.first + MIDDLE}"
    for site in saved_calls(graph, policy, blocks=blocks.path, first=blocks.first):
        yield replace(site, module=site.module.removeprefix(block_path).removeprefix("."))


def _within(block: str, module: str) -> str:
    return f"{block}.{module}" if module else block


def policies_by_block(plan: ClusterPlan) -> Iterator[tuple[int, ActivationPolicy]]:
    """Yield the index and policy of each block, one virtual stage after another."""
    layout = plan.layout
    begin = 0
    stage_policies = [
        [policy for policy, count in stage for _ in range(count)] for stage in plan.stages
    ]
    for run in range(layout.virtual):
        for stage in stage_policies:
            run_length = len(stage) // layout.virtual
            for index in range(run_length):
                yield begin + index, stage[run * run_length + index]
            begin += run_length
