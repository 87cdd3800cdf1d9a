"""The recompute trade on artificial graphs: its programs, its offers and its refusals."""

import random
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from steelyard.errors import Mismatch
from steelyard.hardware.cluster import Device
from steelyard.ir.graph import Graph, Phase
from steelyard.ir.program import Program
from steelyard.ir.rule import matching, to_rules
from steelyard.passes.recompute_copies import starts
from steelyard.predict import peak_bytes, step_seconds
from steelyard.predict.cost_table import CostTable
from steelyard.trades.recompute import Recompute, RecomputeRule, recomputable, with_copies
from tests.support.graphs import Whole, random_step

COSTS = CostTable(
    device=Device(kind="made up", flops_per_second=1e9, bytes_per_second=1e8, memory_bytes=1 << 30)
)
seeds = st.integers(min_value=0, max_value=10**6)


def some(values: frozenset[str], seed: int) -> frozenset[str]:
    rng = random.Random(seed)
    share = rng.random()
    return frozenset(v for v in sorted(values) if rng.random() < share)


@settings(deadline=None)
@given(seeds)
def test_a_rewrite_is_a_valid_program_with_the_same_sinks(seed: int) -> None:
    graph = random_step(seed)
    plain = Program.plain(graph)
    before = plain.instructions
    program = with_copies(plain, some(recomputable(graph), seed))
    assert program.problems() == []
    assert plain.instructions is before
    sinks = sorted((i.node, i.sink.kind, i.sink.target) for i in program.instructions if i.sink)
    assert sinks == sorted((i.node, i.sink.kind, i.sink.target) for i in before if i.sink)
    originals = [i.node for i in program.instructions if i.sink is None and not i.is_recomputed]
    assert originals == [i.node for i in before if i.sink is None]


@settings(deadline=None)
@given(seeds)
def test_a_value_is_recomputed_at_most_once_for_the_backward_pass(seed: int) -> None:
    graph = random_step(seed)
    values = some(recomputable(graph), seed)
    program = with_copies(Program.plain(graph), values)
    nodes = [i.node for i in program.recomputed]
    assert len(nodes) == len(set(nodes))
    assert {i.phase for i in program.recomputed} <= {Phase.BACKWARD}
    for instruction in program.recomputed:
        node = graph.by_name[instruction.node]
        assert not node.is_random
        has_results = {u for u in graph.users[node.name] if graph.by_name[u].is_getitem}
        assert node.name in values or has_results & values or node.is_view
    late = [i for i in program.instructions if i.phase is Phase.BACKWARD and i.sink is None]
    read = {name for i in late for name in i.inputs}
    assert not read & values, "a backward line still reads a value that is made again"


@settings(deadline=None)
@given(seeds)
def test_repeated_recomputation_serves_the_reads_after_the_longest_gaps(
    seed: int,
) -> None:
    graph = random_step(seed, num_values=14)
    values = some(recomputable(graph), seed)
    plain = Program.plain(graph)
    once = with_copies(plain, values)
    times = {v: 2 + (seed + number) % 3 for number, v in enumerate(sorted(values))}
    program = with_copies(plain, values, times=times)
    assert program.problems() == []
    sinks = sorted((i.node, i.sink.kind, i.sink.target) for i in program.instructions if i.sink)
    assert sinks == sorted(
        (i.node, i.sink.kind, i.sink.target) for i in plain.instructions if i.sink
    )
    originals = [i.node for i in program.instructions if i.sink is None and not i.is_recomputed]
    assert originals == [i.node for i in plain.instructions if i.sink is None]
    made = Counter(i.node for i in program.recomputed)
    assert made.keys() == {i.node for i in once.recomputed}
    # An operator with several results is called as often as the result that is recomputed most
    # often.
    most = {v: max(times[u] for u in _siblings(graph, v) & values) for v in values}
    assert all(made[v] <= most[v] for v in values & made.keys())
    read = {name for i in program.instructions for name in i.inputs}
    for instruction in program.recomputed:
        node = graph.by_name[instruction.node]
        assert not node.is_random
        # If an operator has several results, a reader may need only some of them from a second
        # call.
        assert instruction.value in read or graph.users[node.name]
    late = [i for i in program.instructions if i.phase is Phase.BACKWARD and i.sink is None]
    assert not values & {name for i in late for name in i.inputs}


def _siblings(graph: Graph, value: str) -> set[str]:
    node = graph.by_name[value]
    return set(graph.users[node.inputs[0]]) if node.is_getitem else {value}


def test_a_recomputed_copy_is_freed_over_the_longest_gap() -> None:
    """The value is read late at lines 1, 2, 6 and, through a view that is read at 9, at 8."""
    reads = [(1, 1), (2, 2), (6, 6), (8, 9), (9, 9), (12, 12)]
    assert starts(reads, 1) == (1,)
    assert starts(reads, 2) == (1, 6)
    assert starts(reads, 3) == (1, 6, 12)
    assert starts(reads, 9) == (1, 2, 6, 8, 12)


@settings(deadline=None)
@given(seeds)
def test_seconds_never_fall_and_only_copies_are_paid(seed: int) -> None:
    graph = random_step(seed)
    plain = Program.plain(graph)
    program = with_copies(plain, some(recomputable(graph), seed))
    copies = sum(COSTS.seconds(graph.by_name[i.node]).value for i in program.recomputed)
    before, after = step_seconds(plain, COSTS).value, step_seconds(program, COSTS).value
    assert after == pytest.approx(before + copies)


