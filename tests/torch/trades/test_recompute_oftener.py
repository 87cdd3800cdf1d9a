"""Values recomputed more than once, on real models: the same bits, and the predicted bytes."""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest

from steelyard.ir.program import Program
from steelyard.ir.rule import Rule, of_kind, to_rules
from steelyard.predict.step import PEAK_SHARE
from steelyard.search import StepSearch
from steelyard.trades.recompute import Recompute, RecomputeRule, recomputable
from tests import zoo
from tests.harness import Outcome, Trial, costs_of, predicted_above

pytestmark = pytest.mark.slow

# The models have masks, BatchNorm statistics, experts, two stacks, views, writes, random draws, and
# several results.
MODELS = (
    "gpt",
    "moe",
    "lstm",
    "resnet_bn",
    "hf_t5",
    "edge_tied_module",
    "edge_dropout_variants",
    "edge_buffer_written",
    "edge_inplace_views",
    "edge_instance_norm_tracked",
    "edge_random_draws",
    "edge_sort",
)
# Kernels round their workspace up to this size.
_SMALL_CHANGE_BYTES = 64


@functools.cache
def trial(name: str) -> Trial:
    return Trial(*zoo.case(name).make())


@functools.cache
def unplanned(name: str) -> Outcome:
    return trial(name).run(trial(name).plain)


def rules_for_all(program: Program, times: int) -> tuple[Rule, ...]:
    graph = program.graph
    rules = to_rules(graph, recomputable(graph), RecomputeRule)
    return tuple(replace(rule, times=times) for rule in rules)


@pytest.mark.parametrize("times", [2, 5])
@pytest.mark.parametrize("name", MODELS)
def test_results_are_unchanged_and_the_peak_is_predicted(name: str, times: int) -> None:
    tried = trial(name)
    once, program = (
        Recompute().rewrite(tried.plain, rules_for_all(tried.plain, n), tried.source)
        for n in (1, times)
    )
    assert program.problems() == []
    assert len(program.recomputed) > len(once.recomputed) or name in (
        "edge_sort",
        "edge_random_draws",
    )
    outcome = tried.run(program)
    assert outcome.difference(unplanned(name)) is None
    predicted = predicted_above(program, costs_of(program.graph))
    allowed = max(_SMALL_CHANGE_BYTES, PEAK_SHARE * predicted)
    assert abs(outcome.peak_bytes - predicted) <= allowed


def test_plans_with_repeated_recomputation_run_as_predicted() -> None:
    """The least memory of a ResNet needs values that are recomputed twice."""
    tried = trial("resnet_bn")
    costs, trades = tried.costs(), (Recompute(),)
    searching = StepSearch(tried.plain, trades=trades, source=tried.source, costs=costs)
    rules = searching.frontier()[0].rules
    assert any(rule.times > 1 for rule in of_kind(rules, RecomputeRule))
    program = tried.apply_rules(rules)
    outcome = tried.run(program)
    assert outcome.difference(tried.eager()) is None
    assert outcome.peak_bytes == pytest.approx(predicted_above(program, costs), rel=PEAK_SHARE)
    once = StepSearch(tried.plain, trades=trades, source=tried.source, costs=costs, repeats=False)
    least = searching.explored().least.peak_bytes
    assert least < once.explored().least.peak_bytes
