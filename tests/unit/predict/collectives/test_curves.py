"""Curves of exchange times in a declared cluster equal the algorithms, and are interpolated in
between."""

from __future__ import annotations

from itertools import pairwise

import pytest

from steelyard.hardware.cluster import Cluster
from steelyard.ir.collective import GLOO, Exchange
from steelyard.predict.collectives.algorithms import (
    all_gather,
    all_reduce,
    all_to_all,
    reduce_scatter,
)
from steelyard.predict.collectives.curves import collective_curves
from steelyard.predict.collectives.routes import route
from steelyard.predict.cost_table import CostTable

_FIND = {
    Exchange.ALL_REDUCE: all_reduce,
    Exchange.ALL_GATHER: all_gather,
    Exchange.REDUCE_SCATTER: reduce_scatter,
    Exchange.ALL_TO_ALL: all_to_all,
}


@pytest.mark.parametrize(
    ("name", "stride"), [("dgx-h100", 1), ("p2.16xlarge", 1), ("dgx-1-v100", 1), ("p2.16xlarge", 4)]
)
def test_a_curve_is_the_time_of_the_fastest_algorithm(name: str, stride: int) -> None:
    tree = Cluster.named(name).tree
    numbers = [n for n in (2, 4, 8) if n * stride <= tree.num_devices]
    found = collective_curves(tree, axis="data", numbers=numbers, stride=stride)
    assert found.keys() == {("data", kind, n, stride) for kind in _FIND for n in numbers}
    for (_, kind, ranks, _), link in found.items():
        way = route(tree, range(0, ranks * stride, stride))
        for nbytes in (4, 1 << 20, 1 << 30):
            quickest = _FIND[kind](way, nbytes)[0].seconds
            assert link.seconds(nbytes, messages=1) == pytest.approx(quickest)
        sizes = [3**power for power in range(2, 22)]
        seconds = [link.seconds(nbytes, messages=1) for nbytes in sizes]
        assert all(less <= more for less, more in pairwise(seconds))


@pytest.mark.parametrize("kind", [Exchange.ALL_REDUCE, Exchange.ALL_GATHER])
def test_prices_depend_on_the_total_bytes(kind: Exchange) -> None:
    cluster = Cluster.named("dgx-h100")
    costs = CostTable(
        device=cluster.device,
        collective_curves=collective_curves(cluster.tree, axis="data", numbers=[4]),
    )
    nbytes = 3 << 20
    collective = GLOO.collective(kind, axis="data", num_ranks=4, nbytes=nbytes)
    assert collective.whole_bytes == nbytes
    link = costs.collective_curves["data", kind, 4, 1]
    assert costs.exchange_seconds(collective).value == link.seconds(nbytes, messages=1) > 0
