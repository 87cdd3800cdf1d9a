"""A layout of a deep model as the rules of a plan file.

From a capture of three blocks: what is said of the middle one holds for all. Not for choosing the
layout: see search.py.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial

from steelyard.ir.cluster_layout import Blocks, ClusterLayout
from steelyard.ir.graph import Graph, OutputKind, path_matches
from steelyard.ir.placement import Shard
from steelyard.ir.rule import CallSite, Rule
from steelyard.ir.sharding_choice import Region
from steelyard.predict.analytic.node_assignment import MIDDLE
from steelyard.predict.analytic.saved_activations import kept_calls
from steelyard.search.cluster.search import ClusterPlan
from steelyard.search.cluster.stage_assignment import ActivationPolicy, RecomputeSet

# What goes at a time, of gradients: what stock data parallelism sends.
_BUCKET_BYTES = 25 * 2**20
# What is in shares, by ZeRO's stages; with the weights, all that is theirs is.
HELD = {1: "optimizer", 2: "gradient", 3: ""}


def to_rules(
    laid: ClusterPlan, graph: Graph, regions: Sequence[Region], blocks: Blocks
) -> tuple[Rule, ...]:
    """``graph`` is that of three blocks on one device, ``regions`` are what is cut of it."""
    layout = laid.layout
    rules: list[Rule] = []
    if layout.data > 1:
        rules.append(Rule(trade="shard_batch", degree=layout.data, bucket_bytes=_BUCKET_BYTES))
    if layout.overlaps:
        rules.append(Rule(trade="overlap", lag=1))
    if layout.tensor > 1:
        rules += _cut(regions, blocks, layout.tensor)
    if layout.state_stage:
        rules += _shared(graph, blocks, layout.data, HELD[layout.state_stage])
    if layout.micro_batches > 1:
        rules.append(Rule(trade="accumulate", degree=layout.micro_batches))
    if layout.pipeline > 1:
        rules += [
            Rule(
                trade="shard_pipeline",
                degree=layout.pipeline,
                op=layout.schedule,
                module=f"{blocks.path}.{blocks.first + end - 1}",
            )
            for end in _ends(laid)
        ]
    if layout.far_states:
        rules += _far(graph, blocks)
    rules += _fates(laid, blocks, partial(_of_block, graph, blocks))
    return tuple(sorted(rules))


def _cut(regions: Sequence[Region], blocks: Blocks, ranks: int) -> Iterator[Rule]:
    named = {
        key.partition(":")[2]: lies
        for region in regions
        for key, lies in region.inputs
        if isinstance(lies, Shard)
    }
    for pattern, count, name in _patterns(named, blocks):
        yield Rule(
            trade="shard_tensor", module=pattern, degree=ranks, count=count,
            dim=named[name].dim, groups=named[name].groups,
        )  # fmt: skip


def _shared(graph: Graph, blocks: Blocks, ranks: int, held: str) -> Iterator[Rule]:
    names = [o.target.partition(":")[2] for o in graph.outputs if o.kind is OutputKind.GRADIENT]
    for pattern, count, _ in _patterns(names, blocks):
        yield Rule(trade="shard_states", module=pattern, degree=ranks, count=count, op=held)


def _far(graph: Graph, blocks: Blocks) -> Iterator[Rule]:
    names = [o.target.partition(":")[2] for o in graph.outputs if o.kind is OutputKind.GRADIENT]
    for pattern, count, _ in _patterns(names, blocks):
        yield Rule(trade="offload_state", module=pattern, op=HELD[1], count=count)


def _patterns(
    names: Sequence[str] | dict[str, Shard], blocks: Blocks
) -> Iterator[tuple[str, int, str]]:
    """Each with how many tensors of the whole model it names, and one of these."""
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


def _ends(laid: ClusterPlan) -> list[int]:
    """After how many blocks each stage but the last ends; runs go around the ranks in turn."""
    layout = laid.layout
    counts = [sum(count for _, count in stage) // layout.virtual for stage in laid.stages]
    so_far, ends = 0, []
    for count in counts * layout.virtual:
        so_far += count
        ends.append(so_far)
    return ends[:-1]


def _fates(
    laid: ClusterPlan, blocks: Blocks, to_rules: Callable[[ActivationPolicy], Sequence[Rule]]
) -> list[Rule]:
    """``to_rules`` a fate name calls by modules inside a block."""
    fates = {fate for stage in laid.stages for fate, _ in stage}
    said = {fate: to_rules(fate) for fate in fates}
    if len(fates) == 1 and blocks.first == 0:
        (own,) = said.values()
        return [
            replace(rule, module=_within(f"{blocks.path}.*", rule.module), count=blocks.count)
            for rule in own
        ]
    return [
        replace(rule, module=_within(f"{blocks.path}.{blocks.first + number}", rule.module))
        for number, fate in by_block(laid)
        for rule in said[fate]
    ]


def _of_block(graph: Graph, blocks: Blocks, fate: ActivationPolicy) -> list[Rule]:
    found = [("recompute", spot) for spot in fate.again]
    if fate.moved:
        found += [("offload", spot) for spot in calls_moved(graph, blocks, fate.again)]
    return [
        Rule(trade=trade, module=spot.module, op=spot.op, nth=spot.nth) for trade, spot in found
    ]


def calls_moved(graph: Graph, blocks: Blocks, again: RecomputeSet) -> Iterator[CallSite]:
    """All that a block keeps beside what is computed again, by modules inside it."""
    head = f"{blocks.path}.{blocks.first + MIDDLE}"
    layout = ClusterLayout(again=again)
    for spot in kept_calls(graph, layout, blocks=blocks.path, first=blocks.first):
        yield replace(spot, module=spot.module.removeprefix(head).removeprefix("."))


def _within(block: str, module: str) -> str:
    return f"{block}.{module}" if module else block


def by_block(laid: ClusterPlan) -> Iterator[tuple[int, ActivationPolicy]]:
    """The blocks of each stage, one run of them after another."""
    layout = laid.layout
    begin = 0
    kinds = [[fate for fate, count in stage for _ in range(count)] for stage in laid.stages]
    for run in range(layout.virtual):
        for stage in kinds:
            each = len(stage) // layout.virtual
            for place in range(each):
                yield begin + place, stage[run * each + place]
            begin += each
