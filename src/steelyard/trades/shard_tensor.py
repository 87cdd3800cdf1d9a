"""Shard tensors: tensor parallelism, in which ranks have shards of weights and compute parts of
values.

Columns, rows, heads, channels, experts or the vocabulary can be sharded: any region that the graph
allows (see capture/spmd/shardable_regions.py). Collectives are inserted where an operator needs a
whole value or a complete sum. Gradients and optimizer state are sharded like the weights. The trade
is applied before the other trades that change the graph, which then work on shards. Not for
choosing regions: see search/.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

from steelyard.errors import BadInput, Mismatch
from steelyard.ir.graph import Graph, Role, path_matches
from steelyard.ir.parallel_layout import TENSOR
from steelyard.ir.placement import Placement, Shard
from steelyard.ir.program import Program
from steelyard.ir.rule import Rule, pattern_of
from steelyard.ir.rule_kinds import TensorSharding
from steelyard.ir.sharding_choice import Region, ShardingChoice
from steelyard.ir.step_source import StepSource
from steelyard.plans.trade import Offer, Rejection


@dataclass(frozen=True, kw_only=True)
class ShardTensorRule(TensorSharding):
    """``[[shard_tensor]]``: the dim along which a parameter is sharded, in equal ``groups``."""

    trade: str = field(init=False, default="shard_tensor")


class ShardTensor:
    """Pays communication, buys computation and memory. Sums are computed in another order."""

    name: ClassVar[str] = ShardTensorRule.trade
    pays: ClassVar[tuple[str, ...]] = ("communication",)
    buys: ClassVar[tuple[str, ...]] = ("computation", "memory")
    is_exact: ClassVar[bool] = True
    is_bitwise: ClassVar[bool] = False
    rule: ClassVar[type[Rule]] = ShardTensorRule

    def offers(
        self, program: Program, source: StepSource
    ) -> tuple[tuple[Offer, ...], tuple[Rejection, ...]]:
        """Offer each region over the tensor-parallel ranks; regions of equal blocks share an offer.

        Regions that exchange the fewest bytes for their FLOPs come first.
        """
        ranks = program.layout.tensor
        if ranks == 1:
            return (), ()
        reason = program.update.unshardable if program.update is not None else ""
        by_pattern: dict[tuple[tuple[str, Placement], ...], list[Region]] = {}
        if not reason:
            try:
                regions = source.regions(program.graph, num_ranks=ranks)
            except BadInput as refused:  # this torch has no rules for the operator
                regions, reason = (), refused.happened
            for region in regions:
                pattern = tuple(
                    (pattern_of(name.partition(":")[2], program.graph.runs), placement)
                    for name, placement in region.inputs
                )
                by_pattern.setdefault(pattern, []).append(region)
            if not by_pattern:
                reason = reason or "no operators form a region that can be sharded"
        if reason:
            label = f"tensors over {ranks} ranks"
            return (), (Rejection(trade=self.name, label=label, reason=reason),)
        cheapest = sorted(by_pattern.values(), key=_exchanged_bytes_per_flop)
        return tuple(_offer(program.graph, regions, ranks) for regions in cheapest), ()

    def rewrite(
        self, program: Program, rules: Sequence[ShardTensorRule], source: StepSource
    ) -> Program:
        ranks = program.layout.tensor
        if not rules or ranks == 1:
            return program
        assert not program.recomputed, "shard_tensor changes the graph, so it is applied early"
        if program.update is not None and program.update.unshardable:
            raise Mismatch(
                f"the plan shards weights, but {program.update.unshardable}",
                expected="an optimizer that updates each element from its own gradient and state",
                remedy="remove the shard_tensor rules from the plan, or plan again",
            )
        choice = ShardingChoice(
            axis=TENSOR, num_ranks=ranks, inputs=tuple(_placements(program.graph, rules))
        )
        rank = program.layout.place(program.rank, TENSOR)
        graph = source.in_parts(program.graph, choice, rank=rank)
        update = program.update
        if update is not None:
            update = source.update_in_parts(update, (choice,))
        return replace(program.with_graph(graph), shardings=(choice,), update=update)


def _exchanged_bytes_per_flop(regions: Sequence[Region]) -> float:
    return sum(r.exchanged_bytes for r in regions) / max(sum(r.flops for r in regions), 1)


def _offer(graph: Graph, regions: Sequence[Region], ranks: int) -> Offer:
    by_pattern: dict[tuple[str, Shard], list[str]] = {}
    for region in regions:
        for key, placement in region.inputs:
            name = key.partition(":")[2]
            if isinstance(placement, Shard):
                pattern = pattern_of(name, graph.runs)
                by_pattern.setdefault((pattern, placement), []).append(name)
    rules = []
    for (pattern, shard), names in by_pattern.items():
        # If only some of the equal blocks can be sharded, these are named one by one.
        is_all = len(names) == sum(path_matches(n, pattern) for n in _tensors(graph).values())
        for module, count in [(pattern, len(names))] if is_all else [(n, 1) for n in names]:
            rules.append(
                ShardTensorRule(
                    ranks=ranks, parameter=module, dim=shard.dim, groups=shard.groups, count=count
                )
            )  # fmt: skip
    (name_pattern, shard), path = next(iter(by_pattern)), pattern_of(regions[0].path, graph.runs)
    place = f"{path or 'the model'}{f' ({len(regions)})' if len(regions) > 1 else ''}"
    sharding = f"{name_pattern.removeprefix(f'{path}.')} by dim {shard.dim}"
    return Offer(trade=ShardTensor.name, label=f"{place}: {sharding}", rules=tuple(rules))


def _tensors(graph: Graph) -> dict[str, str]:
    """Return the names of the model's tensors, by the names of their graph inputs."""
    return {
        node.name: node.name.partition(":")[2]
        for node in graph.inputs()
        if node.outputs
        and graph.storages[node.outputs[0].storage].role in (Role.PARAMETER, Role.BUFFER)
    }


def _placements(graph: Graph, rules: Iterable[ShardTensorRule]) -> list[tuple[str, Placement]]:
    """Return the graph inputs that the rules name, with their placements."""
    names = _tensors(graph)
    placements: dict[str, Placement] = {}
    for rule in rules:
        found = [key for key, name in names.items() if path_matches(name, rule.parameter)]
        if len(found) != rule.count:
            raise Mismatch(
                f"shard_tensor rule for {rule.parameter} matches {len(found)} tensors of this "
                "model",
                expected=f"{rule.count}, as in the plan",
                remedy="plan again for this model, or edit parameter or count of that rule",
            )
        for key in found:
            if key in placements:
                raise Mismatch(
                    f"{names[key]} is sharded by two shard_tensor rules",
                    expected="one rule for each tensor",
                    remedy="remove one of them from the plan",
                )
            placements[key] = Shard(rule.dim, rule.groups)
    return list(placements.items())
