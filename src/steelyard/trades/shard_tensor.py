"""Shard tensors: ranks hold parts of the same weights and compute parts of the same values.

Columns, rows, heads, channels, experts, a vocabulary: whatever the graph shows to go together (see
capture/spmd/shardable_regions.py), exchanged where a whole value or a sum is read. A part of the
weights is a part of their gradients and of what the optimizer keeps. Applied before what else
changes the graph, which then works on parts. Not for which regions: see search/.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Annotated, ClassVar

from pydantic import Field

from steelyard.errors import Mismatch
from steelyard.ir.graph import Graph, Role, path_matches
from steelyard.ir.parallel_layout import TENSOR
from steelyard.ir.placement import Placement, Shard
from steelyard.ir.program import Program
from steelyard.ir.rule import Rule, pattern_of
from steelyard.ir.sharding_choice import Region, ShardingChoice
from steelyard.ir.step_source import StepSource
from steelyard.plans.rule_table import (
    MOST_PARAMETERS,
    OMITTED,
    Parameter,
    Positive,
    Ranks,
    RuleTable,
)
from steelyard.plans.trade import Offer, Rejection


class ShardTensorTable(RuleTable):
    """``[[shard_tensor]]``: the dim along which a parameter is cut, in ``groups`` of equal size."""

    most: ClassVar[int] = MOST_PARAMETERS

    degree: Ranks
    module: Parameter
    dim: Annotated[int, Field(ge=0, le=63)]
    groups: Annotated[Positive, OMITTED] = 1
    count: Positive = 1


class ShardTensor:
    """Pays communication, buys computation and memory. Sums are added up in another order."""

    name: ClassVar[str] = "shard_tensor"
    pays: ClassVar[tuple[str, ...]] = ("communication",)
    buys: ClassVar[tuple[str, ...]] = ("computation", "memory")
    is_exact: ClassVar[bool] = True
    is_bitwise: ClassVar[bool] = False
    table: ClassVar[type[RuleTable]] = ShardTensorTable

    def offers(
        self, program: Program, source: StepSource
    ) -> tuple[tuple[Offer, ...], tuple[Rejection, ...]]:
        """Each region, those of equal blocks together, among the ranks that tensors lie on; first
        those which exchange least for what is computed."""
        ranks = program.layout.tensor
        if ranks == 1:
            return (), ()
        reason = program.update.unparted if program.update is not None else ""
        by_pattern: dict[tuple[tuple[str, Placement], ...], list[Region]] = {}
        if not reason:
            for region in source.regions(program.graph, num_ranks=ranks):
                pattern = tuple(
                    (pattern_of(name.partition(":")[2], program.graph.runs), lies)
                    for name, lies in region.inputs
                )
                by_pattern.setdefault(pattern, []).append(region)
            reason = "" if by_pattern else "no operators go together that could work on parts"
        if reason:
            label = f"tensors among {ranks} ranks"
            return (), (Rejection(trade=self.name, label=label, reason=reason),)
        cheapest = sorted(by_pattern.values(), key=_exchanged_for_flops)
        return tuple(_offer(program.graph, regions, ranks) for regions in cheapest), ()

    def rewrite(self, program: Program, rules: Sequence[Rule], source: StepSource) -> Program:
        ranks = program.layout.tensor
        if not rules or ranks == 1:
            return program
        assert not program.again, "shard_tensor changes the graph, so it is applied early"
        if program.update is not None and program.update.unparted:
            raise Mismatch(
                f"the plan cuts weights, and {program.update.unparted}",
                expected="an optimizer that changes each element by its own gradient and state",
                remedy="take the shard_tensor rules out of the plan, or plan again",
            )
        choice = ShardingChoice(
            axis=TENSOR, num_ranks=ranks, inputs=tuple(_named(program.graph, rules))
        )
        rank = program.layout.place(program.rank, TENSOR)
        graph = source.in_parts(program.graph, choice, rank=rank)
        update = program.update
        if update is not None:
            update = source.update_in_parts(update, (choice,))
        return replace(program.with_graph(graph), partings=(choice,), update=update)


def _exchanged_for_flops(regions: Sequence[Region]) -> float:
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
    for (pattern, lies), names in by_pattern.items():
        # Where not all of the equal blocks can be cut, each is named.
        is_all = len(names) == sum(path_matches(n, pattern) for n in _tensors(graph).values())
        for said, count in [(pattern, len(names))] if is_all else [(n, 1) for n in names]:
            rules.append(
                Rule(
                    trade=ShardTensor.name, module=said, degree=ranks, dim=lies.dim,
                    groups=lies.groups, count=count,
                )
            )  # fmt: skip
    (seed, lies), path = next(iter(by_pattern)), pattern_of(regions[0].path, graph.runs)
    where = f"{path or 'the model'}{f' ({len(regions)})' if len(regions) > 1 else ''}"
    way = f"{seed.removeprefix(f'{path}.')} by dim {lies.dim}"
    return Offer(trade=ShardTensor.name, label=f"{where}: {way}", rules=tuple(rules))


def _tensors(graph: Graph) -> dict[str, str]:
    """The names of the model's tensors, by those of the inputs that they are."""
    return {
        node.name: node.name.partition(":")[2]
        for node in graph.inputs()
        if node.outputs
        and graph.storages[node.outputs[0].storage].role in (Role.PARAMETER, Role.BUFFER)
    }


def _named(graph: Graph, rules: Iterable[Rule]) -> list[tuple[str, Placement]]:
    """The inputs that the rules name, and how each lies."""
    names = _tensors(graph)
    lies: dict[str, Placement] = {}
    for rule in rules:
        found = [key for key, name in names.items() if path_matches(name, rule.module)]
        if len(found) != rule.count:
            raise Mismatch(
                f"shard_tensor rule for {rule.module} matches {len(found)} tensors of this model",
                expected=f"{rule.count}, as the plan says",
                remedy="plan again for this model, or edit parameter or count of that rule",
            )
        for key in found:
            if key in lies:
                raise Mismatch(
                    f"{names[key]} is cut by two shard_tensor rules",
                    expected="one rule for each tensor",
                    remedy="take one of them out of the plan",
                )
            lies[key] = Shard(rule.dim, rule.groups)
    return list(lies.items())
