"""The time of an exchange: closed forms where they exist, and laws everywhere else."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from steelyard.hardware.cluster import LevelMember, Link, TopologyLevel
from steelyard.hardware.cluster_file import decode_tree
from steelyard.predict.collectives.algorithms import (
    Algorithm,
    CollectiveCost,
    all_gather,
    all_reduce,
    all_to_all,
    broadcast,
    gather,
    reduce_scatter,
    send,
)
from steelyard.predict.collectives.routes import Route, route
from tests.unit.hardware.trees import ANY, DEVICES, LINKS, PLAIN, even, member

Exchange = Callable[[Route, int], tuple[CollectiveCost, ...]]
EXCHANGES: tuple[Exchange, ...] = (
    all_reduce, all_gather, reduce_scatter, all_to_all, broadcast, gather,
)  # fmt: skip
SIZES = st.integers(1, 2**34)
INSIDE = Link(kind="inside", latency_seconds=3e-6, bytes_per_second=240e9)
OUTSIDE = Link(kind="outside", latency_seconds=10e-6, bytes_per_second=24e9)
FLAT = even(8, links=(INSIDE,))
NODES = even(8, 16, links=(INSIDE, OUTSIDE), ports=(1, 4))


def by(found: tuple[CollectiveCost, ...], algorithm: Algorithm) -> CollectiveCost:
    return next(
        collective_curves for collective_curves in found if collective_curves.algorithm is algorithm
    )


def seconds(found: tuple[CollectiveCost, ...]) -> dict[Algorithm, float]:
    return {collective_curves.algorithm: collective_curves.seconds for collective_curves in found}


def never_more(less: dict[Algorithm, float], more: dict[Algorithm, float]) -> None:
    assert less.keys() == more.keys()
    for algorithm, taken in less.items():
        assert taken <= more[algorithm] * (1 + 1e-9), algorithm


@st.composite
def groups(draw: st.DrawFn) -> tuple[TopologyLevel, list[int]]:
    tree = draw(ANY)
    ranks = draw(st.sets(st.integers(0, tree.num_devices - 1), min_size=1))
    return tree, sorted(ranks)


# --- closed forms ---------------------------------------------------------------------------------


@given(st.integers(2, 64), PLAIN, SIZES)
def test_a_ring_in_one_scope_is_that_of_thakur(n: int, link: Link, nbytes: int) -> None:
    found = all_reduce(route(even(n, links=(link,)), range(n)), nbytes)
    share = -(-nbytes // n)
    expected = 2 * (n - 1) * (link.latency_seconds + share / link.bytes_per_second)
    ring = by(found, Algorithm.RING)
    assert ring.seconds == pytest.approx(expected)
    assert ring.sent_bytes == 2 * (n - 1) * share
    assert by(found, Algorithm.IN_SCOPES) == replace(ring, algorithm=Algorithm.IN_SCOPES)


def test_all_traffic_of_the_through_one_algorithm_passes_one_rank() -> None:
    found = by(all_reduce(route(FLAT, range(8)), 1000), Algorithm.THROUGH_ONE)
    assert found.seconds == pytest.approx(2 * 7 * (3e-6 + 1000 / 240e9))
    assert found.sent_bytes == 7000


def test_a_ring_over_nodes_waits_for_the_network_only_between_them() -> None:
    """NCCL's formula: of 2 (n - 1) steps, 2 (nodes - 1) are between nodes."""
    found = all_reduce(route(NODES, range(128)), 128)
    waits = 2 * (15 * 10e-6 + 112 * 3e-6)
    # There are four rings, one for each port; inside a node, a device passes on the data of all
    # four.
    moves = 2 * 127 * max(1 / (4 * 24e9), 1 / 240e9)
    assert by(found, Algorithm.RING).seconds == pytest.approx(waits + moves)


