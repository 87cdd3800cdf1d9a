"""Plans of captured models: within the budget, and priced like the applied program."""

from __future__ import annotations

import pytest

from steelyard.ir.graph import Role
from steelyard.ir.program import Program
from steelyard.plans.budget import Budget
from steelyard.plans.trade import apply_rules
from steelyard.predict import predict
from steelyard.search import StepSearch
from steelyard.trades.recompute import Recompute
from tests.support.declared import costs
from tests.support.short_search import looking_less_far
from tests.unit.graphs.stored import names, stored_graph, stored_step

_ZOO = [name for name in names() if name.startswith("zoo-")]


@looking_less_far()
@pytest.mark.parametrize("name", _ZOO)
def test_plans_fit_their_budget_and_are_priced_as_the_program_they_make(name: str) -> None:
    source, trades = stored_step(name), (Recompute(),)
    plain = Program.plain(source.graph(micro_batches=1))
    search = StepSearch(plain, trades=trades, source=source, costs=costs())
    least, most = search.explored().least.peak_bytes, search.explored().plain.peak_bytes
    assert least <= most
    seconds = []
    for share in (0, 0.4, 1):
        limit = int(least + share * (most - least))
        found = search.find(Budget(memory_bytes=limit))
        program = apply_rules(plain, found.rules, trades=trades, source=source)
        assert program.problems() == []
        assert predict(program, costs()) == found.prediction
        assert found.prediction.peak.nbytes <= limit
        seconds.append(found.prediction.metrics.step_seconds.value)
    assert seconds == sorted(seconds, reverse=True), "more memory made a plan slower"


@pytest.mark.parametrize("name", _ZOO)
def test_a_stored_step_and_its_update_are_valid_programs(name: str) -> None:
    plain = stored_step(name).plain
    assert plain.graph.problems() == []
    assert plain.problems() == []
    assert plain.update is not None
    assert plain.update.graph.resident_bytes(Role.STATE) > plain.graph.resident_bytes(
        Role.PARAMETER
    )


def test_a_tensor_parallel_rank_holds_and_computes_less_and_exchanges_the_rest() -> None:
    whole, rank = stored_graph("published-gpt"), stored_graph("published-gpt-on-2")
    assert rank.problems() == []
    assert sum(n.flops for n in rank.nodes) < 0.6 * sum(n.flops for n in whole.nodes)
    assert rank.resident_bytes(Role.PARAMETER) < 0.6 * whole.resident_bytes(Role.PARAMETER)
    assert any(node.collective for node in rank.nodes)
    alone, together = (predict(Program.plain(graph), costs()).metrics for graph in (whole, rank))
    assert together.computation_seconds.value < 0.7 * alone.computation_seconds.value
    assert together.communication_bytes.value > 0 == alone.communication_bytes.value
