"""Converts the rules of a plan file to a layout of a deep model; rejects rules that have no meaning
there.

Not for the inverse conversion: see to_rules.py.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NoReturn

from steelyard.errors import Mismatch
from steelyard.ir.graph import Graph
from steelyard.ir.model_blocks import ActivationPolicy, Blocks
from steelyard.ir.parallel_layout import ParallelLayout
from steelyard.ir.rule import CallRule, CallSite, Rule, of_kind, trade_name
from steelyard.ir.rule_kinds import (
    BatchSharding,
    CollectiveOverlap,
    MicroBatches,
    PipelineStageEnd,
    Recomputation,
    StateOffload,
    StateSharding,
    TensorSharding,
    ValueOffload,
)
from steelyard.ir.sharding_choice import Region
from steelyard.plans.trade import Trade
from steelyard.search.cluster.search import ClusterPlan, ClusterSearch
from steelyard.search.cluster.to_rules import SHARDED_STATE, offloaded_calls, to_rules

_POLICY_KINDS = (Recomputation, ValueOffload)


@dataclass(frozen=True, slots=True, kw_only=True)
class RuleContext:
    """The captured step to which rules refer: a graph of three blocks and its shardable regions."""

    graph: Graph
    blocks: Blocks
    num_samples: int
    regions: Callable[[int], Sequence[Region]]
    trades: Sequence[Trade]


def from_rules(rules: Sequence[Rule], search: ClusterSearch, step: RuleContext) -> ClusterPlan:
    layout = _layout(rules, search, step)
    stages = _stages(rules, layout, step)
    plan = search.price_layout(layout, stages)
    # Converting the plan back must give the same rules, otherwise some rule was ignored.
    regions = step.regions(layout.tensor) if layout.tensor > 1 else ()
    converted_back = to_rules(plan, step.graph, regions, step.blocks, step.trades)
    converted, given = _layout_rules(converted_back), _layout_rules(rules)
    for rule in [*(given - converted), *(converted - given)]:
        _refuse(rule, "planning for a declared cluster does not write such a rule")
    return plan


def _layout_rules(rules: Iterable[Rule]) -> Counter[Rule]:
    """Count the rules without those for recompute and offload.

    These name calls block by block, and the order of blocks within a stage is arbitrary.
    """
    return Counter(rule for rule in rules if not isinstance(rule, _POLICY_KINDS))


def _layout(rules: Sequence[Rule], search: ClusterSearch, step: RuleContext) -> ParallelLayout:
    batch, tensor = of_kind(rules, BatchSharding), of_kind(rules, TensorSharding)
    split, stage_ends = of_kind(rules, MicroBatches), of_kind(rules, PipelineStageEnd)
    data = _degree(batch, [rule.ranks for rule in batch])
    micro_batches = _degree(split, [rule.micro_batches for rule in split])
    pipeline = _degree(stage_ends, [rule.ranks for rule in stage_ends])
    stages = len(stage_ends)
    virtual, rest = divmod(stages + 1, pipeline)
    if stages and rest:
        _refuse(stage_ends[0], f"{stages + 1} stages are not a multiple of {pipeline} ranks")
    if step.num_samples % (data * micro_batches):
        _refuse(
            (split or batch)[0],
            f"{step.num_samples} samples do not divide into {data * micro_batches} equal parts",
        )
    sharded = {rule.what for rule in of_kind(rules, StateSharding)}
    state_rules = of_kind(rules, StateOffload)
    layout = ParallelLayout(
        tensor=_degree(tensor, [rule.ranks for rule in tensor]),
        pipeline=pipeline,
        data=data,
        micro_batches=micro_batches,
        virtual=virtual if stages else 1,
        state_stage=next((n for n, state in SHARDED_STATE.items() if sharded == {state}), 0),
        overlaps=bool(of_kind(rules, CollectiveOverlap)),
        offloads_state=bool(state_rules),
    )
    if layout.num_ranks > search.num_devices:
        raise Mismatch(
            f"the plan needs {layout.num_ranks} ranks, but the cluster has {search.num_devices} "
            "devices",
            expected="no more ranks than devices",
            remedy="reduce a degree, or declare a larger cluster",
        )
    offload_rules: Sequence[Rule] = state_rules or of_kind(rules, ValueOffload)
    if offload_rules and not search.pricing.has_host_memory(layout):
        _refuse(offload_rules[0], "the cluster declares no host memory, or no link to it")
    return layout


def _degree(rules: Sequence[Rule], degrees: Sequence[int]) -> int:
    """Return the degree on which all these rules agree; 1 without rules."""
    found = set(degrees)
    if len(found) > 1:
        _refuse(rules[1], f"the rules have different degrees, {min(found)} and {max(found)}")
    return found.pop() if found else 1


def _stages(
    rules: Sequence[Rule], layout: ParallelLayout, step: RuleContext
) -> tuple[tuple[tuple[ActivationPolicy, int], ...], ...]:
    policies = _policies(rules, step)
    found: list[Counter[ActivationPolicy]] = [Counter() for _ in range(layout.pipeline)]
    start = 0
    for run, end in enumerate([*_stage_ends(rules, step.blocks), step.blocks.count]):
        found[run % layout.pipeline].update(policies[start:end])
        start = end
    return tuple(tuple(policies_of_stage.items()) for policies_of_stage in found)


def _stage_ends(rules: Iterable[Rule], blocks: Blocks) -> list[int]:
    """Return the number of blocks before the end of each stage but the last."""
    ends = []
    for rule in of_kind(rules, PipelineStageEnd):
        number = rule.behind.removeprefix(f"{blocks.path}.")
        if not number.isdigit() or not 0 <= int(number) - blocks.first < blocks.count - 1:
            _refuse(rule, f"it does not end at a block of {blocks.path} that has a successor")
        ends.append(int(number) - blocks.first + 1)
    return sorted(ends)


def _policies(rules: Iterable[Rule], step: RuleContext) -> list[ActivationPolicy]:
    """Return the activation policy of each block."""
    recomputed_of: list[list[CallSite]] = [[] for _ in range(step.blocks.count)]
    offloaded_of: list[list[CallSite]] = [[] for _ in range(step.blocks.count)]
    for rule in rules:
        if isinstance(rule, Recomputation | ValueOffload):
            for number, inside in _blocks_named(rule, step.blocks):
                target = recomputed_of if isinstance(rule, Recomputation) else offloaded_of
                target[number].append(CallSite(inside, rule.op, rule.nth))
    found, offloadable = [], _OffloadedCalls(step)
    for number, (recomputed, sites) in enumerate(zip(recomputed_of, offloaded_of, strict=True)):
        policy = ActivationPolicy(
            recomputed=tuple(sorted(recomputed, key=str)), is_offloaded=bool(sites)
        )
        if sites and Counter(sites) != offloadable[policy]:
            raise Mismatch(
                f"the plan offloads {len(sites)} values of block {number + step.blocks.first}, "
                f"but the block saves {offloadable[policy].total()}",
                expected="all or none, because partial offload is not priced",
                remedy=f"complete the [[{trade_name(ValueOffload)}]] rules of that block, or "
                "remove them",
            )
        found.append(policy)
    return found


class _OffloadedCalls(dict[ActivationPolicy, Counter[CallSite]]):
    """A cache of the offloaded calls of a block under each activation policy."""

    def __init__(self, step: RuleContext) -> None:
        self._step = step

    def __missing__(self, policy: ActivationPolicy) -> Counter[CallSite]:
        self[policy] = Counter(offloaded_calls(self._step.graph, self._step.blocks, policy))
        return self[policy]


def _blocks_named(rule: CallRule, blocks: Blocks) -> Iterator[tuple[int, str]]:
    """Yield the index of each block to which a rule applies, with the module path inside it."""
    rest = rule.module.removeprefix(f"{blocks.path}.")
    number, _, inside = rest.partition(".")
    if rest == rule.module or not (number == "*" or number.isdigit()):
        _refuse(rule, f"it is outside of the blocks of {blocks.path or 'the model'}")
    if number == "*":
        if rule.count != blocks.count:
            _refuse(rule, f"it applies {rule.count} times, but there are {blocks.count} blocks")
        yield from ((n, inside) for n in range(blocks.count))
        return
    if not 0 <= int(number) - blocks.first < blocks.count:
        _refuse(rule, f"it names none of the {blocks.count} blocks")
    yield int(number) - blocks.first, inside


def _refuse(rule: Rule, why: str) -> NoReturn:
    raise Mismatch(
        f"the {rule.trade} rule ({rule.describe()}) cannot be used: {why}",
        expected="rules as steelyard plan --cluster writes them",
        remedy="undo the edit, or plan again for this cluster",
    )
