"""Two hosts joined by a slow link, which plan and train under torchrun."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.hosts import Hosts, NoHosts, address, hosts
from steelyard.trades.accumulate import AccumulateRule
from steelyard.trades.gradient_compression import TernaryGradientsRule
from steelyard.trades.shard_batch import ShardBatchRule
from steelyard.trades.shard_tensor import ShardTensorRule
from steelyard.plans.budget import Budget
from steelyard.ir.rule_kinds import GradientCompression
from steelyard.plan_files.prediction_file import read_plan
from steelyard.ir.parallel_layout import ALONE, ParallelLayout
from steelyard.plan_files.plan_file import read_decisions, write_decisions
from steelyard.trades.shard_pipeline import rules_for

pytestmark = [pytest.mark.dist, pytest.mark.slow, pytest.mark.long, pytest.mark.xdist_group("between hosts")]

_ROOT = Path(__file__).resolve().parents[3]
_RATE = 100_000_000
_PORTS = iter(range(29517, 29600))
_STEPS = 12
_TRAIN = """
from pathlib import Path

import torch
from torch import nn
from steelyard import Workload

class Batches(list):
    def __iter__(self):
        for n, batch in enumerate(super().__iter__()):
            if n == 5:
                Path("begun").touch()
            yield batch

def workload():
    torch.manual_seed(0)
    layers = [nn.Linear(512, 1024), nn.ReLU(), nn.Linear(1024, 512), nn.ReLU(), nn.Linear(512, 10)]
    def loss(model, batch):
        return nn.functional.cross_entropy(model(batch[0]), batch[1])
    batch = (torch.randn(4096, 512), torch.randint(10, (4096,)))
    make = lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9)
    return Workload(model=nn.Sequential(*layers), loss=loss, batches=Batches([batch] * 100000), optimizer=make)
"""


@pytest.fixture(scope="module")
def pair() -> Iterator[Hosts]:
    try:
        with hosts(2, bits_per_second=_RATE) as made:
            yield made
    except NoHosts as reason:
        pytest.skip(str(reason))


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Return a folder and a cost cache for each host."""
    made = [tmp_path_factory.mktemp(f"host{n}") for n in range(2)]
    for folder in made:
        (folder / "train.py").write_text(_TRAIN)
    return made


def _start(
    pair: Hosts, folders: list[Path], *asked: str, each: int = 1
) -> list[subprocess.Popen[bytes]]:
    """Start this steelyard command on each host, without naming an interface to gloo."""
    started, port = [], next(_PORTS)
    for host, folder in enumerate(folders):
        environ = {**os.environ, "STEELYARD_CACHE": str(folder / "costs.sqlite")}
        environ["PYTHONPATH"] = os.pathsep.join((str(_ROOT), os.environ.get("PYTHONPATH", "")))
        run = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2"]
        run += [f"--nproc-per-node={each}", f"--node-rank={host}", f"--master-addr={address(0)}", f"--master-port={port}"]
        line = " ".join([*run, "-m", "tests.system.dist.hurried", *asked])
        said = f"cd {folder} && unset GLOO_SOCKET_IFNAME && exec {line} >said 2>&1"
        # Each process has a core of its own, as on a host.
        core = sorted(os.sched_getaffinity(0))[host % len(os.sched_getaffinity(0))]
        command = [*(["taskset", "-c", str(core)] if each == 1 else []), "sh", "-c", said]
        started.append(pair.start(host, command, {**environ, "OMP_NUM_THREADS": "1"}))
    return started


def _ended(pair: Hosts, folders: list[Path], *asked: str, each: int = 1) -> list[int]:
    return [one.wait(timeout=300) for one in _start(pair, folders, *asked, each=each)]


def _said(folder: Path) -> str:
    return (folder / "said").read_text()


@pytest.fixture(scope="module")
def planned(pair: Hosts, folders: list[Path]) -> list[Path]:
    # Two cores of a shared machine may differ in speed, as hosts may, so the speeds are declared.
    asked = ("plan", "train.py", "--accuracy-loss", "5%", "--speeds", "1,1")
    assert _ended(pair, folders, *asked) == [0, 0], "".join(map(_said, folders))
    return [folder / "train.plan.toml" for folder in folders]


def test_first_host_plans_for_the_measured_link_and_all_receive_the_plan(planned: list[Path]) -> None:
    assert planned[0].read_text() == planned[1].read_text()
    decisions = read_decisions(planned[0])
    assert (decisions.target.hosts, decisions.target.ranks) == (2, 2)
    # Sending 4 MB at 100 Mbit/s takes more than half of the step.
    assert any(rule.trade.endswith("_gradients") for rule in decisions.rules)
    explained = [json.loads(path.with_suffix(".json").read_text()) for path in planned]
    assert explained[0] == explained[1]


def test_hosts_train_and_send_the_predicted_bytes(
    pair: Hosts, folders: list[Path], planned: list[Path]
) -> None:
    assert _ended(pair, folders, "run", "train.py", "--steps", str(_STEPS)) == [0, 0], (
        "".join(map(_said, folders))
    )
    shown = [read_plan(path) for path in planned]
    predicted, measured = shown[0].plan.predicted, shown[0].measured
    assert measured.steps == _STEPS
    assert measured.memory_bytes == pytest.approx(predicted.peak.nbytes, rel=0.01)
    # The kernel counts these bytes, including the headers of gloo's messages.
    assert measured.communication_bytes == predicted.metrics.communication_bytes.value
    assert measured.last_loss < measured.first_loss
    assert shown[1].measured is None, "the first host tells what came of it"


