"""Hosts that meet: the cached figures of their link, and the folder that they would save to."""

from __future__ import annotations

import base64
import itertools
import os
import threading
import time
import zlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import cast
from unittest import mock

import pytest
import torch
from torch import nn
from torch.distributed import HashStore

import steelyard as sy
from steelyard.comm.devices import CPU
from steelyard.errors import BadInput, CheckpointError, Mismatch, RankFailed, RanksDiffer
from steelyard.hardware.cluster import Cluster
from steelyard.hardware.host_os import this_device
from steelyard.hardware.link import Link
from steelyard.ir.graph import Node
from steelyard.ir.metrics import Estimate
from steelyard.ir.parallel_layout import ParallelLayout
from steelyard.measure.cache import CostCache
from steelyard.measure.links.background_load import BackgroundLoad
from steelyard.measure.links.exchange_sizes import SIZES
from steelyard.measure.links.host_pairs import latency_of, name_of, rate_of
from steelyard.measure.links.link_figures import BETWEEN_HOSTS
from steelyard.measure.links.probe import (
    measured_ranks,
    remember_hosts,
    remembered_probe,
)
from steelyard.planner.compatibility import target_differences
from steelyard.planner.cost_provider import CostProvider
from steelyard.planner.multi_host import (
    HostRendezvous,
    _is_unchanged,
    check_neighbours,
    check_seen_by_all,
    meeting,
    on_own_cores,
    planner_of,
)
from steelyard.plans.plan import Target
from steelyard.predict.cost_table import CostTable, OperatorCost, Survey
from steelyard.run.launch.environment import RankInfo
from tests.harness import in_a_hurry
from tests.torch.measure.links.test_worker import said_of

LINK = Link(kind="", latency_seconds=1e-4, bytes_per_second=1e7)
LOOK = (1e-4, 1e-1)
_SECONDS = 60.0


def test_the_link_between_hosts_is_stored_once_measured(tmp_path: Path) -> None:
    cache = CostCache(tmp_path / "costs.sqlite")
    with pytest.raises(BadInput, match="has not measured its links to 2 other"):
        measured_ranks(3, hosts=3, cache=cache)
    said = [{**said_of(LINK, 3), "product": product} for product in (1e-3, 2e-3, 1e-3)]
    remember_hosts(said, ["a", "b", "c"], hosts=3, session=LOOK, cache=cache)
    measured = measured_ranks(3, hosts=3, cache=cache)
    assert measured.link.kind == BETWEEN_HOSTS
    assert measured.link.bytes_per_second == pytest.approx(1e7)
    assert measured.speeds == (1.0, 0.5, 1.0)
    assert measured.slots is None
    assert measured.slotted is None


def test_measurements_of_other_hosts_are_not_reused(tmp_path: Path) -> None:
    cache = CostCache(tmp_path / "costs.sqlite")
    remember_hosts([said_of(LINK, 2)] * 2, ["a", "b"], hosts=2, session=LOOK, cache=cache)
    assert remembered_probe(["a", "b"], hosts=2, cache=cache) == LOOK
    assert remembered_probe(["a", "c"], hosts=2, cache=cache) is None
    assert remembered_probe(["b", "a"], hosts=2, cache=cache) is None
    other = CostCache(tmp_path / "other.sqlite")
    assert remembered_probe(["a", "b"], hosts=2, cache=other) is None


@pytest.mark.parametrize("products", [(2e-3, 1e-3), (1e-3, 2e-3)])
def test_a_slow_first_host_is_stored_like_any_other(
    tmp_path: Path, products: tuple[float, ...]
) -> None:
    cache = CostCache(tmp_path / "costs.sqlite")
    said = [{**said_of(LINK, 2), "product": product} for product in products]
    remember_hosts(said, ["a", "b"], hosts=2, session=LOOK, cache=cache)
    assert remembered_probe(["a", "b"], hosts=2, cache=cache) == LOOK


