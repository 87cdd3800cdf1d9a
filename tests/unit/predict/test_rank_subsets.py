"""The ranks or hosts that a step should use: the best-connected ones, for each number."""

from __future__ import annotations

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from steelyard.errors import PlanFileError
from steelyard.hardware.device import Device
from steelyard.hardware.link import Link
from steelyard.ir.parallel_layout import DATA, TENSOR
from steelyard.plan_files.plan_file import decode_decisions, encode_decisions
from steelyard.plans.budget import Budget
from steelyard.plans.plan import Decisions, Target
from steelyard.predict.cost_table import CostTable
from steelyard.predict.rank_subsets import (
    ALIKE,
    Subset,
    best_joined,
    better_joined,
    named,
    numbers_of_ranks,
    slowest,
)
from steelyard.search.ranks.slow_link_note import note_on_links, slow_hosts
from steelyard.trades.shard_batch import ShardBatchRule

_TIMES = st.lists(st.floats(1e-4, 1.0), min_size=2, max_size=6)
_MADE_FOR = Target(
    model="m", graph="g", decomposition="d", runner="python", cluster="c", torch="2.13.0",
    batch=(), ranks=6, hosts=3,
)  # fmt: skip
_BATCH = ShardBatchRule(ranks=4, bucket=1 << 20)


def _matrix(times: list[float]) -> list[list[float]]:
    """Return message times of hosts with one link each: a pair is as slow as the slower of both."""
    hosts = range(len(times))
    return [[max(times[i], times[j]) if i != j else 0.0 for j in hosts] for i in hosts]


@given(_TIMES)
def test_no_other_hosts_are_clearly_better_connected_than_those_chosen(times: list[float]) -> None:
    seconds = _matrix(times)
    found = best_joined(seconds)
    assert [*found] == [*range(1, len(times) + 1)]
    for number in range(2, len(times) + 1):
        assert len(set(found[number])) == number
        assert list(found[number]) == sorted(found[number])
        least = min(slowest(group, seconds) for group in combinations(range(len(times)), number))
        assert slowest(found[number], seconds) <= ALIKE * ALIKE * least


@pytest.mark.parametrize("slow", range(4))
def test_a_host_behind_a_slow_link_is_dropped_first(slow: int) -> None:
    times = [1e-3] * 4
    times[slow] = 1e-1
    found = best_joined(_matrix(times))
    assert found[4] == (0, 1, 2, 3)
    assert found[3] == tuple(n for n in range(4) if n != slow)
    assert better_joined(found, _matrix(times)) == (3,)


def test_of_equally_connected_hosts_the_fastest_are_taken() -> None:
    level = _matrix([1e-3, 1.2e-3, 1e-3, 1.1e-3])
    assert best_joined(level)[2] == (0, 1)
    assert best_joined(level, (0.5, 1, 1, 0.25))[2] == (1, 2)
    assert best_joined(level, (0.5, 1, 1, 0.25))[3] == (0, 1, 2)
    assert better_joined(best_joined(level), level) == ()


def test_the_larger_of_two_sites_is_kept_together() -> None:
    sites = (0, 0, 1, 1, 1)
    seconds = [
        [0.0 if i == j else 1e-3 if sites[i] == sites[j] else 1.0 for j in range(5)]
        for i in range(5)
    ]
    found = best_joined(seconds)
    assert (found[2], found[3]) == ((0, 1), (2, 3, 4))
    # If all ranks of a site are taken, a smaller part of it has no better links.
    assert better_joined(found, seconds) == (3,)


def test_candidates_are_all_small_rank_counts_and_whole_hosts() -> None:
    assert numbers_of_ranks(3) == (2,)
    assert numbers_of_ranks(4) == (3,)
    assert numbers_of_ranks(6, of_a_host=2) == (4,)
    assert numbers_of_ranks(8) == (3, 5, 6, 7)
    assert numbers_of_ranks(1024) == (1023,)


