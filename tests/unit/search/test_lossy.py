"""Values that may lose accuracy never make a plan slower, and if no value may, plans do not
change."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from steelyard.hardware.cluster import OFFLOAD_IN, OFFLOAD_OUT, Device, Link
from steelyard.ir.graph import Graph
from steelyard.ir.metrics import Estimate
from steelyard.ir.program import Program
from steelyard.ir.rule import CallSite, spots
from steelyard.plans.budget import Budget
from steelyard.plans.trade import apply_rules
from steelyard.predict import predict
from steelyard.predict.cost_table import CostTable, OperatorCost
from steelyard.search import StepSearch
from steelyard.search.single.estimator.fast_estimator import FastEstimator
from steelyard.search.single.lower_bound import least_seconds
from steelyard.search.single.min_cut import MinCut
from steelyard.trades import TRADES
from steelyard.trades.quantize_activations import QuantizeActivations, quantizable, with_codes
from steelyard.trades.recompute import recomputable
from tests.support.graphs import Whole, in_floats, random_step, tower

DEVICE = Device(kind="made up", flops_per_second=1e9, bytes_per_second=1e8, memory_bytes=1 << 30)
LINK = Link(kind="made up", latency_seconds=0.0, bytes_per_second=1e6)
EXACT = tuple(trade for trade in TRADES if trade.is_exact)


def searching(
    graph: Graph, *, lossy: bool = True, trades: Any = TRADES, costs: CostTable | None = None
) -> StepSearch:
    plain = Program.plain(graph)
    able = quantizable(plain)
    allowed = frozenset(s for s, name in spots(graph).items() if name in able)
    return StepSearch(
        plain,
        trades=trades,
        source=Whole(graph),
        costs=costs or CostTable(device=DEVICE),
        lossy=allowed if lossy else frozenset[CallSite](),
    )


def budgets(search: StepSearch, count: int = 5) -> list[Budget]:
    explored = search.explored()
    low, high = explored.least.peak_bytes, explored.plain.peak_bytes
    return [Budget(memory_bytes=low + (high - low) * k // (count - 1)) for k in range(count)]


@pytest.mark.parametrize("far", [False, True])
@pytest.mark.parametrize("graph", [in_floats(tower(5)), in_floats(random_step(4, num_values=14))])
def test_exact_budgets_give_the_plans_without_the_lossy_trade(graph: Graph, far: bool) -> None:
    links = {OFFLOAD_OUT: LINK, OFFLOAD_IN: LINK} if far else {}
    costs = CostTable(device=DEVICE, links=links, offload_bytes=1 << 40 if far else 0)
    with_it = searching(graph, lossy=False, costs=costs)
    without = searching(graph, lossy=False, trades=EXACT, costs=costs)
    assert with_it.explored().trials == without.explored().trials
    for budget in (Budget(), *budgets(without)):
        ours, theirs = with_it.find(budget), without.find(budget)
        assert ours.rules == theirs.rules
        assert ours.prediction == theirs.prediction
        assert (ours.taken, ours.frontier, ours.gap) == (theirs.taken, theirs.frontier, theirs.gap)
        (refusal,) = (r for r in ours.refused if r.trade == "quantize_activations")
        assert [r for r in ours.refused if r is not refusal] == list(theirs.refused)
        assert "alone would save ~" in refusal.reason
        assert refusal.reason.endswith("but is lossy and the accuracy budget is 0")
        assert ours.num_offers == theirs.num_offers + 1


def test_a_barred_lossy_trade_states_the_given_reason() -> None:
    found = searching(in_floats(tower(5)), lossy=False).find(Budget(), barred="rains too much")
    (refusal,) = found.why_not("quantize_activations")
    assert refusal.reason.endswith(" KiB, but rains too much")


def dear(graph: Graph) -> CostTable:
    """Return costs with which recomputing takes long, and encoding to 8 bits takes next to
    nothing."""
    quick = {"steelyard.encode8.default", "steelyard.decode8.default"}
    plain = Program.plain(graph)
    nodes = with_codes(plain, quantizable(plain)).graph.nodes
    return CostTable(
        device=DEVICE,
        operators={
            n.signature: OperatorCost(
                seconds=Estimate.exactly(1e-6 if n.op in quick else 1e-2), workspace_bytes=0
            )
            for n in nodes
            if not n.is_free
        },
    )


def test_values_expensive_to_recompute_are_quantized() -> None:
    graph = in_floats(tower(6))
    costs = dear(graph)
    lossy, exact = searching(graph, costs=costs), searching(graph, lossy=False, costs=costs)
    assert lossy.explored().least.peak_bytes < exact.explored().least.peak_bytes
    budget = budgets(exact)[2]
    found, without = lossy.find(budget), exact.find(budget)
    rules = [r for r in found.rules if r.trade == "quantize_activations"]
    assert rules
    assert found.prediction.metrics.accuracy_loss == "unknown"
    assert (
        found.prediction.metrics.step_seconds.value < without.prediction.metrics.step_seconds.value
    )
    taken = [t for t in found.taken if t.trade == "quantize_activations"]
    assert sum(r.count for t in taken for r in t.rules) == sum(r.count for r in rules)
    assert all(t.buys_bytes >= 0 for t in taken)
    assert "keep it in 8 bits" in str(found.gap)
    words = {p.accuracy_loss for p in found.frontier}
    assert words == {"exact", "unknown"}
    applied = apply_rules(Program.plain(graph), found.rules, trades=TRADES, source=Whole(graph))
    assert predict(applied, costs) == found.prediction


def test_only_allowed_values_are_quantized() -> None:
    graph = in_floats(tower(6))
    costs, plain = dear(graph), Program.plain(graph)
    allowed = frozenset({CallSite("blocks.2", "aten.gelu", 0)})
    search = StepSearch(plain, trades=TRADES, source=Whole(graph), costs=costs, lossy=allowed)
    found = search.find(budgets(search)[1])
    for point in found.frontier:
        coded = [r for r in point.rules if r.trade == "quantize_activations"]
        assert {(r.module, r.op, r.count) for r in coded} <= {("blocks.2", "aten.gelu", 1)}
    offers = [o for o in search.offers if o.trade == "quantize_activations"]
    assert sum(r.count for o in offers for r in o.rules) == 1


def test_the_bound_is_below_every_plan_that_was_found() -> None:
    for seed in range(4):
        graph = in_floats(random_step(seed, num_values=9))
        plain = Program.plain(graph)
        costs = dear(graph)
        tally = FastEstimator(plain, costs, recomputable(graph), quantizable=quantizable(plain))
        cut = MinCut(tally)
        for point in searching(graph, costs=costs).explored().chain:
            bound = least_seconds(
                tally, cut, limit_bytes=point.peak_bytes, within_seconds=point.seconds
            )
            assert tally.plain_seconds <= bound <= point.seconds * (1 + 1e-9)


def test_choices_are_carried_to_another_trace() -> None:
    from steelyard.search.single.step_plans import choices_in_trace

    graph = in_floats(tower(4))
    plain = Program.plain(graph)
    tallies = [
        FastEstimator(plain, dear(graph), recomputable(graph), quantizable=quantizable(plain))
        for plain in (plain, replace(plain))
    ]
    ours, theirs = tallies
    first, *rest = sorted(ours.quantizable)
    choice = frozenset({ours.quantize_choice(first), *sorted(set(ours.unit_of) & set(rest))[:1]})
    assert choices_in_trace(ours, choice, theirs) == choice


def test_quantize_activations_declares_its_amounts() -> None:
    assert QuantizeActivations.pays == ("accuracy", "computation")
    assert not QuantizeActivations.is_exact