@pytest.mark.parametrize(
    ("speeds", "each", "planner"),
    [
        ((1.0, 1.0), 1, 0),
        ((1.0, 1.1), 1, 0),  # equal within the noise
        ((0.5, 1.0), 1, 1),
        ((0.5, 0.9, 1.0), 1, 2),
        ((1.0, 0.5), 1, 0),
        ((0.5, 0.5, 1.0, 1.0), 2, 2),
    ],
)
def test_the_fastest_host_measures_and_plans(
    speeds: tuple[float, ...], each: int, planner: int
) -> None:
    assert planner_of(speeds, each=each) == planner


def test_another_host_than_the_first_may_plan_for_all() -> None:
    store = HashStore()
    one, two, three = (
        HostRendezvous(who=RankInfo(rank=n, size=3, hosts=3), store=store, planner=1)
        for n in range(3)
    )
    assert [met.is_planner for met in (one, two, three)] == [False, True, False]
    heard: list[str] = []
    hearing = [threading.Thread(target=lambda m=m: heard.append(m.receive())) for m in (one, three)]
    for thread in hearing:
        thread.start()
    with two.with_background_load(), mock.patch("steelyard.planner.multi_host.work_until"):
        beside = BackgroundLoad(1, this_device(ranks=1), hosts=3)
        with beside.at_work():
            pass
    two.broadcast("a plan")
    for thread in hearing:
        thread.join(timeout=_SECONDS)
    assert heard == ["a plan"] * 2


