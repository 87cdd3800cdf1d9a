"""Rules of a plan file read back as a layout of a deep model; what they cannot mean is refused.

Not for the other way: see to_rules.py.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NoReturn

from steelyard.errors import Mismatch
from steelyard.ir.cluster_layout import Blocks, ClusterLayout
from steelyard.ir.graph import Graph
from steelyard.ir.rule import CallSite, Rule
from steelyard.ir.sharding_choice import Region
from steelyard.search.cluster.search import ClusterPlan, ClusterSearch
from steelyard.search.cluster.stage_assignment import ActivationPolicy
from steelyard.search.cluster.to_rules import HELD, calls_moved, to_rules

_FATES = ("recompute", "offload")


@dataclass(frozen=True, slots=True, kw_only=True)
class RuleContext:
    """What rules are told by: three blocks of the model, and what may be cut of them."""

    graph: Graph
    blocks: Blocks
    num_samples: int
    regions: Callable[[int], Sequence[Region]]


def from_rules(rules: Sequence[Rule], search: ClusterSearch, step: RuleContext) -> ClusterPlan:
    layout = _layout(rules, search, step)
    stages = _stages(rules, layout, step)
    laid = search.priced_as(layout, stages)
    # Written out again they are the same: then nothing of them was left out.
    regions = step.regions(layout.tensor) if layout.tensor > 1 else ()
    again = to_rules(laid, step.graph, regions, step.blocks)
    ours, theirs = _said(again), _said(rules)
    for rule in [*(theirs - ours), *(ours - theirs)]:
        _refuse(rule, "which a plan for devices that are not here would not say so")
    return laid


def _said(rules: Iterable[Rule]) -> Counter[Rule]:
    """Where calls are named block by block, the order of equal blocks in a stage says nothing."""
    return Counter(rule for rule in rules if rule.trade not in _FATES)


def _layout(rules: Sequence[Rule], search: ClusterSearch, step: RuleContext) -> ClusterLayout:
    of: dict[str, list[Rule]] = defaultdict(list)
    for rule in rules:
        of[rule.trade].append(rule)

    def degree(trade: str) -> int:
        found = {rule.degree for rule in of[trade]}
        if len(found) > 1:
            _refuse(of[trade][1], f"beside others of {min(found)}")
        return found.pop() if found else 1

    data, micro_batches = degree("shard_batch"), degree("accumulate")
    pipeline, stages = degree("shard_pipeline"), len(of["shard_pipeline"])
    virtual, rest = divmod(stages + 1, pipeline)
    if stages and rest:
        _refuse(of["shard_pipeline"][0], f"of {stages + 1} stages, which is no multiple")
    if step.num_samples % (data * micro_batches):
        _refuse(
            (of["accumulate"] or of["shard_batch"])[0],
            f"of a batch of {step.num_samples} samples, which has no such parts",
        )
    held = {rule.op for rule in of["shard_states"]}
    stage = next((n for n, what in HELD.items() if held == {what}), 0)
    layout = ClusterLayout(
        tensor=degree("shard_tensor"),
        pipeline=pipeline,
        data=data,
        micro_batches=micro_batches,
        virtual=virtual if stages else 1,
        state_stage=stage,
        overlaps=bool(of["overlap"]),
        far_states=bool(of["offload_state"]),
    )
    if layout.num_ranks > search.num_devices:
        raise Mismatch(
            f"the plan lies on {layout.num_ranks} ranks, and the cluster has {search.num_devices}",
            expected="no more ranks than devices",
            remedy="lower a degree, or declare a larger cluster",
        )
    moves = of["offload_state"] or of["offload"]
    if moves and not search.leads_to_hosts(layout):
        _refuse(moves[0], "and the cluster says of no memory of hosts, or of no link there")
    return layout


def _stages(
    rules: Sequence[Rule], layout: ClusterLayout, step: RuleContext
) -> tuple[tuple[tuple[ActivationPolicy, int], ...], ...]:
    fates = _fates(rules, step)
    found: list[Counter[ActivationPolicy]] = [Counter() for _ in range(layout.pipeline)]
    begin = 0
    for run, end in enumerate([*_ends(rules, step.blocks), step.blocks.count]):
        found[run % layout.pipeline].update(fates[begin:end])
        begin = end
    return tuple(tuple(own.items()) for own in found)


def _ends(rules: Iterable[Rule], blocks: Blocks) -> list[int]:
    """After how many blocks each stage but the last ends."""
    ends = []
    for rule in rules:
        if rule.trade == "shard_pipeline":
            number = rule.module.removeprefix(f"{blocks.path}.")
            if not number.isdigit() or not 0 <= int(number) - blocks.first < blocks.count - 1:
                _refuse(rule, f"which is behind no block of {blocks.path} that others follow")
            ends.append(int(number) - blocks.first + 1)
    return sorted(ends)


def _fates(rules: Iterable[Rule], step: RuleContext) -> list[ActivationPolicy]:
    """Of each block."""
    again: list[list[CallSite]] = [[] for _ in range(step.blocks.count)]
    moved: list[list[CallSite]] = [[] for _ in range(step.blocks.count)]
    for rule in rules:
        if rule.trade in _FATES:
            for number, inside in _named(rule, step.blocks):
                spots = again if rule.trade == "recompute" else moved
                spots[number].append(CallSite(inside, rule.op, rule.nth))
    found, known = [], _OffloadedOfBlock(step)
    for number, (made, sent) in enumerate(zip(again, moved, strict=True)):
        fate = ActivationPolicy(again=tuple(sorted(made, key=str)), moved=bool(sent))
        if sent and Counter(sent) != known[fate]:
            raise Mismatch(
                f"the plan moves {len(sent)} values of block {number + step.blocks.first}, and "
                f"{known[fate].total()} of it are kept",
                expected="all of them or none, as is reckoned with for devices that are not here",
                remedy="complete the [[offload]] rules of that block, or leave them out",
            )
        found.append(fate)
    return found


class _OffloadedOfBlock(dict[ActivationPolicy, Counter[CallSite]]):
    """What is moved of a block of each fate."""

    def __init__(self, step: RuleContext) -> None:
        self._step = step

    def __missing__(self, fate: ActivationPolicy) -> Counter[CallSite]:
        self[fate] = Counter(calls_moved(self._step.graph, self._step.blocks, fate.again))
        return self[fate]


def _named(rule: Rule, blocks: Blocks) -> Iterator[tuple[int, str]]:
    """The blocks that a rule is of, by their number, and the module inside them."""
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
    what = " ".join(part for part in (rule.op, rule.module) if part)
    said = f"{rule.trade} of {what or rule.degree}"
    raise Mismatch(
        f"the plan says {said}, {why}",
        expected="rules as steelyard plan --cluster writes them",
        remedy="take the edit back, or plan again for this cluster",
    )
