"""Sharded weights in the search over layouts: gathered in buckets, ahead of their readers."""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest

from steelyard.ir.parallel_layout import DATA, ParallelLayout
from steelyard.ir.rule import Rule, of_kind
from steelyard.ir.rule_kinds import CollectiveOverlap, StateSharding
from steelyard.plans.trade import Trade
from steelyard.search import LayoutSearch, StepSearch
from steelyard.trades import TRADES
from tests.harness import Trial
from tests.unit.trades.test_shard_states import COSTS, LINK
from tests.zoo.case import next_token_loss, tokens
from tests.zoo.own import GPT

pytestmark = pytest.mark.slow


@functools.cache
def trial() -> Trial:
    model = GPT(layers=3, width=64, heads=2, vocabulary=256, length=32, fused=True)
    return Trial(model, next_token_loss, tokens(8, 32, 256))


def test_a_faster_gathering_is_found_within_the_memory_of_one_by_one() -> None:
    trades: tuple[Trade, ...] = tuple(t for t in TRADES if t.name != "shard_pipeline")
    plain, source = trial().plain, trial().source
    # A gradient has half as many messages as around a ring, so each gets twice the latency.
    waits = replace(LINK, latency_seconds=2 * LINK.latency_seconds)
    costs = replace(COSTS, links={DATA: waits})

    def searching(layout: tuple[Rule, ...]) -> StepSearch:
        return StepSearch(plain, trades=trades, source=source, costs=costs, layout=layout)

    layouts = LayoutSearch(
        plain, trades=trades, source=source, costs=costs, num_ranks=2, searching=searching
    )
    ways = [
        way
        for way in layouts.candidates.of(ParallelLayout(data=2))
        if any(rule.gathers == 2 for rule in of_kind(way.rules, StateSharding))
    ]
    one_by_one = min((w for w in ways if not _at_once(w.rules)), key=lambda w: w.nbytes)
    fastest = min((w for w in ways if w.nbytes <= one_by_one.nbytes), key=lambda w: w.seconds)
    assert _at_once(fastest.rules)
    assert max(rule.ahead for rule in of_kind(fastest.rules, CollectiveOverlap)) > 0
    assert fastest.seconds < 0.8 * one_by_one.seconds


def _at_once(rules: tuple[Rule, ...]) -> int:
    return max(rule.bucket for rule in of_kind(rules, StateSharding))
