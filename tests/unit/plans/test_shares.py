"""Unequal shares and speeds in plain data: there is one way of writing each, and invalid ones
are refused."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from steelyard.errors import BadInput, PlanFileError
from steelyard.hardware.cluster import Cluster
from steelyard.ir.parallel_layout import ParallelLayout
from steelyard.plan_files.plan_file import decode_decisions, encode_decisions
from steelyard.plans.budget import Budget
from steelyard.plans.plan import Decisions, Target
from steelyard.trades.shard_batch import ShardBatchRule

_SHARES = st.lists(st.integers(1, 50), min_size=2, max_size=6).map(tuple)
_MADE_FOR = Target(
    model="m", graph="g", decomposition="d", runner="python", cluster="c", torch="2.13.0", batch=()
)


@given(_SHARES, st.integers(1, 5))
def test_proportional_shares_are_the_same_layout(shares: tuple[int, ...], times: int) -> None:
    layout = ParallelLayout(data=len(shares), shares=shares)
    assert layout == ParallelLayout(data=len(shares), shares=tuple(times * n for n in shares))
    assert (layout.shares == ()) == (len({*shares}) == 1)
    assert layout.units == sum(layout.portions)
    pairs = zip(layout.portions, shares, strict=True)
    assert all(n * sum(shares) == m * layout.units for n, m in pairs)


def test_the_ranks_of_each_share_are_known_the_largest_first() -> None:
    layout = ParallelLayout(data=4, shares=(1, 3, 1, 2))
    assert [layout.share_of(rank) for rank in range(4)] == [1, 3, 1, 2]
    assert layout.unequal_ranks == (1, 3, 0)
    assert ParallelLayout(data=2, tensor=2).unequal_ranks == (0,)


@pytest.mark.parametrize("shares", [(2, 1, 1), (2,), (2, 0), (2, -1)])
def test_invalid_shares_are_refused(shares: tuple[int, ...]) -> None:
    with pytest.raises(BadInput, match="a whole number above 0 for each rank"):
        ParallelLayout(data=2, shares=shares)


def _text(line: str, *, more: str = "") -> str:
    return (
        'format = 2\n[target]\nmodel = "m"\ngraph = "g"\ndecomposition = "d"\nrunner = "python"\n'
        f'cluster = "c"\ntorch = "2.13.0"\nranks = 2\n{more}\n[budget]\n'
        f'[[shard_batch]]\nranks = 2\nbucket = "1 MiB"\n{line}\n'
    )


@given(_SHARES, st.lists(st.floats(0.01, 1.0), max_size=4).map(tuple))
def test_a_plan_reads_back_as_it_was_written(
    shares: tuple[int, ...], speeds: tuple[float, ...]
) -> None:
    rule = ShardBatchRule(ranks=len(shares), bucket=1 << 20, shares=shares)
    target = Target(
        model="m", graph="g", decomposition="d", runner="python", cluster="c", torch="2.13.0",
        batch=(), ranks=len(shares), speeds=speeds,
    )  # fmt: skip
    decisions = Decisions(target=target, budget=Budget(), rules=(rule,))
    text = encode_decisions(decisions)
    assert decode_decisions(text) == decisions
    assert f"shares = {list(shares)}" in text


def test_equal_shares_and_speeds_are_not_written() -> None:
    rule = ShardBatchRule(ranks=2, bucket=1 << 20)
    equal = Decisions(target=_MADE_FOR, budget=Budget(), rules=(rule,))
    text = encode_decisions(equal)
    assert "shares" not in text
    assert "speeds" not in text
    unequal = ShardBatchRule(ranks=2, bucket=1 << 20, shares=(2, 1))
    assert Decisions(target=_MADE_FOR, budget=Budget(), rules=(unequal,)).name != equal.name


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("shares = [2, 1, 1]", "has 2 ranks but 3 shares"),
        ("shares = [2]", "has 2 ranks but 1 shares"),
        ("shares = [2, 0]", "shares"),
        ("shares = [2, 0.5]", "shares"),
        ('shares = "2 : 1"', "shares"),
        ("share = [2, 1]", "did you mean shares"),
    ],
)
def test_a_file_with_other_shares_is_refused_by_name(line: str, said: str) -> None:
    with pytest.raises(PlanFileError, match="shard_batch") as refused:
        decode_decisions(_text(line))
    assert said in str(refused.value)
    assert len(str(refused.value).splitlines()) == 3


@pytest.mark.parametrize("speeds", ["[1, 2]", "[0]", "[1, -1]", '["fast"]', "[nan]"])
def test_speeds_in_a_file_are_shares_of_the_fastest(speeds: str) -> None:
    with pytest.raises(PlanFileError, match="speeds"):
        decode_decisions(_text("", more=f"speeds = {speeds}"))


# --- ranks of this machine ------------------------------------------------------------------------


def test_speeds_are_listed_by_rank_relative_to_the_fastest() -> None:
    cluster = Cluster.here(ranks=3, speeds=(1, 2, 2))
    assert cluster.speeds == (0.5, 1, 1)
    slow, *fast = (cluster.tree.device_of(rank) for rank in range(3))
    assert cluster.devices == (slow, *fast)
    assert fast == [cluster.fastest] * 2
    assert slow.flops_per_second == cluster.fastest.flops_per_second / 2
    assert slow.call_seconds == cluster.fastest.call_seconds * 2
    assert cluster.num_devices == 3


def test_speeds_make_another_cluster_and_equal_ones_do_not() -> None:
    plain = Cluster.here(ranks=2)
    assert plain.speeds == plain.devices == ()
    equal = Cluster.here(ranks=2, speeds=(3, 3))
    assert (equal.fingerprint, equal.devices, equal.speeds) == (plain.fingerprint, (), (1, 1))
    assert Cluster.here(ranks=2, speeds=(1, 0.5)).fingerprint != plain.fingerprint


@pytest.mark.parametrize("speeds", [(1,), (1, 0.5, 1), (1, 0), (1, -1), (1, float("nan")), "10"])
def test_invalid_speeds_are_refused(speeds: tuple[float, ...]) -> None:
    with pytest.raises(BadInput, match="a relative speed above 0 for each rank"):
        Cluster.here(ranks=2, speeds=speeds)


@pytest.mark.parametrize("ranks", [2, 3, 5])
def test_the_remedy_for_wrong_speeds_lists_one_per_rank(ranks: int) -> None:
    with pytest.raises(BadInput) as refused:
        Cluster.here(ranks=ranks, speeds=(1.0,) * (ranks - 1))
    advised = refused.value.remedy.partition("--speeds ")[2].split()[0]
    speeds = [float(speed) for speed in advised.split(",")]
    assert len(speeds) == ranks
    assert Cluster.here(ranks=ranks, speeds=speeds).num_devices == ranks
