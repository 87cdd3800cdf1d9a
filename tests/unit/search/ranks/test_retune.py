"""Alternatives of a run after its links have changed: the ones worth trying, and their hosts."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest

from steelyard.hardware.link import Link
from steelyard.ir.parallel_layout import ParallelLayout
from steelyard.ir.rule import Rule
from steelyard.search.ranks.layout_candidates import LayoutCandidate
from steelyard.search.ranks.retune import (
    Alternative,
    best_hosts,
    link_among,
    numbers_of_hosts,
    same_on_fewer,
    worth_trying,
)
from steelyard.trades.gradient_compression import TernaryGradientsRule
from steelyard.trades.overlap import OverlapRule
from steelyard.trades.recompute import RecomputeRule
from steelyard.trades.shard_batch import ShardBatchRule

EXACT = ShardBatchRule(ranks=2, bucket=1 << 20)
CODED = TernaryGradientsRule(parameter="a", count=1)


def choice(
    seconds: float, *, lossy: bool = False, ranks: int = 2, nbytes: int = 100
) -> Alternative:
    rules = (EXACT, CODED) if lossy else (EXACT,)
    candidate = LayoutCandidate(
        rules=rules, layout=ParallelLayout(data=ranks), seconds=seconds, nbytes=nbytes
    )
    return Alternative(candidate=candidate, ranks=tuple(range(ranks)))


def tried(now: float, *choices: Alternative, **how: float) -> list[float]:
    settings = {"most_bytes": 1000.0, "num_ranks": 2, **how}
    found = worth_trying(now, choices, **settings)  # type: ignore[arg-type]
    return [c.candidate.seconds for c in found]


def test_gains_below_a_tenth_change_nothing() -> None:
    assert tried(1.0, choice(0.95), choice(0.92, lossy=True)) == []
    assert tried(1.0, choice(0.90)) == [0.90]


def test_candidates_are_tried_fastest_first_up_to_an_exact_one() -> None:
    ways = choice(0.5), choice(0.2, lossy=True), choice(0.3, lossy=True), choice(0.6)
    assert tried(1.0, *ways) == [0.2, 0.3, 0.5]


def test_accuracy_is_not_spent_on_less_than_a_tenth() -> None:
    """One host alone, which is exact, is preferred to compression that gains a hundredth more."""
    alone = choice(0.50, ranks=1)
    assert tried(1.0, choice(0.49, lossy=True), alone) == [0.50]
    assert tried(1.0, choice(0.40, lossy=True), alone) == [0.40, 0.50]


def test_one_host_trains_alone_if_its_link_is_nearly_dead() -> None:
    assert tried(9.0, choice(8.0), choice(2.5, lossy=True), choice(0.4, ranks=1)) == [0.4]


def test_on_fewer_hosts_gradients_are_uncompressed() -> None:
    class Counting:
        def counted(self, rules: tuple[Rule, ...]) -> LayoutCandidate:
            return LayoutCandidate(
                rules=rules, layout=ParallelLayout.of(rules), seconds=1.0, nbytes=100
            )

    layouts = SimpleNamespace(candidates=Counting())
    again, late = RecomputeRule(module="a", op="aten.mm"), OverlapRule(window=1, ahead=2)
    unequal = replace(EXACT, ranks=3, shares=(2, 1, 1))
    rules = (late, again, unequal, CODED)
    two = same_on_fewer(layouts, rules, 2)  # type: ignore[arg-type]
    assert set(two.rules) == {late, again, EXACT}
    alone = same_on_fewer(layouts, rules, 1)  # type: ignore[arg-type]
    assert alone.rules == (again,)


def test_candidates_that_do_not_fit_are_not_tried() -> None:
    assert tried(1.0, choice(0.2, ranks=1, nbytes=2000), choice(0.5)) == [0.5]


def test_returning_ranks_must_gain_more_than_their_state_costs() -> None:
    assert tried(0.4, choice(0.2), num_ranks=1, coming_back_seconds=1.0) == [0.2]
    assert tried(0.4, choice(0.2), num_ranks=1, coming_back_seconds=60.0) == []


@pytest.mark.parametrize(
    ("rates", "count", "hosts"),
    [
        ((118.0, 3.7), 2, (0, 1)),
        ((3.7, 118.0), 2, (0, 2)),
        ((3.7, 118.0), 1, (0,)),
        ((118.0, 118.0, 3.7), 3, (0, 1, 2)),
        ((118.0, 118.0), 3, (0, 1, 2)),
    ],
)
def test_the_best_connected_hosts_continue(
    rates: tuple[float, ...], count: int, hosts: tuple[int, ...]
) -> None:
    assert best_hosts(rates, count) == hosts


def test_a_link_among_fewer_is_as_fast_as_its_slowest() -> None:
    link = Link(kind="network", latency_seconds=1e-4, bytes_per_second=3.5e6)
    without = link_among(link, (3.7e6, 118e6), (0, 2))
    assert without.bytes_per_second == pytest.approx(111.6e6, rel=0.01)
    assert link_among(link, (3.7e6, 118e6), (0, 1, 2)) == link
    assert link_among(link, (3.7e6, 118e6), (0,)) == link


def test_not_every_number_of_many_hosts_is_captured() -> None:
    assert numbers_of_hosts(2) == (1,)
    assert numbers_of_hosts(4) == (1, 2, 3)
    assert numbers_of_hosts(16) == (1, 8, 15)
