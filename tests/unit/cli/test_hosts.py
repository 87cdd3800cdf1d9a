"""`steelyard plan` and `run` on several hosts, where another program started the processes."""

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from steelyard.cli import main
from steelyard.cli.rank_launcher import LaunchSpec, renumber_rank, should_start_ranks
from steelyard.errors import (
    CaptureRefused,
)
from steelyard.hardware.cluster import Cluster
from steelyard.ir.rule import Rule
from steelyard.plan_files.prediction_file import write_plan
from steelyard.plans.plan import Plan
from steelyard.trades.shard_batch import ShardBatchRule
from tests.support.sample import PLAN
from tests.unit.cli import fake_api
from tests.unit.cli.commands import arguments_of, failure_of, write_scripts


def _among_hosts(count: int, *rules: Rule, each: int = 1) -> Plan:
    target = replace(PLAN.decisions.target, ranks=count * each, hosts=count)
    return replace(PLAN, decisions=replace(PLAN.decisions, target=target, rules=rules))


@pytest.fixture
def as_host(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[int], Path]:
    def become(rank: int) -> Path:
        monkeypatch.setenv("RANK", str(rank))
        monkeypatch.setenv("WORLD_SIZE", "2")
        folder = tmp_path / f"host {rank}"
        folder.mkdir(exist_ok=True)
        write_scripts(folder)
        monkeypatch.chdir(folder)
        return folder

    return become


def test_the_first_host_plans_and_the_others_receive_its_plan(
    api: fake_api.Fake,
    as_host: Callable[[int], Path],
    capsys: pytest.CaptureFixture[str],
) -> None:
    folders = [as_host(0)]
    assert main(["plan", "train.py", "--memory", "300MiB"]) == 0
    assert arguments_of("plan_workload")["cluster"] == Cluster.here(ranks=2, hosts=2)
    assert [name for name, _ in fake_api.CALLS if name != "load_workload"] == [
        "meeting",
        "others at work",
        "plan_workload",
        "others have ended their work",
    ]
    words = arguments_of("meeting")["words"]
    fake_api.CALLS.clear()
    folders.append(as_host(1))
    assert main(["plan", "train.py", "--memory", "300MiB"]) == 0
    assert [("meeting", {"words": words})] == fake_api.CALLS, "it planned by itself"
    for name in ("train.plan.toml", "train.plan.json"):
        one, other = ((folder / name).read_text() for folder in folders)
        assert one == other
    assert "received from the first host" in capsys.readouterr().out


def test_an_error_of_the_first_host_ends_all_hosts(
    api: fake_api.Fake,
    as_host: Callable[[int], Path],
    capsys: pytest.CaptureFixture[str],
) -> None:
    as_host(0)

    def refuse() -> None:
        if fake_api.CALLS[-1][0] == "plan_workload":
            raise CaptureRefused("it branches", expected="no branch", remedy="mend it")

    api.outcome = refuse
    assert "it branches" in failure_of(capsys, "plan", "train.py", code=2)
    folder = as_host(1)
    said = failure_of(capsys, "plan", "train.py", code=2)
    assert "planning failed on the first host: it branches" in said
    assert not list(folder.glob("*.plan.*"))


@pytest.mark.parametrize("other", ["--ranks 2", "--cluster dgx-h100", "--check train.plan.toml"])
def test_options_that_choose_devices_are_refused_for_started_ranks(
    api: fake_api.Fake,
    as_host: Callable[[int], Path],
    capsys: pytest.CaptureFixture[str],
    other: str,
) -> None:
    as_host(0)
    write_plan(Path("train.plan.toml"), PLAN)
    said = failure_of(capsys, "plan", "train.py", *other.split(), code=2)
    assert "one of several that were started together" in said


