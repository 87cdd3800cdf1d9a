"""The rules of an explored plan: recompute, 8-bit activations and offload within one variant.

Not for the rules of the variant itself: see variant.py.
"""

from collections.abc import Mapping, Sequence

from steelyard.ir.graph import Graph
from steelyard.ir.rule import Rule, to_rules
from steelyard.ir.rule_kinds import Recomputation, ValueCodec, ValueOffload
from steelyard.plans.trade import Trade, rule_type
from steelyard.search.pareto_front import Point
from steelyard.search.single.step_plans import Explored


def plan_rules(explored: Explored, point: Point, trades: Sequence[Trade]) -> tuple[Rule, ...]:
    """Return the rules for recompute, 8-bit quantization and offload within the variant."""
    graph = explored.estimator.program.graph
    recomputed, quantized = explored.recomputed(point), explored.quantized(point)
    offloaded, rules = explored.offloaded(point), list[Rule]()
    if recomputed:
        rules += recompute_rules(graph, recomputed, rule_type(trades, Recomputation))
    if quantized:
        rules += to_rules(graph, quantized, rule_type(trades, ValueCodec))
    if offloaded:
        offload, counts = rule_type(trades, ValueOffload), explored.slice_counts(point)
        rules += _offload_rules(graph, offloaded, counts, offload)
    return tuple(rules)


def recompute_rules(
    graph: Graph, times: Mapping[str, int], rule: type[Recomputation]
) -> tuple[Recomputation, ...]:
    """Return rules that recompute each of these values at most the given number of times."""
    return tuple(
        found
        for number in sorted(set(times.values()))
        for found in to_rules(
            graph, (v for v, count in times.items() if count == number), rule, times=number
        )
    )


def _offload_rules(
    graph: Graph,
    offloaded: Mapping[str, tuple[int, int]],
    slices: Mapping[str, int],
    offload: type[ValueOffload],
) -> tuple[ValueOffload, ...]:
    by_timing: dict[tuple[int, int, int], list[str]] = {}
    for value, lag_and_lead in offloaded.items():
        by_timing.setdefault((*lag_and_lead, slices.get(value, 0)), []).append(value)
    return tuple(
        rule
        for (lag, lead, count), values in sorted(by_timing.items())
        for rule in to_rules(graph, values, offload, lag=lag, lead=lead, slices=count)
    )
