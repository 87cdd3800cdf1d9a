"""Three hosts, one behind a slow link: the plan uses the other two, and they train."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.hosts import Hosts, NoHosts, address, hosts
from steelyard.ir.parallel_layout import ParallelLayout
from steelyard.plan_files.plan_file import read_decisions
from steelyard.plan_files.prediction_file import read_plan

pytestmark = [
    pytest.mark.dist,
    pytest.mark.slow,
    pytest.mark.long,
    pytest.mark.xdist_group("between hosts"),
]

_ROOT = Path(__file__).resolve().parents[3]
_FAST, _SLOW = 1_000_000_000, 30_000_000
_PORTS = itertools.count(29617)
# The first host is behind the slow link; all ranks still meet at its store.
_SLOW_HOST = 0
_TRAIN = """
import torch
from torch import nn
from steelyard import Workload

def workload():
    torch.manual_seed(0)
    layers = [nn.Linear(512, 1024), nn.ReLU(), nn.Linear(1024, 512), nn.ReLU(), nn.Linear(512, 10)]
    def loss(model, batch):
        return nn.functional.cross_entropy(model(batch[0]), batch[1])
    batch = (torch.randn(8192, 512), torch.randint(10, (8192,)))
    make = lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9)
    return Workload(model=nn.Sequential(*layers), loss=loss, batches=[batch] * 1000, optimizer=make)
"""


@pytest.fixture(scope="module")
def three() -> Iterator[Hosts]:
    try:
        with hosts(3, bits_per_second=_FAST) as made:
            made.shape(_SLOW, host=_SLOW_HOST)
            yield made
    except NoHosts as reason:
        pytest.skip(str(reason))


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    made = [tmp_path_factory.mktemp(f"host{n}") for n in range(3)]
    for folder in made:
        (folder / "train.py").write_text(_TRAIN)
    return made


def _ended(
    three: Hosts, folders: list[Path], *asked: str, on: tuple[int, ...] = (0, 1, 2)
) -> list[int]:
    """Run this steelyard command on these hosts; ranks meet at the first one."""
    started, port = [], next(_PORTS)
    cores = sorted(os.sched_getaffinity(0))
    for node, host in enumerate(on):
        environ = {**os.environ, "STEELYARD_CACHE": str(folders[host] / "costs.sqlite")}
        environ["PYTHONPATH"] = os.pathsep.join((str(_ROOT), os.environ.get("PYTHONPATH", "")))
        run = [sys.executable, "-m", "torch.distributed.run", f"--nnodes={len(on)}"]
        run += ["--nproc-per-node=1", f"--node-rank={node}"]
        run += [f"--master-addr={address(on[0])}", f"--master-port={port}"]
        line = " ".join([*run, "-m", "tests.system.dist.hurried", *asked])
        said = f"cd {folders[host]} && unset GLOO_SOCKET_IFNAME && exec {line} >said 2>&1"
        # Each of the two hosts in use has a core of its own.
        core = str(cores[host % len(cores)])
        command = ["taskset", "-c", core, "sh", "-c", said]
        started.append(three.start(host, command, {**environ, "OMP_NUM_THREADS": "1"}))
    try:
        return [one.wait(timeout=420) for one in started]
    finally:
        _stop(started)


def _stop(started: list[subprocess.Popen[bytes]]) -> None:
    for one in started:
        one.kill()
        one.wait()


def _said(folder: Path) -> str:
    return (folder / "said").read_text()


@pytest.fixture(scope="module")
def planned(three: Hosts, folders: list[Path]) -> list[Path]:
    asked = ("plan", "train.py", "--speeds", "1,1,1")
    assert _ended(three, folders, *asked) == [0, 0, 0], "".join(map(_said, folders))
    return [folder / "train.plan.toml" for folder in folders]


def test_the_two_hosts_with_a_fast_link_are_chosen_and_the_slow_link_is_named(
    folders: list[Path], planned: list[Path]
) -> None:
    decisions = read_decisions(planned[0])
    assert ParallelLayout.of(decisions.rules) == ParallelLayout(data=2)
    assert decisions.used_ranks == (1, 2)
    assert len({path.read_text() for path in planned}) == 1
    said = _said(folders[0])
    assert f"host {_SLOW_HOST}'s link carries " in said
    assert "next: on hosts 1 and 2, torchrun --nnodes 2 --nproc-per-node 1 " in said


def test_all_hosts_are_started_and_an_unused_one_reports_it_and_exits(
    three: Hosts, folders: list[Path], planned: list[Path]
) -> None:
    assert _ended(three, folders, "run", "train.py", "--steps", "8") == [0, 0, 0], "".join(
        map(_said, folders)
    )
    assert "the plan uses hosts 1 and 2 of 3: host 0 only serves the rendezvous of the others" in (
        _said(folders[0])
    )
    # The first host that trains records the measurement.
    shown = read_plan(planned[1])
    predicted, measured = shown.plan.predicted, shown.measured
    assert measured.steps == 8
    assert measured.memory_bytes == pytest.approx(predicted.peak.nbytes, rel=0.01)
    assert measured.communication_bytes == predicted.metrics.communication_bytes.value
    assert measured.last_loss < measured.first_loss


def test_starting_only_the_two_planned_hosts_trains_the_same(
    three: Hosts, folders: list[Path], planned: list[Path]
) -> None:
    before = read_plan(planned[1]).measured
    asked = ("run", "train.py", "--steps", "8")
    assert _ended(three, folders, *asked, on=(1, 2)) == [0, 0], "".join(map(_said, folders))
    after = read_plan(planned[1]).measured
    assert (after.first_loss, after.last_loss) == (before.first_loss, before.last_loss)