def test_a_lost_host_is_reported_by_the_remaining_one(
    pair: Hosts, folders: list[Path], planned: list[Path]
) -> None:
    begun = folders[0] / "begun"
    begun.unlink(missing_ok=True)
    started = _start(pair, folders, "run", "train.py", "--steps", "100000", "--rank-timeout", "20s")
    try:
        end = time.monotonic() + 200
        while not begun.exists() and time.monotonic() < end:
            time.sleep(0.2)
        with pair.cut_off(1):
            started[1].send_signal(signal.SIGKILL)
            assert started[0].wait(timeout=200) == 1
    finally:
        for one in started:
            one.kill()
    said = _said(folders[0])
    assert "rank 0 lost the connection to another rank during a collective" in said
    assert "\nexpected: " in said
    assert "\nnext: " in said


def test_every_host_receives_the_new_plan_when_the_link_slows_down(
    pair: Hosts, folders: list[Path], planned: list[Path]
) -> None:
    as_planned = planned[0].read_text()
    plain = ShardBatchRule(ranks=2, bucket=1 << 20)
    for path in planned:
        write_decisions(path, replace(read_decisions(path), rules=(plain,)))
    begun = folders[0] / "begun"
    begun.unlink(missing_ok=True)
    pair.shape(None)
    started = _start(pair, folders, "run", "train.py", "--steps", "56", "--adapt")
    try:
        end = time.monotonic() + 200
        while not begun.exists() and time.monotonic() < end:
            time.sleep(0.2)
        pair.shape(_RATE // 3)
        assert [one.wait(timeout=300) for one in started] == [0, 0], "".join(map(_said, folders))
    finally:
        pair.shape(_RATE)
        for one in started:
            one.kill()
        for path in planned:
            path.write_text(as_planned)
    # The first host may continue alone until compression has been probed.
    written = [sorted(folder.glob("train.adapted-*.plan.toml"), key=_step) for folder in folders]
    assert len(written[0]) == len(written[1]) in (1, 2), "".join(map(_said, folders))
    one, other = (found[-1] for found in written)
    assert (one.name, one.read_text()) == (other.name, other.read_text())
    # Only the first host's file holds the measurement.
    assert read_plan(other).plan.decisions == read_plan(one).plan.decisions
    rules = read_decisions(other).rules
    assert ParallelLayout.of(rules) == ALONE or any(isinstance(rule, GradientCompression) for rule in rules)
    # Each host resumes from its own file.
    asked = ("run", "train.py", "--plan", one.name, "--steps", "8")
    assert _ended(pair, folders, *asked) == [0, 0], "".join(map(_said, folders))


def _step(path: Path) -> int:
    """Return the step after which a plan took over, from its name."""
    return int(path.name.removeprefix("train.adapted-").partition(".")[0])


_BATCH = ShardBatchRule(ranks=4, bucket=1 << 20)
_PARTS = tuple(
    ShardTensorRule(parameter=name, ranks=2, dim=dim, count=1)
    for name, dim in (("0.weight", 0), ("0.bias", 0), ("2.weight", 1))
)
_ALL_TO_ALL = TernaryGradientsRule(parameter="0.weight", count=1)
_STAGES = rules_for(("1",), schedule="1F1B", ranks=2)
_LAID = {
    "the batch among all": (_BATCH,),
    "codes": (_BATCH, _ALL_TO_ALL),
    "parts on each host": (replace(_BATCH, ranks=2), *_PARTS),
    "stages": (replace(_BATCH, ranks=2), AccumulateRule(micro_batches=4), *_STAGES),
}


@pytest.fixture(scope="module")
def of_two_each(pair: Hosts, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Return hosts with two ranks each, which have met and made a plan."""
    made = [tmp_path_factory.mktemp(f"host{n}of2") for n in range(2)]
    for folder in made:
        (folder / "train.py").write_text(_TRAIN)
    pair.shape(None)
    try:
        assert _ended(pair, made, "plan", "train.py", each=2) == [0, 0], "".join(map(_said, made))
    finally:
        pair.shape(_RATE)
    return made


def test_all_ranks_of_all_hosts_receive_the_plan_of_the_first_host(of_two_each: list[Path]) -> None:
    plans = [folder / "train.plan.toml" for folder in of_two_each]
    assert plans[0].read_text() == plans[1].read_text()
    target = read_decisions(plans[0]).target
    assert (target.hosts, target.ranks) == (2, 4)


@pytest.mark.parametrize("laid", _LAID)
def test_four_ranks_on_two_hosts_train_and_send_the_predicted_bytes(
    pair: Hosts, of_two_each: list[Path], laid: str
) -> None:
    plans = [folder / "train.plan.toml" for folder in of_two_each]
    decisions = replace(
        read_decisions(plans[0]),
        rules=tuple(sorted(_LAID[laid])),
        budget=Budget(accuracy_loss=1.0),
    )
    for plan in plans:
        write_decisions(plan, decisions)
    asked = ("run", "train.py", "--steps", str(_STEPS))
    pair.shape(None)
    try:
        assert _ended(pair, of_two_each, *asked, each=2) == [0, 0], (
            "".join(map(_said, of_two_each))
        )
    finally:
        pair.shape(_RATE)
    shown = read_plan(plans[0])
    predicted, measured = shown.plan.predicted, shown.measured
    assert measured.memory_bytes == pytest.approx(predicted.peak.nbytes, rel=0.01)
    assert measured.communication_bytes == pytest.approx(
        predicted.metrics.communication_bytes.value, rel=0.01
    )
    assert measured.last_loss < measured.first_loss
