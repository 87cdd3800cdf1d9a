"""The conversion of plan file rules to a layout of a deep model. Rejects rules without a meaning.

Not for the inverse conversion: see to_rules.py.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NoReturn

from steelyard.errors import Mismatch
from steelyard.ir.graph import Graph
from steelyard.ir.model_blocks import ActivationPolicy, Blocks
from steelyard.ir.parallel_layout import ParallelLayout
from steelyard.ir.rule import CallSite, Rule
from steelyard.ir.sharding_choice import Region
from steelyard.search.cluster.search import ClusterPlan, ClusterSearch
from steelyard.search.cluster.to_rules import SHARDED_STATE, offloaded_calls, to_rules

_POLICY_TRADES = ("recompute", "offload")


@dataclass(frozen=True, slots=True, kw_only=True)
class RuleContext:
    """The captured step that rules refer to: a graph of three blocks and its shardable regions."""

    graph: Graph
    blocks: Blocks
    num_samples: int
    regions: Callable[[int], Sequence[Region]]


def from_rules(rules: Sequence[Rule], search: ClusterSearch, step: RuleContext) -> ClusterPlan:
    layout = _layout(rules, search, step)
    stages = _stages(rules, layout, step)
    plan = search.price_layout(layout, stages)
    # Converting the plan back must give the same rules, otherwise some rule was ignored.
    regions = step.regions(layout.tensor) if layout.tensor > 1 else ()
    rules_again = to_rules(plan, step.graph, regions, step.blocks)
    converted, given = _layout_rules(rules_again), _layout_rules(rules)
    for rule in [*(given - converted), *(converted - given)]:
        _refuse(rule, "which a plan for devices that are not here would not say so")
    return plan


def _layout_rules(rules: Iterable[Rule]) -> Counter[Rule]:
    """Count the rules without recompute and offload rules.

    Those name calls block by block, and the order of blocks within a stage is arbitrary.
    """
    return Counter(rule for rule in rules if rule.trade not in _POLICY_TRADES)


def _layout(rules: Sequence[Rule], search: ClusterSearch, step: RuleContext) -> ParallelLayout:
    by_trade: dict[str, list[Rule]] = defaultdict(list)
    for rule in rules:
        by_trade[rule.trade].append(rule)

    def degree(trade: str) -> int:
        found = {rule.degree for rule in by_trade[trade]}
        if len(found) > 1:
            _refuse(by_trade[trade][1], f"beside others of {min(found)}")
        return found.pop() if found else 1

    degrees, micro_batches = ParallelLayout.of(rules), degree("accumulate")
    for trade in ("shard_batch", "shard_tensor", "shard_pipeline"):
        degree(trade)
    stages = len(by_trade["shard_pipeline"])
    virtual, rest = divmod(stages + 1, degrees.pipeline)
    if stages and rest:
        _refuse(by_trade["shard_pipeline"][0], f"of {stages + 1} stages, which is no multiple")
    if step.num_samples % (degrees.data * micro_batches):
        _refuse(
            (by_trade["accumulate"] or by_trade["shard_batch"])[0],
            f"of a batch of {step.num_samples} samples, which has no such parts",
        )
    sharded = {rule.op for rule in by_trade["shard_states"]}
    stage = next((n for n, state in SHARDED_STATE.items() if sharded == {state}), 0)
    layout = replace(
        degrees,
        shares=(),
        micro_batches=micro_batches,
        virtual=virtual if stages else 1,
        state_stage=stage,
        overlaps=bool(by_trade["overlap"]),
        offloads_state=bool(by_trade["offload_state"]),
    )
    if layout.num_ranks > search.num_devices:
        raise Mismatch(
            f"the plan lies on {layout.num_ranks} ranks, and the cluster has {search.num_devices}",
            expected="no more ranks than devices",
            remedy="lower a degree, or declare a larger cluster",
        )
    offload_rules = by_trade["offload_state"] or by_trade["offload"]
    if offload_rules and not search.pricing.has_host_memory(layout):
        _refuse(offload_rules[0], "and the cluster says of no memory of hosts, or of no link there")
    return layout


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
    for rule in rules:
        if rule.trade == "shard_pipeline":
            number = rule.module.removeprefix(f"{blocks.path}.")
            if not number.isdigit() or not 0 <= int(number) - blocks.first < blocks.count - 1:
                _refuse(rule, f"which is behind no block of {blocks.path} that others follow")
            ends.append(int(number) - blocks.first + 1)
    return sorted(ends)


def _policies(rules: Iterable[Rule], step: RuleContext) -> list[ActivationPolicy]:
    """Return the activation policy of each block."""
    recomputed_of: list[list[CallSite]] = [[] for _ in range(step.blocks.count)]
    offloaded_of: list[list[CallSite]] = [[] for _ in range(step.blocks.count)]
    for rule in rules:
        if rule.trade in _POLICY_TRADES:
            for number, inside in _blocks_named(rule, step.blocks):
                target = recomputed_of if rule.trade == "recompute" else offloaded_of
                target[number].append(CallSite(inside, rule.op, rule.nth))
    found, offloadable = [], _OffloadedCalls(step)
    for number, (recomputed, sites) in enumerate(zip(recomputed_of, offloaded_of, strict=True)):
        policy = ActivationPolicy(
            recomputed=tuple(sorted(recomputed, key=str)), is_offloaded=bool(sites)
        )
        if sites and Counter(sites) != offloadable[policy]:
            raise Mismatch(
                f"the plan moves {len(sites)} values of block {number + step.blocks.first}, and "
                f"{offloadable[policy].total()} of it are kept",
                expected="all of them or none, as is reckoned with for devices that are not here",
                remedy="complete the [[offload]] rules of that block, or leave them out",
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


def _blocks_named(rule: Rule, blocks: Blocks) -> Iterator[tuple[int, str]]:
    """Yield the index of each block that a rule applies to, and the module path inside it."""
    rest = rule.module.removeprefix(f"{blocks.path}.")
    number, _, inside = rest.partition(".")
    if rest == rule.module or not (number == "*" or number.isdigit()):
        _refuse(rule, f"outside of the blocks of {blocks.path or 'the model'}")
    if number == "*":
        if rule.count != blocks.count:
            _refuse(rule, f"{rule.count} times, and there are {blocks.count} blocks")
        yield from ((n, inside) for n in range(blocks.count))
        return
    if not 0 <= int(number) - blocks.first < blocks.count:
        _refuse(rule, f"which is none of the {blocks.count} blocks")
    yield int(number) - blocks.first, inside


def _refuse(rule: Rule, why: str) -> NoReturn:
    subject = " ".join(part for part in (rule.op, rule.module) if part)
    rule_text = f"{rule.trade} of {subject or rule.degree}"
    raise Mismatch(
        f"the plan says {rule_text}, {why}",
        expected="rules as steelyard plan --cluster writes them",
        remedy="take the edit back, or plan again for this cluster",
    )