@settings(deadline=None)
@given(seeds)
def test_rewriting_twice_is_rewriting_once_with_both(seed: int) -> None:
    graph = random_step(seed)
    values = recomputable(graph)
    first, second = some(values, seed), some(values, seed + 1)
    trade = Recompute()
    plain = Program.plain(graph)

    def applied(program: Program, chosen: frozenset[str]) -> Program:
        rules = to_rules(graph, chosen, RecomputeRule)
        return trade.rewrite(program, rules, Whole(graph))

    twice = applied(applied(plain, first), second)
    once = applied(plain, first | second)
    often = {v: 2 + len(v) % 2 for v in first}
    rules = tuple(
        replace(rule, times=times)
        for times in (2, 3)
        for rule in to_rules(graph, (v for v in first if often[v] == times), RecomputeRule)
    )
    program = trade.rewrite(plain, rules, Whole(graph))
    assert program.instructions == with_copies(plain, first, times=often).instructions
    # The second set may need a value that the first set requested in vain.
    assert {i.node for i in twice.recomputed} <= {i.node for i in once.recomputed}
    assert applied(once, first).instructions == once.instructions


def is_read_late(graph: Graph, name: str) -> bool:
    late = (i for i in Program.plain(graph).instructions if i.phase is Phase.BACKWARD)
    return any(name in i.inputs for i in late if i.sink is None)


def test_views_follow_their_recomputed_base() -> None:
    tried = 0
    for seed in range(100):
        graph = random_step(seed)
        values = recomputable(graph)
        for view in graph.forward():
            if view.op != "aten.view" or view.inputs[0] not in values:
                continue
            if is_read_late(graph, view.name):
                tried += 1
                plain, base = Program.plain(graph), view.inputs[0]
                again = with_copies(plain, {base})
                assert f"{view.name}.copy" in {i.value for i in again.instructions}
                kept = with_copies(plain, values - {base})
                assert f"{view.name}.copy" not in {i.value for i in kept.instructions}
    assert tried > 10


def test_an_operator_of_two_results_runs_again_once_for_both() -> None:
    for seed in range(200):
        graph = random_step(seed)
        pairs = [n for n in graph.forward() if len(n.outputs) == 2]
        for pair in pairs:
            results = set(graph.users[pair.name]) & recomputable(graph)
            program = with_copies(Program.plain(graph), results)
            again = [i.node for i in program.recomputed]
            if len(results & set(again)) == 2:
                assert again.count(pair.name) == 1
                places = [again.index(pair.name), *(again.index(r) for r in results)]
                assert max(places) - min(places) == 2, "both results are taken at once"
                return
    raise AssertionError("no graph here has an operator with two recomputable results")


def test_offers_cover_exactly_the_recomputable_values() -> None:
    for seed in range(30):
        graph = random_step(seed)
        program = Program.plain(graph)
        offers, _ = Recompute().offers(program, Whole(graph))
        offered = matching(graph, sorted({r for o in offers for r in o.rules}))
        assert offered == recomputable(graph)
        labels = [o.label for o in offers]
        assert len(labels) == len(set(labels))


def test_random_values_are_refused_with_the_reason() -> None:
    tried = 0
    for graph in map(random_step, range(60)):
        drawn = {n.name for n in graph.nodes if n.is_random}
        assert not drawn & recomputable(graph)
        if any(is_read_late(graph, name) for name in drawn):
            tried += 1
            _, refusals = Recompute().offers(Program.plain(graph), Whole(graph))
            assert any("random" in r.reason for r in refusals)
    assert tried > 10


def test_a_rule_for_a_value_that_cannot_be_recomputed_is_an_error() -> None:
    graph = random_step(3)
    never = next(n.name for n in graph.forward() if n.name == "loss")
    rules = to_rules(graph, {never}, RecomputeRule)
    with pytest.raises(Mismatch, match="cannot be recomputed"):
        Recompute().rewrite(Program.plain(graph), rules, Whole(graph))


def test_two_rules_with_different_times_for_a_value_are_refused() -> None:
    graph = random_step(3)
    value = min(recomputable(graph))
    plain, source = Program.plain(graph), Whole(graph)
    (once,) = to_rules(graph, {value}, RecomputeRule)
    twice = replace(once, times=2)
    Recompute().rewrite(plain, (once, once), source)
    with pytest.raises(Mismatch, match="two recompute rules name the same value") as error:
        Recompute().rewrite(plain, (once, twice), source)
    assert len(str(error.value).splitlines()) == 3


def test_values_overwritten_in_place_are_kept() -> None:
    graph = random_step(5)
    value = min(recomputable(graph))
    writer = next(n for n in graph.nodes if n.phase is Phase.BACKWARD)
    nodes = tuple(replace(n, mutates=(value,)) if n is writer else n for n in graph.nodes)
    written = Graph(
        nodes=nodes, storages=graph.storages, outputs=graph.outputs, decomposition="made up"
    )
    readers = {u for u in graph.users[value] if graph.by_name[u].phase is Phase.FORWARD}
    assert not recomputable(written) & readers


def test_no_rules_change_nothing() -> None:
    graph = random_step(1)
    program = Program.plain(graph)
    assert Recompute().rewrite(program, (), Whole(graph)) is program


def test_peak_falls_where_one_large_value_waits_for_the_backward_pass() -> None:
    better = 0
    for seed in range(40):
        graph = random_step(seed)
        plain = Program.plain(graph)
        before = peak_bytes(plain, COSTS)
        values = recomputable(graph)
        better += any(peak_bytes(with_copies(plain, {v}), COSTS) < before for v in values)
    assert better > 20