def test_in_scopes_each_level_has_its_share() -> None:
    nbytes = 128 << 20
    found = by(all_reduce(route(NODES, range(128)), nbytes), Algorithm.IN_SCOPES)
    inside = 7 * (3e-6 + (nbytes / 8) / 240e9)
    # There are eight rings, one for each device of a node, over four ports.
    outside = 15 * (10e-6 + 8 * (nbytes / 128) / (4 * 24e9))
    assert found.seconds == pytest.approx(2 * (inside + outside))
    assert found.sent_bytes == 2 * (7 * nbytes // 8 + 15 * nbytes // 128)


def test_a_tree_waits_for_the_depth_of_each_level() -> None:
    found = by(all_reduce(route(NODES, range(128)), 1 << 20), Algorithm.TREE)
    moves = (1 << 20) / (4 * 24e9)
    assert found.seconds == pytest.approx(2 * (3 * 3e-6 + 4 * 10e-6 + moves))


def test_a_message_passes_every_link_between_two_ranks() -> None:
    uplink = Link(kind="uplink", latency_seconds=1e-5, bytes_per_second=1e9)
    racks = even(8, 4, 2, links=(INSIDE, OUTSIDE, uplink), ports=(1, 8, 1))
    near, far = (send(route(racks, ranks), 10**9) for ranks in ([0, 1], [0, 63]))
    assert near[0].seconds == pytest.approx(3e-6 + 1e9 / 240e9)
    assert far[0].seconds == pytest.approx(1e-5 + 1.0)
    assert near[0].sent_bytes == far[0].sent_bytes == 10**9


def test_a_wide_uplink_does_not_hide_a_narrow_port() -> None:
    uplink = Link(kind="uplink", latency_seconds=1e-6, bytes_per_second=1e12)
    racks = even(8, 4, 2, links=(INSIDE, OUTSIDE, uplink), ports=(1, 8, 1))
    (far,) = send(route(racks, [0, 63]), 10**9)
    assert far.seconds == pytest.approx(10e-6 + 1e9 / 24e9)
    # One rank in each rack: no rack or node holds both, but the message still passes through them.
    found = by(all_reduce(route(racks, [0, 32]), 10**9), Algorithm.RING)
    assert found.seconds == pytest.approx(2 * (10e-6 + 0.5e9 / 24e9))


def test_groups_that_share_a_port_divide_it() -> None:
    """Eight groups with one rank on each node: two share each of four ports."""
    nbytes = 16 << 30
    ranks = range(0, 128, 8)
    taken = [
        by(all_reduce(route(NODES, ranks, at_once=n), nbytes), Algorithm.RING).seconds
        for n in (1, 4, 8, 100)
    ]
    assert taken[0] == taken[1]
    assert taken[2] == pytest.approx(2 * taken[0], rel=1e-3)
    # At most eight of these groups have a rank in the same node.
    assert taken[3] == taken[2]


def test_groups_inside_nodes_share_nothing() -> None:
    alone, beside = (
        all_reduce(route(NODES, range(8, 16), at_once=n), 1 << 20) for n in (1, 16)
    )  # fmt: skip
    assert alone == beside


def test_the_path_to_network_ports_includes_the_host_link() -> None:
    text = """
        [device.d]
        memory = "1 GiB"
        memory_bandwidth = "1 GB/s"
        peak = { float32 = "1 TFLOP/s" }
        host_link = "pcie3-x16"
        [scope.node]
        members = { d = 2 }
        link = "nvlink-a100"
        [scope.all]
        members = { node = 2 }
        link = "infiniband-xdr"
        """
    by_one, by_both = (send(route(decode_tree(text), ranks), 10**9) for ranks in ([0, 2], [0, 1]))
    assert by_one[0].seconds == pytest.approx(9.6e-6 + 1e9 / 12e9)
    assert by_both[0].seconds == pytest.approx(3.4e-6 + 1e9 / 240e9)


# --- laws -----------------------------------------------------------------------------------------


@given(ANY, st.data(), SIZES)
def test_one_rank_exchanges_nothing(tree: TopologyLevel, data: st.DataObject, nbytes: int) -> None:
    alone = route(tree, [data.draw(st.integers(0, tree.num_devices - 1))])
    for exchange in EXCHANGES:
        for collective_curves in exchange(alone, nbytes):
            assert (collective_curves.seconds, collective_curves.sent_bytes) == (0, 0), (
                exchange.__name__
            )


@given(LINKS, SIZES, st.integers(1, 8))
def test_between_two_ranks_a_ring_is_direct(link: Link, nbytes: int, at_once: int) -> None:
    two = route(even(2, links=(link,)), range(2), at_once=at_once)
    for exchange in (all_reduce, all_gather, reduce_scatter):
        found = exchange(two, nbytes)
        ring, direct = by(found, Algorithm.RING), by(found, Algorithm.DIRECT)
        assert ring.seconds == pytest.approx(direct.seconds)
        assert ring.sent_bytes == direct.sent_bytes
    assert all_to_all(two, nbytes)[0].seconds == pytest.approx(all_gather(two, nbytes)[0].seconds)


@given(groups(), SIZES, SIZES, st.integers(1, 9))
def test_more_bytes_are_never_faster(
    group: tuple[TopologyLevel, list[int]], nbytes: int, more: int, at_once: int
) -> None:
    found = route(*group, at_once=at_once)
    for exchange in EXCHANGES:
        less = exchange(found, nbytes)
        never_more(seconds(less), seconds(exchange(found, nbytes + more)))
        assert [c.seconds for c in less] == sorted(c.seconds for c in less)


@given(groups(), SIZES, st.floats(0.01, 1.0))
def test_faster_links_are_never_slower(
    group: tuple[TopologyLevel, list[int]], nbytes: int, factor: float
) -> None:
    tree, ranks = group
    for exchange in EXCHANGES:
        quicker = exchange(route(_quicker(tree, factor), ranks), nbytes)
        never_more(seconds(quicker), seconds(exchange(route(tree, ranks), nbytes)))


@given(groups(), SIZES, st.floats(0.01, 1.0), st.integers(0, 2))
def test_one_faster_link_is_never_slower(
    group: tuple[TopologyLevel, list[int]], nbytes: int, factor: float, nth: int
) -> None:
    tree, ranks = group
    first, *others = tree.members[nth % len(tree.members) :]
    before = tree.members[: len(tree.members) - 1 - len(others)]
    assert first.link is not None
    quick = replace(first, link=_scaled(first.link, factor))
    quicker = TopologyLevel(name=tree.name, members=(*before, quick, *others))
    for exchange in EXCHANGES:
        never_more(
            seconds(exchange(route(quicker, ranks), nbytes)),
            seconds(exchange(route(tree, ranks), nbytes)),
        )


def _quicker(tree: TopologyLevel, factor: float) -> TopologyLevel:
    members = []
    for inner in tree.members:
        assert inner.link is not None
        of = _quicker(inner.of, factor) if isinstance(inner.of, TopologyLevel) else inner.of
        members.append(replace(inner, of=of, link=_scaled(inner.link, factor)))
    return TopologyLevel(name=tree.name, members=tuple(members))


def _scaled(link: Link, factor: float) -> Link:
    return replace(
        link,
        latency_seconds=link.latency_seconds * factor,
        bytes_per_second=link.bytes_per_second / factor,
        points=tuple((size, seconds * factor) for size, seconds in link.points),
    )


@given(groups(), SIZES, st.integers(1, 9))
def test_groups_at_once_are_never_faster(
    group: tuple[TopologyLevel, list[int]], nbytes: int, at_once: int
) -> None:
    alone, beside = route(*group), route(*group, at_once=at_once)
    for exchange in EXCHANGES:
        never_more(seconds(exchange(alone, nbytes)), seconds(exchange(beside, nbytes)))


@given(groups(), SIZES)
def test_an_all_reduce_is_a_reduce_scatter_and_an_all_gather(
    group: tuple[TopologyLevel, list[int]], nbytes: int
) -> None:
    found = route(*group)
    for algorithm in (Algorithm.RING, Algorithm.DIRECT):
        halves = [
            by(exchange(found, nbytes), algorithm) for exchange in (reduce_scatter, all_gather)
        ]
        whole = by(all_reduce(found, nbytes), algorithm)
        assert whole.seconds == pytest.approx(sum(half.seconds for half in halves))
        assert whole.sent_bytes == sum(half.sent_bytes for half in halves)


@given(
    st.lists(st.integers(2, 5), min_size=1, max_size=3),
    st.lists(PLAIN, min_size=3, max_size=3),
    SIZES,
)
def test_no_algorithm_beats_the_lower_bound_of_received_bytes(
    counts: list[int], links: list[Link], nbytes: int
) -> None:
    """A rank has its own share and receives the others over its own link or its node's."""
    tree = even(*counts, links=tuple(links[: len(counts)]))
    n = tree.num_devices
    fastest = max(link.bytes_per_second for link in links)
    least = (n - 1) * (nbytes / n) / (fastest * len(counts))
    for collective_curves in all_gather(route(tree, range(n)), nbytes):
        assert collective_curves.seconds >= least * (1 - 1e-9)


def test_an_uneven_group_has_no_ring_in_each_scope() -> None:
    names = {c.algorithm for c in all_reduce(route(NODES, [0, 1, 8]), 1000)}
    assert Algorithm.IN_SCOPES not in names
    assert Algorithm.RING in names
    even_names = {c.algorithm for c in all_reduce(route(NODES, [0, 1, 8, 9]), 1000)}
    assert Algorithm.IN_SCOPES in even_names


def test_groups_of_unequal_depth_have_no_hierarchical_algorithm() -> None:
    node = TopologyLevel(name="node", members=(member(DEVICES[0], 8, INSIDE),))
    mixed = TopologyLevel(
        name="mixed",
        members=(member(node, 2, OUTSIDE), LevelMember(of=DEVICES[1], count=1, link=OUTSIDE)),
    )
    names = {c.algorithm for c in all_reduce(route(mixed, range(17)), 1000)}
    assert Algorithm.IN_SCOPES not in names


def test_the_slower_of_two_networks_sets_the_pace() -> None:
    tree = decode_tree('[scope.all]\nmembers = { dgx-h100 = 2, "p3dn.24xlarge" = 2 }')
    unlike, alike = (all_reduce(route(tree, ranks), 1 << 30) for ranks in (range(32), range(16)))
    assert by(unlike, Algorithm.RING).seconds > 10 * by(alike, Algorithm.RING).seconds


def test_an_algorithm_has_the_uncertainty_of_its_least_known_link() -> None:
    sure, unsure = (replace(INSIDE, doubt=doubt) for doubt in (0.1, 0.4))
    (first, *_) = all_reduce(route(even(2, 2, links=(sure, unsure)), range(4)), 1000)
    assert first.doubt == 0.4
    assert first.estimate.high == pytest.approx(1.4 * first.seconds)
    (inside, *_) = all_reduce(route(even(2, 2, links=(sure, unsure)), range(2)), 1000)
    assert inside.doubt == 0.1