def test_measurements_of_a_slow_first_host_do_not_replace_those_of_the_fastest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The operators are measured on a host of half the speed: it takes the measured time, and
    the fastest host half of that. Before, such a host was refused after minutes of measuring."""
    prices = []
    for products in ((1e-3, 2e-3), (2e-3, 1e-3)):
        path = tmp_path / f"{products[0]}.sqlite"
        monkeypatch.setenv("STEELYARD_CACHE", str(path))
        said = [{**said_of(LINK, 2), "product": product} for product in products]
        remember_hosts(said, ["a", "b"], hosts=2, session=LOOK, cache=CostCache(path))
        prices.append(CostProvider(Cluster.here(ranks=2, hosts=2), on_progress=lambda _: None))
    node = SimpleNamespace(
        is_free=False, is_transfer=False, signature="s", phase=None, collective=None
    )
    measured = CostTable(
        device=prices[0].costs.device,
        operators={"s": OperatorCost(seconds=Estimate.exactly(0.2), workspace_bytes=0)},
    )
    took = []
    for own in prices:
        with mock.patch(
            "steelyard.planner.cost_provider.measure_operators", return_value=(measured, Survey())
        ):
            found, _ = own._measure_operators([])
        own._operators.update(found.operators)
        took.append([own.costs.of_rank(n).seconds(cast("Node", node)).value for n in range(2)])
    assert took[0] == pytest.approx([0.2, 0.4])
    assert took[1] == pytest.approx([0.2, 0.1])


@pytest.mark.parametrize(
    ("now", "is_same"),
    [
        (LOOK, True),
        ((1.2e-4, 1.2e-1), True),
        ((1e-4, 1.3e-1), False),  # a third slower
        ((1e-4, 0.7e-1), False),
        ((5e-3, 1e-1), False),  # as fast, but with a higher latency
        ((4e-4, 1e-1), True),  # the difference of any two measurements
    ],
)
def test_a_changed_link_is_detected(now: tuple[float, float], is_same: bool) -> None:
    with mock.patch("steelyard.planner.multi_host.probe_link", return_value=now):
        assert _is_unchanged(LOOK, CPU) == is_same


def test_an_unwritable_cache_keeps_the_measurements_of_this_process(tmp_path: Path) -> None:
    (tmp_path / "a file").touch()
    cache = CostCache(tmp_path / "a file" / "costs.sqlite")
    remember_hosts([said_of(LINK, 5)] * 5, list("abcde"), hosts=5, session=LOOK, cache=cache)
    assert measured_ranks(5, hosts=5, cache=cache).link.bytes_per_second == pytest.approx(1e7)


def test_each_host_has_one_rank_and_all_of_its_machine() -> None:
    alone, among = Cluster.here(), Cluster.here(ranks=2, hosts=2)
    assert among.num_devices == 2
    assert among.ranks_of_a_host == 1
    assert among.device.memory_bytes == alone.device.memory_bytes
    assert among.device.threads == alone.device.threads
    assert among.fingerprint != Cluster.here(ranks=2).fingerprint
    for ranks, hosts in ((3, 2), (1, 2), (2, 0), (2, True), (2, 1.0)):
        with pytest.raises(BadInput):
            Cluster.here(ranks=ranks, hosts=hosts)  # type: ignore[arg-type]


def test_ranks_of_a_host_share_it(monkeypatch: pytest.MonkeyPatch) -> None:
    alone, among = Cluster.here(ranks=2), Cluster.here(ranks=6, hosts=3)
    assert (among.num_devices, among.ranks_of_a_host) == (6, 2)
    assert among.device == alone.device
    assert among.fingerprint != Cluster.here(ranks=6, hosts=6).fingerprint
    monkeypatch.setattr("steelyard.hardware.host_os.num_cores", lambda: 2)
    Cluster.here(ranks=48, hosts=3)
    with pytest.raises(BadInput, match="a cluster of 51 ranks"):
        Cluster.here(ranks=51, hosts=3)


def test_links_within_a_host_are_stored_separately(tmp_path: Path) -> None:
    cache = CostCache(tmp_path / "costs.sqlite")
    near = Link(kind="", latency_seconds=1e-5, bytes_per_second=1e9)
    among = {f"near {name}": seconds for name, seconds in said_of(near, 3).items()}
    # The fastest rank of a host represents it: the second host is half as fast.
    products = (1.3e-3, 1e-3, 1e-3, 2e-3, 3e-3, 2e-3)
    said = [{**said_of(LINK, 6), **among, "product": product} for product in products]
    names = ["a"] * 3 + ["b"] * 3
    remember_hosts(said, names, hosts=2, session=LOOK, cache=cache)
    assert remembered_probe(names, hosts=2, cache=cache) == LOOK
    measured = measured_ranks(6, hosts=2, cache=cache)
    assert measured.link.bytes_per_second == pytest.approx(1e7)
    assert measured.near is not None
    assert measured.near.bytes_per_second == pytest.approx(1e9)
    assert measured.near.latency_seconds == pytest.approx(1e-5)
    assert measured.near.disturbs == 0.25
    assert measured.speeds == (1.0,) * 3 + (0.5,) * 3
    with pytest.raises(BadInput, match="has not measured its links to 5 other"):
        measured_ranks(6, hosts=6, cache=cache)


def test_cores_are_restricted_to_a_rank_only_while_it_measures() -> None:
    cores = os.sched_getaffinity(0)
    own = []
    for local_rank in range(2):
        with on_own_cores(RankInfo(rank=2 + local_rank, size=4, local_rank=local_rank, hosts=2)):
            own.append(os.sched_getaffinity(0))
        assert os.sched_getaffinity(0) == cores
    assert all(len(part) == max(1, len(cores) // 2) for part in own)
    assert set().union(*own) <= cores
    assert len(cores) == 1 or own[0].isdisjoint(own[1])


@pytest.mark.parametrize(
    ("places", "cores", "said"),
    [
        ((0, 0, 1, 1), ({0}, {0}, {0}, {0}), "rank 1 is local rank 0 of its host"),
        # A rank would get fewer cores than it was given, because its part would be divided again.
        ((0, 1, 0, 1), ({0, 1}, {0, 1}, {0}, {1}), "rank 3 may use different cores than rank 2"),
    ],
)
def test_ranks_that_are_not_neighbours_on_the_same_cores_are_refused_on_all(
    places: tuple[int, ...], cores: tuple[set[int], ...], said: str
) -> None:
    who = RankInfo(rank=1, size=4, local_rank=0, hosts=2)
    everyones = list(zip(places, cores, strict=True))
    with (
        mock.patch("steelyard.planner.multi_host.gathered", return_value=everyones),
        pytest.raises(BadInput, match=said),
    ):
        check_neighbours(who)


def test_a_plan_for_another_number_of_hosts_is_refused() -> None:
    RankInfo(size=2, hosts=2).check_size(2, planned_hosts=2)
    RankInfo(size=2).check_size(2)
    with pytest.raises(Mismatch, match="for 2 hosts, but the ranks are on 1"):
        RankInfo(size=2).check_size(2, planned_hosts=2)
    with pytest.raises(Mismatch, match="for ranks of one host, but the ranks are on 2"):
        RankInfo(size=2, hosts=2).check_size(2)


def _on_gpus(cluster: Cluster) -> Cluster:
    """Return hosts as planned on GPUs; the machine has one GPU of a kind for each rank of a
    host."""
    members = (replace(m, of=replace(m.of, kind="cuda NVIDIA H100")) for m in cluster.tree.members)
    return replace(cluster, tree=replace(cluster.tree, members=tuple(members)))


@pytest.mark.parametrize("at", [lambda cluster: cluster, _on_gpus])
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_plan_that_uses_one_of_the_hosts_belongs_to_all_that_met(
    at: Callable[[Cluster], Cluster], ranks: int
) -> None:
    """This also holds on GPUs, which Cluster.here() does not know; one rank has all cores of its
    host."""
    planned = Target(
        model="m", graph="g", decomposition="python-2", runner="python", torch="2.13", batch=(),
        cluster=at(Cluster.here(4, hosts=2, speeds=(1,) * 4)).fingerprint, ranks=4, hosts=2,
    )  # fmt: skip
    here = at(Cluster.here(ranks, speeds=(1,) * ranks)).fingerprint
    run = replace(planned, ranks=ranks, hosts=1, cluster=here)

    def notes(theirs: Target) -> list[str]:
        with mock.patch(
            "steelyard.planner.compatibility.local_cluster", lambda torch_device, c, cache: at(c)
        ):
            return list(target_differences(run, theirs))

    assert notes(planned) == []
    (note,) = notes(replace(planned, cluster="another"))
    assert "planned for another machine" in note
    fewer = BadInput("two ranks, one GPU", expected="two", remedy="plan for one")
    with mock.patch("steelyard.planner.compatibility.local_cluster", side_effect=fewer):
        (note,) = target_differences(run, planned)
    assert "planned for another machine" in note
    with pytest.raises(BadInput, match="of 4 ranks"):
        notes(replace(planned, speeds=(1.0, 1.0, 0.5)))


@pytest.mark.parametrize(
    ("ranks", "hosts", "said"),
    [("2", "1", "ranks on several hosts"), ("3", "2", "the same number of ranks on each host")],
)
def test_ranks_of_one_host_or_of_some_more_than_of_others_are_not_planned_for(
    monkeypatch: pytest.MonkeyPatch, ranks: str, hosts: str, said: str
) -> None:
    environ = {"RANK": "0", "WORLD_SIZE": ranks, "LOCAL_RANK": "0"}
    environ |= {"GROUP_WORLD_SIZE": hosts, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(BadInput, match=said), meeting({}):
        pass


def test_all_hosts_receive_messages_of_the_first_and_notice_its_exit() -> None:
    store = HashStore()
    first, second = (
        HostRendezvous(who=RankInfo(rank=n, size=2, hosts=2), store=store) for n in range(2)
    )
    heard: list[str] = []
    hearing = threading.Thread(target=lambda: heard.append(second.receive()))
    hearing.start()
    plan = "".join(map(chr, range(32, 50_000))) * 3
    with mock.patch("steelyard.planner.multi_host._PIECE", 1000):
        first.broadcast(plan)
    hearing.join()
    assert heard == [plan]
    silent = HostRendezvous(who=RankInfo(rank=1, size=2, hosts=2), store=HashStore())
    with (
        mock.patch("steelyard.planner.multi_host._PLANNING_SECONDS", 0.1),
        pytest.raises(RankFailed, match="rank 0 exited without sending a plan"),
    ):
        silent.receive()


def _packed(text: bytes) -> str:
    return base64.b64encode(zlib.compress(text)).decode()


@pytest.mark.parametrize(
    ("count", "piece"),
    [
        ("many", _packed(b"a plan")),
        ("-1", _packed(b"a plan")),
        (str(2**62), _packed(b"a plan")),
        ("1", "no base64 at all"),
        ("1", base64.b64encode(b"nothing packed").decode()),
        ("1", _packed(b"a plan")[:12]),
        ("1", _packed(b"\xff\xfe")),
        # The packed text is small, and a thousand times as large when unpacked.
        ("1", _packed(bytes(2 << 20))),
    ],
)
def test_malformed_messages_of_the_first_host_are_refused_in_three_lines(
    count: str, piece: str
) -> None:
    store = HashStore()
    second = HostRendezvous(who=RankInfo(rank=1, size=2, hosts=2), store=store)
    store.set("told/0", piece)
    store.set("told", count)
    with (
        mock.patch("steelyard.planner.multi_host._MAX_TEXT_BYTES", 1 << 20),
        pytest.raises(RankFailed, match="sent data that is not a plan") as refused,
    ):
        second.receive()
    assert len(str(refused.value).splitlines()) == 3


def test_other_hosts_run_a_background_load_only_during_measurements() -> None:
    store = HashStore()
    first, second, third = (
        HostRendezvous(who=RankInfo(rank=n, size=3, hosts=3), store=store) for n in range(3)
    )
    at_work = [threading.Semaphore(0) for _ in range(2)]
    rested = [threading.Semaphore(0) for _ in range(2)]

    def works(is_over: Callable[[], bool]) -> None:
        which = int(threading.current_thread().name)
        at_work[which].release()
        while not is_over():
            time.sleep(0.001)
        rested[which].release()

    heard: list[str] = []
    hearing = [
        threading.Thread(target=lambda one=one: heard.append(one.receive()), name=str(n))
        for n, one in enumerate((second, third))
    ]
    with mock.patch("steelyard.planner.multi_host.work_until", works):
        for one in hearing:
            one.start()
        with first.with_background_load():
            beside = BackgroundLoad(1, this_device(ranks=1), hosts=3)
            for _ in range(2):
                with beside.at_work():
                    assert all(one.acquire(timeout=_SECONDS) for one in at_work)
                    assert not any(one.acquire(blocking=False) for one in rested)
                assert all(one.acquire(timeout=_SECONDS) for one in rested)
        first.broadcast("a plan")
        for one in hearing:
            one.join()
    assert heard == ["a plan"] * 2
    assert (beside.hosts, beside.notes) == (3, ())
    alone = BackgroundLoad(1, this_device(ranks=1), hosts=3)
    assert alone.hosts == 1, "what is measured then is remembered as what it is"
    assert alone.notes


def test_all_hosts_measure_the_link_once_for_each_device_kind(
    tmp_path: Path,
) -> None:
    store, cache = HashStore(), CostCache(tmp_path / "costs.sqlite")
    first, second = (
        HostRendezvous(who=RankInfo(rank=n, size=2, hosts=2), store=store) for n in range(2)
    )
    measuring: list[tuple[int, int, str]] = []

    def measured(one: HostRendezvous, number: int, torch_device: torch.device) -> None:
        measuring.append((one.who.rank, number, torch_device.type))
        said = [said_of(LINK, 2)] * 2
        remember_hosts(
            said, ["a", "b"], hosts=2, torch_device=torch_device, session=LOOK, cache=cache
        )

    heard: list[str] = []
    hearing = threading.Thread(target=lambda: heard.append(second.receive()))
    with mock.patch.object(HostRendezvous, "_measure", measured):
        hearing.start()
        with first.with_background_load():
            for _ in range(2):
                assert measured_ranks(2, hosts=2, cache=cache).link.bytes_per_second > 0
        first.broadcast("a plan")
        hearing.join(timeout=_SECONDS)
    assert heard == ["a plan"]
    assert sorted(measuring) == [(0, 1, "cpu"), (1, 1, "cpu")]


def test_a_host_that_could_not_measure_reports_it() -> None:
    store = HashStore()
    first, second = (
        HostRendezvous(who=RankInfo(rank=n, size=2, hosts=2), store=store) for n in range(2)
    )
    differs = RanksDiffer(
        "rank 1 differs from rank 0 in the kind of device",
        expected="the same",
        remedy="none",
        rank=1,
        item="kind of device",
    )
    raised: list[BaseException] = []

    def hear() -> None:
        try:
            second.receive()
        except RanksDiffer as error:
            raised.append(error)

    hearing = threading.Thread(target=hear)
    with mock.patch.object(HostRendezvous, "_measure", side_effect=differs):
        hearing.start()
        with first.with_background_load(), pytest.raises(RanksDiffer):
            measured_ranks(2, hosts=2)
        assert hearing.is_alive(), "the first has told nothing yet"
        first.broadcast("it failed")
        hearing.join(timeout=_SECONDS)
    assert raised == [differs]


def test_links_between_gpus_of_hosts_are_measured_at_network_sizes(tmp_path: Path) -> None:
    cache, gpu = CostCache(tmp_path / "costs.sqlite"), torch.device("cuda", 0)
    near = Link(kind="", latency_seconds=1e-5, bytes_per_second=1e11)
    of_a_host = said_of(near, 2, sizes=SIZES["cuda"]).items()
    said = [said_of(LINK, 4) | {f"near {name}": seconds for name, seconds in of_a_host}] * 4
    names = ["a", "a", "b", "b"]
    with mock.patch("steelyard.measure.links.probe._on_gpus", return_value=", on 2 of a kind"):
        remember_hosts(said, names, hosts=2, torch_device=gpu, session=LOOK, cache=cache)
        measured = measured_ranks(4, hosts=2, torch_device=gpu, cache=cache)
        assert remembered_probe(names, hosts=2, torch_device=gpu, cache=cache) == LOOK
    assert measured.link.bytes_per_second == pytest.approx(1e7)
    assert measured.near is not None
    assert measured.near.bytes_per_second == pytest.approx(1e11)
    assert (measured.slots, measured.slotted) == (None, None)
    assert remembered_probe(names, hosts=2, cache=cache) is None, "of processors nothing is known"


@pytest.mark.parametrize("failure", ["absent", "stopped"])
def test_hosts_learn_that_another_did_not_join_the_background_load(failure: str) -> None:
    store = HashStore()
    first, second = (
        HostRendezvous(who=RankInfo(rank=n, size=3, hosts=3), store=store) for n in range(2)
    )
    heard: list[str] = []
    hearing = threading.Thread(target=lambda: heard.append(second.receive()))
    hearing.start()
    expected, settings = RankFailed, {"_START_SECONDS": 1.0, "_RECEIPT_SECONDS": 1.0}
    if failure == "stopped":
        expected, settings = KeyboardInterrupt, {"_RECEIPT_SECONDS": 1.0}  # type: ignore[assignment]
        store.set("at work/1/2", "")
    with mock.patch.multiple("steelyard.planner.multi_host", **settings):
        with first.with_background_load():
            company = BackgroundLoad(1, this_device(ranks=1), hosts=3)
            with pytest.raises(expected), company.at_work():
                raise KeyboardInterrupt
        first.broadcast("it failed")
        hearing.join(timeout=_SECONDS)
    assert heard == ["it failed"]


def test_hosts_learn_that_another_did_not_join_the_measurement() -> None:
    store = HashStore()
    first, second = (
        HostRendezvous(who=RankInfo(rank=n, size=3, hosts=3), store=store) for n in range(2)
    )
    heard: list[str] = []
    hearing = threading.Thread(target=lambda: heard.append(second.receive()))
    settings = {"_START_SECONDS": 1.0, "_RECEIPT_SECONDS": 1.0}
    with (
        mock.patch.multiple("steelyard.planner.multi_host", **settings),
        mock.patch.object(HostRendezvous, "_measure") as measure,
    ):
        hearing.start()
        with (
            first.with_background_load(),
            pytest.raises(RankFailed, match="did not start its load"),
        ):
            measured_ranks(3, hosts=3)
        first.broadcast("it failed")
        hearing.join(timeout=_SECONDS)
    assert heard == ["it failed"]
    assert not measure.called, "not all had come"


class _OneOfTwo:
    """One of two hosts, which run alternately in one process."""

    def __init__(self, *, saves: bool, told: list[str], unseen: list[int]) -> None:
        self.saves = saves
        self._told, self._unseen = told, unseen

    def words(self, text: str) -> str:
        if self.saves:
            self._told.append(text)
        return self._told[-1]

    def most(self, number: int) -> int:
        self._unseen.append(number)
        if self.saves:  # the other process reads meanwhile
            self.meanwhile()
        return max(self._unseen)

    def meanwhile(self) -> None:
        """Tests replace this with the work of the other host."""


def test_a_folder_of_checkpoints_is_one_that_all_see(tmp_path: Path) -> None:
    for theirs in (tmp_path / "one", tmp_path / "other"):
        told: list[str] = []
        unseen: list[int] = []
        first = _OneOfTwo(saves=True, told=told, unseen=unseen)
        second = _OneOfTwo(saves=False, told=told, unseen=unseen)
        refused: list[BadInput] = []

        def other_looks(there: Path = theirs, second: _OneOfTwo = second) -> None:
            try:
                check_seen_by_all(there, second)  # type: ignore[arg-type]
            except BadInput as error:
                refused.append(error)  # noqa: B023

        first.meanwhile = other_looks  # type: ignore[method-assign]
        if theirs.name == "one":
            check_seen_by_all(tmp_path / "one", first)  # type: ignore[arg-type]
            assert not refused
        else:
            with pytest.raises(BadInput, match="is not the same folder on all hosts"):
                check_seen_by_all(tmp_path / "one", first)  # type: ignore[arg-type]
            assert len(refused) == 1, "both end, and neither trains on"
        assert not list((tmp_path / "one").iterdir())


def test_a_folder_that_cannot_be_written_to_is_named_on_all(tmp_path: Path) -> None:
    (tmp_path / "a file").touch()
    told: list[str] = []
    for saves in (True, False):
        one = _OneOfTwo(saves=saves, told=told, unseen=[])
        with pytest.raises(CheckpointError, match=r"cannot write to .* Not a dir"):
            check_seen_by_all(tmp_path / "a file" / "saved", one)  # type: ignore[arg-type]


def _joins(rates: list[float]) -> dict[str, float]:
    """Return the measurements of three hosts with these link rates, with one rank each."""
    found = {}
    for i, j in itertools.combinations(range(len(rates)), 2):
        found[latency_of(i, j)] = LINK.latency_seconds
        found[rate_of(i, j)] = min(rates[i], rates[j])
    return found


def _exchanged_among_two(rate: float) -> dict[str, float]:
    said = said_of(replace(LINK, bytes_per_second=rate), 2)
    timed = {name_of(2, what): said[what] for what in ("small", "middle", "large", "disturbs")}
    return timed | {name_of(2, "least small"): 1e-4, name_of(2, "least middle"): 1e-3}


def _three_of_which(slow: int, cache: CostCache) -> None:
    """Return three hosts that have met, one of which is behind a link of 30 Mbit/s."""
    rates = [119e6] * 3
    rates[slow] = 3.7e6
    joins = _joins(rates) | _exchanged_among_two(119e6)
    said = [said_of(replace(LINK, bytes_per_second=3.7e6), 3)] * 3
    remember_hosts(said, ["a", "b", "c"], hosts=3, session=LOOK, joins=joins, cache=cache)


@pytest.mark.parametrize("slow", range(3))
def test_the_host_behind_a_slow_link_is_found_among_three(tmp_path: Path, slow: int) -> None:
    cache = CostCache(tmp_path / "costs.sqlite")
    _three_of_which(slow, cache)
    measured = measured_ranks(3, hosts=3, cache=cache)
    assert measured.link.bytes_per_second == pytest.approx(3.7e6)
    assert measured.host_rates[slow] == pytest.approx(3.7e6)
    assert sorted(measured.host_rates)[1:] == pytest.approx([119e6] * 2)
    two = measured.subsets[2]
    assert two.ranks == tuple(n for n in range(3) if n != slow)
    assert two.link is not None
    assert two.handing is not None
    assert two.link.bytes_per_second == pytest.approx(119e6)
    assert two.handing.bytes_per_second == pytest.approx(119e6)
    # The costs are cached as if these two hosts had met alone, so that a run need not measure
    # again.
    names = [name for n, name in enumerate("abc") if n != slow]
    assert remembered_probe(names, hosts=2, cache=cache) == (1e-4, 1e-3)
    alone = measured_ranks(2, hosts=2, cache=cache)
    assert (alone.link, alone.handing) == (two.link, two.handing)
    assert remembered_probe(["a", "x"], hosts=2, cache=cache) is None


def test_equally_connected_hosts_are_taken_in_order(tmp_path: Path) -> None:
    cache = CostCache(tmp_path / "costs.sqlite")
    said = [said_of(LINK, 3)] * 3
    joins = _joins([1e7, 1.1e7, 0.9e7])
    remember_hosts(said, ["a", "b", "c"], hosts=3, session=LOOK, joins=joins, cache=cache)
    measured = measured_ranks(3, hosts=3, cache=cache)
    assert measured.subsets == {}
    # Plans for two of the hosts can be predicted, and the hosts measure when they meet alone.
    assert measured_ranks(2, hosts=2, cache=cache).link == measured.link
    assert remembered_probe(["a", "b"], hosts=2, cache=cache) is None


def test_figures_from_before_pairs_were_timed_are_measured_again(tmp_path: Path) -> None:
    cache = CostCache(tmp_path / "costs.sqlite")
    remember_hosts([said_of(LINK, 3)] * 3, ["a", "b", "c"], hosts=3, session=LOOK, cache=cache)
    assert remembered_probe(["a", "b", "c"], hosts=3, cache=cache) is None


@pytest.mark.slow
def test_a_plan_uses_the_two_well_connected_hosts_and_names_the_third(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    costs = tmp_path / "costs.sqlite"
    monkeypatch.setenv("STEELYARD_CACHE", str(costs))
    _three_of_which(1, CostCache())
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(512, 1024), nn.ReLU(), nn.Linear(1024, 10))
    batch = torch.randn(2048, 512), torch.randint(10, (2048,))

    def loss(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return nn.functional.cross_entropy(model(batch[0]), batch[1])

    with in_a_hurry(costs):
        cluster = Cluster.here(ranks=3, hosts=3, speeds=(1, 1, 1))
        planned = sy.plan(model, loss, batch, cluster=cluster)
        decisions = planned.plan.decisions
        assert ParallelLayout.of(decisions.rules).num_ranks == 2
        assert decisions.used_ranks == (0, 2)
        (note,) = (n for n in planned.plan.notes if "link carries" in n)
        assert note.startswith("host 1's link carries 3.53 MiB/s, the others 113 MiB/s: with it a ")
        planned.save(tmp_path / "three.plan.toml")
        loaded = sy.load(tmp_path / "three.plan.toml", model, loss, batch)
    assert loaded.plan.decisions == decisions
    # The prediction is for the two hosts that the plan uses.
    assert loaded.predicted.communication_bytes == planned.predicted.communication_bytes
    assert loaded.predicted.communication_seconds.value == pytest.approx(
        planned.predicted.communication_seconds.value
    )
    assert not [n for n in loaded.plan.notes if "another machine" in n]