def test_a_step_is_priced_by_the_devices_and_links_of_its_ranks() -> None:
    whole = Device(kind="", flops_per_second=1e9, bytes_per_second=1e9, memory_bytes=1)
    half = whole.at_speed(0.5)
    slow, fast = (Link(kind="", latency_seconds=1e-4, bytes_per_second=rate) for rate in (1e6, 1e9))
    costs = CostTable(
        device=whole,
        devices=(whole, half, whole),
        links=dict.fromkeys((DATA, TENSOR), slow),
        subsets={2: Subset(ranks=(0, 2), links={DATA: fast})},
    )
    two = costs.on(2)
    assert two.devices == (whole, whole)
    assert (two.links[DATA], two.links[TENSOR]) == (fast, slow)
    assert two.on(2) is two
    assert costs.on(3) is costs


def test_a_plan_file_names_its_ranks_and_is_read_back() -> None:
    first = Decisions(target=_MADE_FOR, budget=Budget(), rules=(_BATCH,))
    assert "used_ranks" not in encode_decisions(first)
    assert (first.ranks_used(4), first.hosts_used(4)) == (range(4), range(2))
    assert len(first.hosts_used(2**60)) == 2**59, "and no list of them is made"
    others = Decisions(target=_MADE_FOR, budget=Budget(), rules=(_BATCH,), used_ranks=(0, 1, 4, 5))
    assert "\nused_ranks = [0, 1, 4, 5]\n" in encode_decisions(others)
    assert decode_decisions(encode_decisions(others)) == others
    assert others.hosts_used(4) == (0, 2)
    assert others.name != first.name


@pytest.mark.parametrize(
    ("used", "reason"),
    [
        ("[0, 1, 4, 6]", "numbers below 6"),
        ("[1, 0, 4, 5]", "ascending"),
        ("[0, 0, 4, 5]", "ascending"),
        ("[0, 1]", "has 2 ranks, but the shard rules need 4"),
        ("[0, 2, 4, 5]", "some but not all"),
        ("[-1, 1, 4, 5]", "used_ranks"),
        ('"all"', "used_ranks"),
    ],
)
def test_impossible_ranks_of_a_plan_are_refused(used: str, reason: str) -> None:
    decisions = Decisions(
        target=_MADE_FOR, budget=Budget(), rules=(_BATCH,), used_ranks=(0, 1, 4, 5)
    )
    text = encode_decisions(decisions).replace("[0, 1, 4, 5]", used)
    with pytest.raises(PlanFileError, match=reason):
        decode_decisions(text)


def test_a_slow_link_is_named_with_what_it_costs() -> None:
    rates = (118e6, 119e6, 3.7e6)
    assert slow_hosts(rates) == (2,)
    seconds = {(0, 1, 2): 2.3, (0, 1): 0.5, (0,): 0.6}

    def least(allows: object) -> float | None:
        assert callable(allows)
        return min((took for hosts, took in seconds.items() if allows(hosts)), default=None)

    (left_out,) = note_on_links(rates, (0, 1), 0.37, least)
    assert left_out == (
        "host 2's link carries 3.53 MiB/s, the others 113 MiB/s: with it a step takes ~2.30 s, "
        "without it ~370 ms"
    )
    (taken,) = note_on_links(rates, (0, 1, 2), 0.2, least)
    assert taken.endswith("with it a step takes ~200 ms, without it ~500 ms")
    assert note_on_links((118e6, 90e6, 119e6), (0, 1), 0.37, least) == ()
    assert note_on_links((), (0, 1), 0.37, least) == ()
    assert slow_hosts((119e6, 1e6, 1e6)) == (), "the first has no partner to show its own rate"


def test_hosts_are_named() -> None:
    assert [named(hosts) for hosts in ((2,), (0, 2), (0, 1, 3))] == [
        "host 2",
        "hosts 0 and 2",
        "hosts 0, 1 and 3",
    ]
