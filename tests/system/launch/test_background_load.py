"""Background load: it runs while it is requested, and only then."""

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import mock

import pytest
import torch

from steelyard.errors import RunFailed
from steelyard.hardware.cluster import Device
from steelyard.hardware.host_os import cores_of, this_device
from steelyard.measure.cache import CostCache
from steelyard.measure.links import background_load as company
from steelyard.measure.links.background_load import BackgroundLoad
from steelyard.measure.operators.benchmark import measure_operators
from tests.support.calls import graph_of
from tests.torch.measure.operators.test_benchmark import some_graph

DEVICE: Device = this_device(ranks=2)
SECONDS = 60.0


@pytest.fixture
def two() -> Iterator[BackgroundLoad]:
    made = BackgroundLoad(2, DEVICE)
    made.is_given([some_graph()])
    yield made
    made.dismiss()


def the_other(two: BackgroundLoad) -> company._LoadProcess:
    (other,) = two._processes.values()
    return other


def worked_seconds(other: company._LoadProcess) -> float:
    """Return the processor time of that process so far."""
    fields = Path(f"/proc/{other._process.pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def is_soon(what: Callable[[], bool]) -> bool:
    until = time.monotonic() + SECONDS
    while time.monotonic() < until:
        if what():
            return True
        time.sleep(0.02)
    return False


def test_background_load_runs_only_during_measurements(two: BackgroundLoad) -> None:
    with two.at_work():
        other = the_other(two)
        before = worked_seconds(other)
        assert is_soon(lambda: worked_seconds(other) > before + 0.1)
        assert os.sched_getaffinity(other._process.pid) == cores_of(1, 2)

    def is_at_rest() -> bool:
        before = worked_seconds(other)
        time.sleep(0.2)
        return worked_seconds(other) == before

    assert is_soon(is_at_rest)
    with two.at_work():
        assert the_other(two) is other
        before = worked_seconds(other)
        assert is_soon(lambda: worked_seconds(other) > before)


def test_an_idle_worker_exits_and_is_restarted(
    two: BackgroundLoad, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(company, "_PATIENCE_SECONDS", 0.1)
    with two.at_work():
        first = the_other(two)
    assert is_soon(lambda: first.has_ended)
    assert first._process.returncode == 0
    with two.at_work():
        assert the_other(two) is not first
        assert not the_other(two).has_ended


def test_a_worker_that_exits_on_a_request_is_restarted(two: BackgroundLoad) -> None:
    with two.at_work():
        first = the_other(two)
    first._socket.close()  # it notices that the connection is closed
    assert first._process.wait(SECONDS) == 0
    said = iter([False])  # as the state appeared a moment before
    seen = property(lambda other: next(said, other._process.poll() is not None))
    with mock.patch.object(company._LoadProcess, "has_ended", seen), two.at_work():
        assert the_other(two) is not first


def test_a_failing_worker_is_named_with_its_stderr(
    two: BackgroundLoad, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    broken = tmp_path / "python"
    broken.write_text("#!/bin/sh\necho no room left >&2\nexit 3\n")
    broken.chmod(0o755)
    monkeypatch.setattr("sys.executable", str(broken))
    with (
        pytest.raises(RunFailed, match="a load process reported no room left") as error,
        two.at_work(),
    ):
        pass
    assert len(str(error.value).splitlines()) == 3


def test_a_killed_worker_is_replaced(two: BackgroundLoad) -> None:
    with two.at_work():
        first = the_other(two)
    first._process.kill()
    first._process.wait()
    with two.at_work():
        assert the_other(two) is not first


def test_a_worker_that_dies_fails_the_measurement(two: BackgroundLoad) -> None:
    def measured() -> None:
        with two.at_work():
            the_other(two)._process.kill()
            the_other(two)._process.wait()

    with pytest.raises(RunFailed, match="exit code -9"):
        measured()


def test_a_dismissed_worker_leaves_no_open_files(two: BackgroundLoad) -> None:
    with two.at_work():
        other = the_other(two)
    two.dismiss()
    assert other._process.returncode is not None
    assert other._socket.closed
    with two.at_work():
        assert the_other(two) is not other


def test_operators_too_large_for_the_background_load_are_reported() -> None:
    huge = torch.empty(1 << 46, device="meta")
    idle = BackgroundLoad(2, DEVICE)
    idle.is_given([graph_of(("aten.relu.default", [huge], [torch.empty_like(huge)]))])
    with idle.at_work():
        assert idle.notes == (company._IDLE,)
    idle.dismiss()


@pytest.mark.parametrize("world", ["1", "2", "many"])
def test_one_rank_and_launched_ranks_have_no_background_load(
    world: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", world)
    beside = BackgroundLoad(1 if world == "many" else int(world), DEVICE)
    beside.is_given([some_graph()])
    with beside.at_work():
        assert not beside._processes


def test_loaded_and_unloaded_measurements_are_kept_apart(
    two: BackgroundLoad, tmp_path: Path
) -> None:
    cache = CostCache(tmp_path / "costs.sqlite")
    beside = mock.Mock(side_effect=two.at_work)
    torch.set_num_threads(1)
    for sharers, begun in ((1, 0), (2, 1), (2, 1)):
        how = {"beside": beside, "sharers": sharers} if sharers > 1 else {}
        _, survey = measure_operators([some_graph()], DEVICE, cache=cache, **how)  # type: ignore[arg-type]
        assert beside.call_count == begun
        assert bool(survey.measured) == (survey.known == 0)


def test_measurements_beside_other_hosts_are_stored_separately(tmp_path: Path) -> None:
    cache = CostCache(tmp_path / "costs.sqlite")
    for hosts, is_new in ((1, True), (2, True), (3, True), (2, False)):
        _, survey = measure_operators([some_graph()], DEVICE, cache=cache, hosts=hosts)
        assert bool(survey.measured) == is_new