def test_a_plan_for_several_hosts_is_not_started_by_one(
    api: fake_api.Fake, planned: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_plan(planned, _among_hosts(2, ShardBatchRule(ranks=2, bucket=1 << 20)))
    said = failure_of(capsys, "run", "train.py", code=2)
    assert "the plan is for 2 hosts, but this process was started alone" in said
    assert "torchrun --nnodes 2" in said


def test_independently_started_ranks_run_a_plan_for_one_rank_each(
    api: fake_api.Fake, as_host: Callable[[int], Path]
) -> None:
    """A plan that one process made alone does not know about other ranks."""
    for rank in (0, 1):
        as_host(rank)
        write_plan(Path("train.plan.toml"), PLAN)
        assert main(["run", "train.py", "--steps", "3"]) == 0
    assert [name for name, _ in fake_api.CALLS].count("run_workload") == 2


def test_a_plan_that_uses_fewer_hosts_names_their_number(
    api: fake_api.Fake, planned: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_plan(planned, _among_hosts(4, ShardBatchRule(ranks=2, bucket=1 << 20)))
    assert "the plan is for 2 hosts" in failure_of(capsys, "run", "train.py", code=2)


@pytest.mark.parametrize(("degree", "hosts"), [(6, 3), (4, 2)])
def test_a_plan_for_several_hosts_names_its_torchrun_command(
    api: fake_api.Fake, planned: Path, capsys: pytest.CaptureFixture[str], degree: int, hosts: int
) -> None:
    shared = ShardBatchRule(ranks=degree, bucket=1 << 20)
    write_plan(planned, _among_hosts(3, shared, each=2))
    said = failure_of(capsys, "run", "train.py", code=2)
    assert f"the plan is for {hosts} hosts" in said
    assert f"torchrun --nnodes {hosts} --nproc-per-node 2" in said


def test_a_plan_that_uses_one_host_is_started_there_alone(planned: Path) -> None:
    shared = ShardBatchRule(ranks=2, bucket=1 << 20)
    write_plan(planned, _among_hosts(3, shared, each=2))
    laid = LaunchSpec.of(planned)
    assert (laid.ranks, laid.hosts, laid.planned_ranks) == (2, 1, 6)
    assert should_start_ranks(laid)


def test_extra_ranks_in_an_edited_plan_do_not_count_as_hosts(planned: Path) -> None:
    """Somebody has edited the plan; loading it reports this."""
    write_plan(planned, _among_hosts(1, ShardBatchRule(ranks=4, bucket=1), each=2))
    laid = LaunchSpec.of(planned)
    assert (laid.ranks, laid.hosts, laid.planned_ranks) == (4, 1, 2)


@pytest.mark.parametrize(("rank", "place"), [(0, None), (1, None), (2, 0), (3, 1), (4, 2), (5, 3)])
def test_used_ranks_are_renumbered_when_all_ranks_are_started(
    planned: Path, monkeypatch: pytest.MonkeyPatch, rank: int, place: int | None
) -> None:
    shared = ShardBatchRule(ranks=4, bucket=1 << 20)
    plan = _among_hosts(3, shared, each=2)
    used = replace(plan.decisions, used_ranks=(2, 3, 4, 5))
    write_plan(planned, replace(plan, decisions=used))
    started = {"RANK": rank, "WORLD_SIZE": 6, "GROUP_RANK": rank // 2, "GROUP_WORLD_SIZE": 3}
    for name, value in started.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setenv("STEELYARD_STORE_IS_HELD", "")
    monkeypatch.delenv("STEELYARD_STORE_IS_HELD")
    laid = LaunchSpec.of(planned)
    assert renumber_rank(laid) == (place is not None)
    now = {name: int(os.environ[name]) for name in started}
    if place is None:
        assert now == started
        return
    expected = {"RANK": place, "WORLD_SIZE": 4, "GROUP_RANK": place // 2, "GROUP_WORLD_SIZE": 2}
    assert now == expected
    assert os.environ["STEELYARD_STORE_IS_HELD"], "rank 0 has the store, and is none of them"
    assert renumber_rank(laid), "where only these were started they are as they are"


def test_an_unused_host_reports_it_and_exits(
    api: fake_api.Fake,
    planned: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    shared = ShardBatchRule(ranks=2, bucket=1 << 20)
    plan = _among_hosts(3, shared)
    write_plan(planned, replace(plan, decisions=replace(plan.decisions, used_ranks=(0, 2))))
    for name, value in {"RANK": 1, "WORLD_SIZE": 3, "GROUP_WORLD_SIZE": 3}.items():
        monkeypatch.setenv(name, str(value))
    assert main(["run", "train.py", "--steps", "3"]) == 0
    said = capsys.readouterr().out
    assert "the plan uses hosts 0 and 2 of 3: host 1 has nothing to do" in said
    assert "run_workload" not in [name for name, _ in fake_api.CALLS]


def test_plan_covers_all_ranks_of_all_hosts(
    api: fake_api.Fake, as_host: Callable[[int], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    as_host(0)
    monkeypatch.setenv("WORLD_SIZE", "6")
    assert main(["plan", "train.py"]) == 0
    assert arguments_of("plan_workload")["cluster"] == Cluster.here(ranks=6, hosts=2)


def test_an_unused_rank_does_nothing(
    api: fake_api.Fake, as_host: Callable[[int], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    """The plan was made for two ranks, and uses one."""
    for rank in (0, 1):
        as_host(rank)
        write_plan(Path("train.plan.toml"), _among_hosts(2))
        assert main(["run", "train.py", "--steps", "3"]) == 0
    assert [name for name, _ in fake_api.CALLS].count("run_workload") == 1
    assert "the plan uses host 0 of 2: host 1 has nothing to do" in capsys.readouterr().out
