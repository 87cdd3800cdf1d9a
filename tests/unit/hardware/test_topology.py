"""Trees of scopes: their counts equal those of a list of all devices."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from steelyard.errors import BadInput
from steelyard.hardware.cluster import Cluster, Device, LevelMember, Link, TopologyLevel
from steelyard.predict.collectives.group_topology import Level, group_of, levels
from tests.unit.hardware.trees import ANY, DEVICES, even, flat, member

LINK = Link(kind="link", latency_seconds=1e-6, bytes_per_second=1e9)
LARGE = even(8, 4, 512, links=(LINK,) * 3, ports=(1, 8, 16))


@given(ANY)
def test_every_rank_is_a_device_and_each_is_counted(tree: TopologyLevel) -> None:
    kinds = Counter(tree.device_of(rank).kind for rank in range(tree.num_devices))
    counted: Counter[str] = Counter()
    for device, count in tree.classes:
        counted[device.kind] += count
    assert kinds == counted
    assert len(flat(tree)) == tree.num_devices


@given(ANY)
def test_rank_paths_are_in_depth_first_order(tree: TopologyLevel) -> None:
    for rank, way in enumerate(flat(tree)):
        assert [id(m) for m in tree.path_to(rank)] == [identity for _, identity in way]


@given(ANY, st.data())
def test_the_smallest_scope_that_holds_two_ranks(tree: TopologyLevel, data: st.DataObject) -> None:
    ranks = st.integers(0, tree.num_devices - 1)
    first, last = sorted((data.draw(ranks), data.draw(ranks)))
    place = tree.holding(first, last)
    ways = flat(tree)
    # Find the devices whose path begins with the common part of both paths.
    shared = 0
    while first != last and ways[first][shared] == ways[last][shared]:
        shared += 1
    shared = shared if first != last else len(ways[first]) - 1
    inside = [r for r, way in enumerate(ways) if way[:shared] == ways[first][:shared]]
    assert list(place.ranks) == inside
    if first != last:
        mine, yours = tree.between(first, last)
        assert id(mine) == ways[first][shared][1]
        assert id(yours) == ways[last][shared][1]


@given(ANY, st.data())
def test_group_levels_are_counted_correctly(tree: TopologyLevel, data: st.DataObject) -> None:
    ranks = data.draw(
        st.sets(st.integers(0, tree.num_devices - 1), min_size=1)
        | st.builds(
            lambda start, step: set(range(start, tree.num_devices, step)),
            st.integers(0, tree.num_devices - 1),
            st.integers(1, 9),
        )
    )
    found = levels(tree, sorted(ranks))
    assert sum(level.hops for level in found) == len(ranks) - 1
    place = tree.holding(min(ranks), max(ranks))
    by_height: dict[int, list[int]] = {}
    _count_by_hand(place.scope, {rank - place.first_rank for rank in ranks}, by_height)
    assert [
        (level.scopes, level.members, level.fewest, level.most) for level in found
    ] == [
        (len(c), sum(c), min(c), max(c)) for _, c in sorted(by_height.items())
    ]  # fmt: skip
    for level in found:
        assert all(1 <= uplink.ranks <= uplink.devices for uplink in level.uplinks)


def _count_by_hand(scope: TopologyLevel, ranks: set[int], found: dict[int, list[int]]) -> int:
    begin, joined, height = 0, 0, 1
    for inner in scope.members:
        for _ in range(inner.count):
            held = {rank - begin for rank in ranks if begin <= rank < begin + inner.size}
            joined += bool(held)
            if held and isinstance(inner.of, TopologyLevel):
                height = max(height, 1 + _count_by_hand(inner.of, held, found))
            begin += inner.size
    found.setdefault(height, []).append(joined)
    return height


@given(ANY, st.data())
def test_a_range_of_ranks_counts_like_the_list_of_its_members(
    tree: TopologyLevel, data: st.DataObject
) -> None:
    start = data.draw(st.integers(0, tree.num_devices - 1))
    ranks = range(start, tree.num_devices, data.draw(st.integers(1, 9)))
    assert _as_sets(levels(tree, ranks)) == _as_sets(levels(tree, list(ranks)[::-1]))


def _as_sets(found: tuple[Level, ...]) -> list[object]:
    return [
        (x.scopes, x.members, x.fewest, x.most, set(x.uplinks), set(x.outward)) for x in found
    ]  # fmt: skip


def test_a_group_over_16384_devices_is_counted_by_patterns() -> None:
    assert LARGE.num_devices == 16_384
    node, rack, whole = levels(LARGE, range(3, 16_384, 8))
    assert (node.hops, rack.hops, whole.hops) == (0, 1536, 511)
    assert [(uplink.ranks, uplink.devices) for uplink in rack.uplinks] == [(1, 8)]
    assert [(uplink.ranks, uplink.devices) for uplink in whole.uplinks] == [(4, 32)]
    every = levels(LARGE, range(16_384))
    assert [len(level.uplinks) for level in every] == [1, 1, 1]
    assert [(level.fewest, level.most) for level in every] == [(8, 8), (4, 4), (512, 512)]


def test_devices_are_counted_without_a_list() -> None:
    huge = even(10**4, 10**4, 10**4, links=(LINK,) * 3)
    assert [level.most for level in levels(huge, range(10**12))] == [10**4] * 3


def test_an_unknown_rank_is_refused() -> None:
    for ranks in (range(16_385), [-1, 3]):
        with pytest.raises(BadInput, match="has no rank"):
            levels(LARGE, ranks)
    with pytest.raises(BadInput, match="twice"):
        group_of([3, 1, 3])
    assert levels(LARGE, []) == ()


# --- the cluster ----------------------------------------------------------------------------------


def test_one_device_keeps_its_fingerprint() -> None:
    """Existing plans contain it: a hash of name, threads and 1."""
    device = Device(
        kind="cpu x", flops_per_second=1, bytes_per_second=1, memory_bytes=1, threads=2
    )  # fmt: skip
    alone = Cluster(
        tree=TopologyLevel(name="here", members=(LevelMember(of=device, count=1, link=None),))
    )
    assert alone.fingerprint == "57ccc5c565c0f764"
    assert alone.device is device


@given(ANY)
def test_the_fingerprint_depends_on_devices(tree: TopologyLevel) -> None:
    said = Cluster(tree=tree).fingerprint
    assert said == Cluster(tree=tree).fingerprint
    doubled = TopologyLevel(name=tree.name, members=(member(tree, 2, LINK),))
    assert Cluster(tree=doubled).fingerprint != said


def test_the_fingerprint_depends_on_links_and_not_on_prices() -> None:
    def of(rate: float, price: float | None = None) -> str:
        link = Link(kind="x", latency_seconds=1e-6, bytes_per_second=rate)
        tree = TopologyLevel(
            name="x", members=(member(DEVICES[0], 2, link),), own_usd_per_hour=price
        )  # fmt: skip
        return Cluster(tree=tree).fingerprint

    assert of(1e9) != of(2e9)
    assert of(1e9) == of(1e9, price=3.0)


def test_ranks_here_share_the_machine() -> None:
    alone, two = Cluster.here(), Cluster.here(ranks=2)
    assert (alone.num_devices, two.num_devices) == (1, 2)
    assert two.device.memory_bytes == alone.device.memory_bytes // 2
    assert two.fingerprint != alone.fingerprint
    (joined,) = two.tree.members
    assert joined.link is not None
    assert joined.link.kind == "loopback"
    assert two.device.is_here


@pytest.mark.parametrize("ranks", [0, -1, 2.0, True])
def test_no_ranks_are_refused(ranks: int) -> None:
    with pytest.raises(BadInput, match="ranks"):
        Cluster.here(ranks=ranks)


def test_a_mixed_cluster_has_no_one_device() -> None:
    quick, slow = DEVICES
    tree = TopologyLevel(name="x", members=(member(quick, 2, LINK), member(slow, 3, LINK)))
    with pytest.raises(BadInput, match="2 quick, 3 slow"):
        _ = Cluster(tree=tree).device


def test_prices_add_up_where_all_are_known() -> None:
    priced = Device(
        kind="p", flops_per_second=1, bytes_per_second=1, memory_bytes=1, usd_per_hour=2.0
    )  # fmt: skip
    node = TopologyLevel(name="node", members=(member(priced, 4, LINK),))
    hired = TopologyLevel(
        name="hired", members=(member(DEVICES[0], 4, LINK),), own_usd_per_hour=5.0
    )
    both = TopologyLevel(name="both", members=(member(node, 2, LINK), member(hired, 1, LINK)))
    assert both.usd_per_hour == 2 * 4 * 2.0 + 5.0
    unknown = TopologyLevel(name="x", members=(member(both, 1, LINK), member(DEVICES[0], 1, LINK)))
    assert unknown.usd_per_hour is None


def test_an_undeclared_peak_rate_is_not_invented() -> None:
    assert DEVICES[0].peak_flops_per_second("float32") == 2e12
    with pytest.raises(BadInput, match="bfloat16 is unknown"):
        DEVICES[0].peak_flops_per_second("bfloat16")


@pytest.mark.parametrize("ranks", [0, -1, True, 2.0, 10**6])
def test_absurd_numbers_of_ranks_are_refused(ranks: int) -> None:
    with pytest.raises(BadInput, match="ranks is not possible"):
        Cluster.here(ranks=ranks)


def test_operators_are_priced_by_the_peak_rate_of_their_dtype() -> None:
    apart = replace(DEVICES[0], peaks=(("bfloat16", 8e12),))
    assert (apart.flops_in("bfloat16"), apart.flops_in("float32")) == (8e12, 2e12)
    with pytest.raises(BadInput, match="float16 is unknown"):
        apart.flops_in("float16")
    assert DEVICES[0].flops_in("bfloat16") == 2e12, "nothing is told apart"


def test_the_first_devices_have_their_own_prices() -> None:
    quick, slow = (
        Device(
            kind=kind, flops_per_second=1, bytes_per_second=1, memory_bytes=1, usd_per_hour=price
        )
        for kind, price in (("quick", 4.0), ("slow", 1.0))
    )
    node = TopologyLevel(name="node", members=(member(quick, 2, LINK), member(slow, 2, LINK)))
    hired = TopologyLevel(name="hired", members=(member(slow, 4, LINK),), own_usd_per_hour=6.0)
    whole = TopologyLevel(name="whole", members=(member(node, 2, LINK), member(hired, 1, LINK)))
    costs = [whole.usd_per_hour_of(n) for n in range(1, 13)]
    assert costs == [4, 8, 9, 10, 14, 18, 19, 20, 21.5, 23, 24.5, 26]
    assert costs[-1] == whole.usd_per_hour
    free = Device(kind="f", flops_per_second=1, bytes_per_second=1, memory_bytes=1)
    some = TopologyLevel(name="some", members=(member(quick, 1, LINK), member(free, 1, LINK)))
    assert [some.usd_per_hour_of(n) for n in (1, 2)] == [4, None]
