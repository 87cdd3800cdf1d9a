"""The bytes that leave hosts with several ranks each, by network counters, are as predicted."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from benchmarks.hosts import NoHosts, address, hosts
from steelyard.hardware.link import Link
from steelyard.predict.collectives.host_groups import RanksPerHost
from tests.system.dist.spread import TIMES, cases

pytestmark = [pytest.mark.dist, pytest.mark.slow, pytest.mark.xdist_group("between hosts")]

_ROOT = Path(__file__).resolve().parents[3]
_NEAR = Link(kind="near", latency_seconds=0.0, bytes_per_second=1e12)
# Packet headers, gloo's own headers, acknowledgements, and two barriers.
_MOST_MORE, _SAID = 1.03, 20_000


@pytest.mark.parametrize(
    ("count", "each"),
    [(2, 2), pytest.param(3, 2, marks=pytest.mark.long), pytest.param(2, 3, marks=pytest.mark.long)],
)
def test_bytes_leaving_the_busiest_host_are_those_predicted(
    count: int, each: int, tmp_path: Path
) -> None:
    ranks = count * each
    try:
        with hosts(count) as made:
            environ = {**os.environ, "OMP_NUM_THREADS": "1"}
            environ["PYTHONPATH"] = os.pathsep.join((str(_ROOT), os.environ.get("PYTHONPATH", "")))
            started = []
            for rank in range(ranks):
                said = [rank, ranks, each, address(0), tmp_path / f"{rank // each}.json"]
                command = [sys.executable, "-m", "tests.system.dist.spread", *map(str, said)]
                started.append(made.start(rank // each, command, environ))
            assert [one.wait(timeout=300) for one in started] == [0] * ranks
    except NoHosts as reason:
        pytest.skip(str(reason))
    found = [json.loads((tmp_path / f"{host}.json").read_text()) for host in range(count)]
    spread = RanksPerHost(num_ranks=ranks, each=each, near=_NEAR)
    crossing = 0
    for number, one in enumerate(cases(ranks)):
        left = max(host[number][0] for host in found)
        said = TIMES * one.sent_bytes * spread.leaving(one)
        assert said <= left <= _MOST_MORE * said + _SAID, (one, left / TIMES)
        crossing += said > 0
    assert 0 < crossing < len(cases(ranks))
