"""The command line: what each verb asks for, what it prints, and how it ends."""

import contextlib
import errno
import json
import os
import pty
import shlex
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import steelyard
from steelyard.cli import main
from steelyard.cli.rank_launcher import LaunchSpec, renumber_rank, should_start_ranks
from steelyard.errors import (
    CaptureRefused,
    Infeasible,
    Mismatch,
    NonFinite,
    RankFailed,
    then,
)
from steelyard.hardware.cluster import Cluster
from steelyard.ir.rule import Rule
from steelyard.plan_files.prediction_file import read_plan, write_explanation, write_plan
from steelyard.plans.budget import Budget, Maximize
from steelyard.plans.plan import Plan
from steelyard.plans.plan_on_file import Asked
from steelyard.trades.shard_batch import ShardBatchRule
from tests.support.sample import MEASURED, PLAN
from tests.unit.cli import fake_api

ROOT = Path(__file__).resolve().parents[3]
# Of processes: what stands here, and not what another checkout has installed.
PYTHONPATH = os.pathsep.join((str(ROOT / "src"), str(ROOT)))


@pytest.fixture(autouse=True)
def _heed_ctrl_c() -> Iterator[None]:
    """Shells start what runs in the background with Ctrl-C ignored, and children inherit that."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def api(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> fake_api.Fake:
    fake = fake_api.Fake("steelyard.api")
    monkeypatch.setitem(sys.modules, "steelyard.api", fake)
    monkeypatch.setattr(steelyard, "api", fake, raising=False)
    monkeypatch.setattr(fake_api, "ASKED", [])
    monkeypatch.chdir(tmp_path)
    write_scripts(tmp_path)
    return fake


def write_scripts(folder: Path) -> None:
    """Python, which the fake api never runs."""
    for name in ("train.py", "my train.py", "other.py"):
        (folder / name).write_text("def workload(): ...\n")


@pytest.fixture
def planned(tmp_path: Path) -> Path:
    path = tmp_path / "train.plan.toml"
    write_plan(path, PLAN)
    write_scripts(tmp_path)
    return path


def asked(name: str) -> dict[str, Any]:
    return next(a for n, a in fake_api.ASKED if n == name)


def fails(capsys: pytest.CaptureFixture[str], *arguments: str, code: int) -> str:
    """The few lines of a failure; the same command with --json must say the same."""
    assert main(arguments) == code
    said = capsys.readouterr().err
    lines = said.splitlines()
    assert 0 < len(lines) <= 12, said
    assert "Traceback" not in said
    assert any(line.startswith("next: ") for line in lines[1:]), said
    assert main((*arguments, "--json")) == code
    document = json.loads(capsys.readouterr().out)
    assert document["exit_code"] == code
    assert document["next"]
    return said


# --- plan -----------------------------------------------------------------------------------------


def test_plan_shows_writes_and_says_what_next(
    api: fake_api.Fake, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", "train.py", "--memory", "300MiB"]) == 0
    out = capsys.readouterr().out
    assert "memory (peak/rank)  ~487 MiB  ~296 MiB" in out
    assert "next: steelyard run train.py --plan train.plan.toml --steps 100 --checkpoint " in out
    assert asked("load_workload") == {"train": "train.py"}
    assert asked("plan_workload")["budget"] == Budget("300MiB")
    found = read_plan(Path("train.plan.toml"))
    assert found.plan is not None
    assert found.plan.predicted == PLAN.predicted


def test_what_comes_next_can_be_typed_as_it_stands(
    api: fake_api.Fake, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", "my train.py"]) == 0
    said = capsys.readouterr().out
    (next_line,) = [line for line in said.splitlines() if line.startswith("next: steelyard ")]
    words = shlex.split(next_line.removeprefix("next: steelyard "))
    assert words[:4] == ["run", "my train.py", "--plan", "my train.plan.toml"]
    assert main(words) == 0
    assert "explain 'my train.plan.toml'" in capsys.readouterr().out
    assert "--check 'my train.plan.toml'" in Path("my train.plan.toml").read_text()


# --- on several hosts -----------------------------------------------------------------------------


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


def test_the_first_of_several_hosts_plans_and_the_others_have_its_plan(
    api: fake_api.Fake,
    as_host: Callable[[int], Path],
    capsys: pytest.CaptureFixture[str],
) -> None:
    folders = [as_host(0)]
    assert main(["plan", "train.py", "--memory", "300MiB"]) == 0
    assert asked("plan_workload")["cluster"] == Cluster.here(ranks=2, hosts=2)
    assert [name for name, _ in fake_api.ASKED if name != "load_workload"] == [
        "meeting",
        "others at work",
        "plan_workload",
        "others have ended their work",
    ]
    words = asked("meeting")["words"]
    fake_api.ASKED.clear()
    folders.append(as_host(1))
    assert main(["plan", "train.py", "--memory", "300MiB"]) == 0
    assert [("meeting", {"words": words})] == fake_api.ASKED, "it planned by itself"
    for name in ("train.plan.toml", "train.plan.json"):
        one, other = ((folder / name).read_text() for folder in folders)
        assert one == other
    assert "received from the first host" in capsys.readouterr().out


def test_what_the_first_host_found_wrong_ends_all(
    api: fake_api.Fake,
    as_host: Callable[[int], Path],
    capsys: pytest.CaptureFixture[str],
) -> None:
    as_host(0)

    def refuse() -> None:
        if fake_api.ASKED[-1][0] == "plan_workload":
            raise CaptureRefused("it branches", expected="no branch", remedy="mend it")

    api.outcome = refuse
    assert "it branches" in fails(capsys, "plan", "train.py", code=2)
    folder = as_host(1)
    said = fails(capsys, "plan", "train.py", code=2)
    assert "planning failed on the first host: it branches" in said
    assert not list(folder.glob("*.plan.*"))


@pytest.mark.parametrize("other", ["--ranks 2", "--cluster dgx-h100", "--check train.plan.toml"])
def test_ranks_that_were_started_are_those_that_are_planned_for(
    api: fake_api.Fake,
    as_host: Callable[[int], Path],
    capsys: pytest.CaptureFixture[str],
    other: str,
) -> None:
    as_host(0)
    write_plan(Path("train.plan.toml"), PLAN)
    said = fails(capsys, "plan", "train.py", *other.split(), code=2)
    assert "one of several that were started together" in said


def test_a_plan_for_several_hosts_is_not_started_by_one(
    api: fake_api.Fake, planned: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_plan(planned, _among_hosts(2, ShardBatchRule(ranks=2, bucket=1 << 20)))
    said = fails(capsys, "run", "train.py", code=2)
    assert "the plan is for 2 hosts, but this process was started alone" in said
    assert "torchrun --nnodes 2" in said


def test_ranks_that_others_started_for_their_own_purpose_train_each(
    api: fake_api.Fake, as_host: Callable[[int], Path]
) -> None:
    """A plan that one process made for itself knows of no others."""
    for rank in (0, 1):
        as_host(rank)
        write_plan(Path("train.plan.toml"), PLAN)
        assert main(["run", "train.py", "--steps", "3"]) == 0
    assert [name for name, _ in fake_api.ASKED].count("run_workload") == 2


def test_a_plan_on_fewer_hosts_than_it_was_made_for_is_started_on_these(
    api: fake_api.Fake, planned: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_plan(planned, _among_hosts(4, ShardBatchRule(ranks=2, bucket=1 << 20)))
    assert "the plan is for 2 hosts" in fails(capsys, "run", "train.py", code=2)


@pytest.mark.parametrize(("degree", "hosts"), [(6, 3), (4, 2)])
def test_ranks_that_several_hosts_have_are_started_as_they_were_planned(
    api: fake_api.Fake, planned: Path, capsys: pytest.CaptureFixture[str], degree: int, hosts: int
) -> None:
    shared = ShardBatchRule(ranks=degree, bucket=1 << 20)
    write_plan(planned, _among_hosts(3, shared, each=2))
    said = fails(capsys, "run", "train.py", code=2)
    assert f"the plan is for {hosts} hosts" in said
    assert f"torchrun --nnodes {hosts} --nproc-per-node 2" in said


def test_a_plan_on_the_ranks_of_one_host_is_started_there_alone(planned: Path) -> None:
    shared = ShardBatchRule(ranks=2, bucket=1 << 20)
    write_plan(planned, _among_hosts(3, shared, each=2))
    laid = LaunchSpec.of(planned)
    assert (laid.ranks, laid.hosts, laid.planned_ranks) == (2, 1, 6)
    assert should_start_ranks(laid)


def test_more_ranks_than_a_plan_of_one_host_is_made_for_are_no_further_hosts(planned: Path) -> None:
    """Somebody edited it; that is said where it is loaded."""
    write_plan(planned, _among_hosts(1, ShardBatchRule(ranks=4, bucket=1), each=2))
    laid = LaunchSpec.of(planned)
    assert (laid.ranks, laid.hosts, laid.planned_ranks) == (4, 1, 2)


@pytest.mark.parametrize(("rank", "place"), [(0, None), (1, None), (2, 0), (3, 1), (4, 2), (5, 3)])
def test_where_all_that_met_are_started_those_that_a_plan_lies_on_take_their_places(
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


def test_a_host_that_is_not_used_says_so_and_ends(
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
    assert "run_workload" not in [name for name, _ in fake_api.ASKED]


def test_all_ranks_of_all_hosts_are_planned_for(
    api: fake_api.Fake, as_host: Callable[[int], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    as_host(0)
    monkeypatch.setenv("WORLD_SIZE", "6")
    assert main(["plan", "train.py"]) == 0
    assert asked("plan_workload")["cluster"] == Cluster.here(ranks=6, hosts=2)


def test_a_rank_on_which_nothing_lies_does_nothing(
    api: fake_api.Fake, as_host: Callable[[int], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    """The plan was made for two ranks, and lies on one."""
    for rank in (0, 1):
        as_host(rank)
        write_plan(Path("train.plan.toml"), _among_hosts(2))
        assert main(["run", "train.py", "--steps", "3"]) == 0
    assert [name for name, _ in fake_api.ASKED].count("run_workload") == 1
    assert "the plan uses host 0 of 2: host 1 has nothing to do" in capsys.readouterr().out


def test_every_bound_of_the_budget_reaches_the_search(api: fake_api.Fake) -> None:
    arguments = (
        "plan train.py:small --memory 2GiB --step-time 120ms --communication 1s --computation 2s "
        "--accuracy-loss 0.5% --maximize batch --runner inductor -o other.toml"
    )
    assert main(arguments.split()) == 0
    found = asked("plan_workload")
    assert found["budget"] == Budget("2GiB", "120ms", "1s", "2s", "0.5%")
    assert (found["maximize"], found["runner"]) == (Maximize.BATCH, "inductor")
    assert found["title"] == "train.small"
    check = "#   steelyard plan train.py:small --check other.toml\n"
    assert check in Path("other.toml").read_text()
    main(["plan", "train.py:small", "--check", "other.toml"])
    assert asked("load_planned")["title"] == "train.small"
    assert Path("other.json").exists()


def test_what_to_plan_for_is_this_machine_a_name_or_a_file(
    api: fake_api.Fake, capsys: pytest.CaptureFixture[str]
) -> None:
    for asked_for, devices in (("--ranks 2", 2), ("--cluster dgx-h100", 8), ("", 1)):
        fake_api.ASKED.clear()
        assert main(["plan", "train.py", *asked_for.split()]) == 0
        assert asked("plan_workload")["cluster"].num_devices == devices
    fake_api.ASKED.clear()
    assert main(["plan", "train.py", "--ranks", "2", "--speeds", "1,0.5"]) == 0
    assert asked("plan_workload")["cluster"].speeds == (1, 0.5)
    for wrong in ("--cluster dgx-h100 --ranks 2", "--cluster dgx-h10", "--ranks 2 --speeds 1",
                  "--ranks 2 --speeds fast", "--cluster dgx-h100 --speeds 1,0.5",
                  "--cluster none.toml", "--ranks 0", "--ranks 100000"):  # fmt: skip
        assert main(["plan", "train.py", *wrong.split()]) == 2, wrong
        assert "next: " in capsys.readouterr().err


def test_each_workload_of_a_script_has_a_plan_of_its_own(api: fake_api.Fake) -> None:
    assert main(["plan", "train.py:small"]) == 0
    assert Path("train.small.plan.toml").exists()


def test_plan_as_json_is_one_document_whatever_the_script_prints(
    api: fake_api.Fake, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = "plan train.py --memory 300MiB --json --what-if memory=4GiB --why-not accumulate"
    assert main(arguments.split()) == 0
    captured = capsys.readouterr()
    document = json.loads(captured.out)
    assert document["schema"] == "steelyard.plan/1"
    assert document["what_if"]["budget_bytes"] == 2**32
    assert document["why_not"] == "accumulate is not needed: the budget is met without it"
    assert "printed by the user's script" in captured.err


def test_questions_are_answered_below_the_plan(
    api: fake_api.Fake, capsys: pytest.CaptureFixture[str]
) -> None:
    main(["plan", "train.py", "--what-if", "memory=4GiB", "--why-not", "accumulate", "--quiet"])
    out = capsys.readouterr().out
    assert "what if\nplan " in out
    assert "budget: memory <= 4.00 GiB" in out
    assert "why not: accumulate is not needed" in out
    assert "next: steelyard run" not in out


def test_why_not_of_a_checked_plan_knows_the_reasons_of_when_it_was_planned(
    api: fake_api.Fake, planned: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.setattr(
        fake_api.Planned, "why_not", lambda self, trade: f"{trade}: {self.plan.num_offers} offers"
    )
    assert main(["plan", "train.py", "--check", str(planned), "--why-not", "recompute"]) == 0
    assert PLAN.num_offers > 0
    assert f"recompute: {PLAN.num_offers} offers" in capsys.readouterr().out


def test_an_edit_is_checked_and_becomes_current(
    api: fake_api.Fake, planned: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    edited = planned.read_text().replace("micro_batches = 2", "micro_batches = 4") + "# mine\n"
    planned.write_text(edited)
    assert main(["explain", str(planned)]) == 0
    out = capsys.readouterr().out
    assert "was edited" in out
    assert "296" not in out
    assert main(["plan", "train.py", "--check", str(planned)]) == 0
    assert planned.read_text() == edited
    assert main(["explain", str(planned)]) == 0
    assert "~296 MiB" in capsys.readouterr().out


def test_a_plan_that_no_longer_fits_says_so_in_its_exit_code(
    api: fake_api.Fake, planned: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    planned.write_text(planned.read_text().replace("300 MiB", "200 MiB"))
    assert main(["plan", "train.py", "--check", str(planned)]) == 3
    assert "DOES NOT FIT" in capsys.readouterr().out


def test_what_a_person_wrote_is_not_overwritten(
    api: fake_api.Fake, planned: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    planned.write_text(planned.read_text().replace("nth = 0", "nth = 1"))
    before = planned.read_bytes()
    assert "would be overwritten" in fails(capsys, "plan", "train.py", code=2)
    assert planned.read_bytes() == before
    assert main(["plan", "train.py", "-o", "other.plan.toml"]) == 0


@pytest.mark.parametrize("edit", [("nth = 0", "nth = 1"), ("[budget]", "# mine\n[budget]")])
@pytest.mark.parametrize("verb", ["plan train.py --check train.plan.toml", "run train.py"])
def test_an_edit_that_was_used_is_not_overwritten_either(
    api: fake_api.Fake, planned: Path, verb: str, edit: tuple[str, str]
) -> None:
    assert main(verb.split()) == 0
    assert main(["plan", "train.py"]) == 0
    planned.write_text(planned.read_text().replace(*edit))
    before = planned.read_bytes()
    assert main(verb.split()) == 0
    assert main(["plan", "train.py"]) == 2
    assert planned.read_bytes() == before
    planned.unlink()
    assert main(["plan", "train.py"]) == 0


# --- run ------------------------------------------------------------------------------------------


def test_run_prints_the_receipt_and_keeps_it_beside_the_plan(
    api: fake_api.Fake, planned: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = "run train.py --steps 200 --checkpoint c --checkpoint-every 50 --seed 0"
    assert main(arguments.split()) == 0
    captured = capsys.readouterr()
    assert "1.45 s  +16.9 %  <- largest miss" in captured.out
    assert asked("load_planned")["path"] == Path("train.plan.toml")
    assert asked("load_planned")["cluster"] is None
    found = asked("run_workload")
    assert (found["checkpoint"], found["checkpoint_every"]) == (Path("c"), 50)
    assert (found["steps"], found["seed"], found["resume"]) == (200, 0, False)
    assert read_plan(planned).measured == MEASURED
    main(["explain", str(planned)])
    assert "1.45 s" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "is_said"), [("", True), ("--checkpoint c", False), ("--quiet", False)]
)
def test_weights_that_are_not_kept_are_mentioned(
    api: fake_api.Fake, planned: Path, flags: str, is_said: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", "train.py", "--steps", "2", *flags.split()]) == 0
    assert ("weights were not saved: --checkpoint DIR" in capsys.readouterr().out) is is_said


def test_a_log_has_the_notes_only(
    api: fake_api.Fake, planned: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main(["run", "train.py", "--steps", "200"])
    assert capsys.readouterr().err == "note: the first step was taken\n"
    main(["run", "train.py", "--steps", "200", "--quiet"])
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("arguments", "start", "folder"),
    [
        ("", False, None),
        ("--checkpoint c", False, "c"),
        ("--checkpoint c --resume", True, "c"),
        ("--resume c", True, "c"),
        ("--checkpoint c --resume c", True, "c"),
        ("--resume c/step-000003", "c/step-000003", "c"),
        ("--checkpoint d --resume c/step-000003", "c/step-000003", "d"),
    ],
)
def test_where_a_run_goes_on_from(
    api: fake_api.Fake, planned: Path, arguments: str, start: str | bool, folder: str | None
) -> None:
    main(f"run train.py --steps 2 {arguments}".split())
    assert asked("run_workload")["resume"] == (Path(start) if isinstance(start, str) else start)
    assert asked("run_workload")["checkpoint"] == (Path(folder) if folder else None)


def test_the_reasons_of_the_search_outlive_a_run(
    api: fake_api.Fake, planned: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main(["run", "train.py", "--steps", "2"])
    assert "taken (2 of 4 offers)" in capsys.readouterr().out
    found = read_plan(planned).plan
    assert found is not None
    assert (found.taken, found.frontier) == (PLAN.taken, PLAN.frontier)


def test_decisions_that_nobody_weighed_are_listed_as_they_are(
    api: fake_api.Fake, planned: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    planned.write_text(planned.read_text().replace("micro_batches = 2", "micro_batches = 4"))
    main(["plan", "train.py", "--check", str(planned)])
    out = capsys.readouterr().out
    assert "decisions (3)\n  accumulate: micro_batches 4\n" in out
    assert "recompute: aten.gelu.default #0 in blocks.*.mlp (4)" in out


def test_a_missed_interval_fails_a_strict_run_only(api: fake_api.Fake, planned: Path) -> None:
    assert main(["run", "train.py", "--steps", "2"]) == 0
    assert main(["run", "train.py", "--steps", "2", "--strict"]) == 5
    api.measured = replace(MEASURED, step_seconds=1.24)
    assert main(["run", "train.py", "--steps", "2", "--strict"]) == 0


# --- the other verbs ------------------------------------------------------------------------------


def test_frontier_shows_the_curve_without_a_budget(
    api: fake_api.Fake, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["frontier", "train.py"]) == 0
    assert asked("plan_workload")["budget"] == Budget()
    assert asked("charted") == {}
    assert "*  ~296 MiB    ~1.24 s" in capsys.readouterr().out
    assert not Path("train.plan.toml").exists()


def test_simulate_writes_a_trace_and_says_what_each_rank_does(
    api: fake_api.Fake, planned: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    capsys.readouterr()
    assert main(["simulate", "train.py", "--trace", "trace.json"]) == 0
    said = "rank 0  ~3.00 ms a step: computes ~1.00 ms, waits ~2.00 ms for other ranks\n"
    assert said in capsys.readouterr().out
    events = json.loads(Path("trace.json").read_text())["traceEvents"]
    assert [e["name"] for e in events if e["ph"] == "X"] == ["aten.mm.default", "for all-reduce"]
    assert main(["simulate", "train.py", "--trace", "trace.json", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["ranks"][0]["waiting_seconds"] == 2e-3
    assert main(["simulate", "train.py", "--trace", "no/trace.json"]) == 2


def test_simulate_takes_a_plan_by_itself_with_what_it_was_asked_for(
    api: fake_api.Fake, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", "other.py", "--cluster", "dgx-h100", "-o", "x.plan.toml"]) == 0
    for command in (
        ["simulate", "x.plan.toml", "--trace", "trace.json"],
        ["plan", "other.py", "--check", "x.plan.toml"],
        ["simulate", "x.plan.toml", "--trace", "trace.json"],
    ):
        fake_api.ASKED.clear()
        assert main(command) == 0
        assert asked("load_workload") == {"train": "other.py"}
        found = asked("load_planned")
        assert found["path"] == Path("x.plan.toml")
        assert found["cluster"].fingerprint == Cluster.named("dgx-h100").fingerprint
    assert main(["simulate", "x.plan.toml", "--trace", "t.json", "--cluster", "dgx-a100"]) == 0
    found = [a for n, a in fake_api.ASKED if n == "load_planned"][-1]
    assert found["cluster"].fingerprint == Cluster.named("dgx-a100").fingerprint
    said = fails(
        capsys, "simulate", "x.plan.toml", "--plan", "y.plan.toml", "--trace", "t.json", code=2
    )
    assert "x.plan.toml is a plan file, and --plan names one too" in said
    Path("x.plan.json").unlink()
    said = fails(capsys, "simulate", "x.plan.toml", "--trace", "t.json", code=2)
    assert "the predictions file of x.plan.toml does not name its script" in said


def test_scale_asks_for_devices_and_a_length(
    api: fake_api.Fake, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["scale", "train.py", "--cluster", "dgx-h100", "--devices", "2..8"]
    assert main([*command, "--tokens", "1.5B", "--memory", "40GiB"]) == 0
    found = asked("scale_workload")
    assert (found["fewest"], found["most"], found["tokens"]) == (2, 8, 1_500_000_000)
    assert found["budget"] == Budget(memory="40GiB")
    assert found["cluster"].num_devices == 8
    assert "16  d16 z1  ~500 ms" in capsys.readouterr().out
    assert main([*command, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["points"][0]["same_batch"]["usd"] == 64


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--devices", "2-8"], "--devices 2-8 is not a range"),
        (["--devices", "2..8", "--tokens", "1B", "--samples", "9"], "both give the length"),
        (["--devices", "2..8", "--tokens", "many"], "tokens"),
    ],
)
def test_scale_refuses_what_it_cannot_read(
    api: fake_api.Fake, capsys: pytest.CaptureFixture[str], more: list[str], said: str
) -> None:
    assert main(["scale", "train.py", "--cluster", "dgx-h100", *more]) == 2
    assert said in capsys.readouterr().err


_WRONG_KEY = """
[scope.cluster]
member = { dgx-h100 = 8 }
"""


@pytest.mark.parametrize(
    "command",
    [
        "plan train.py --cluster c.toml",
        "plan train.py --cluster c.toml --minimize devices",
        "plan train.py --check train.plan.toml --cluster c.toml",
        "scale train.py --cluster c.toml --devices 1..8",
        "simulate train.py --cluster c.toml --trace t.json",
    ],
)
def test_a_wrong_cluster_file_is_refused_before_torch_is_imported(
    planned: Path, command: str
) -> None:
    (planned.parent / "c.toml").write_text(_WRONG_KEY)
    (planned.parent / "train.py").write_text("def workload(): ...")
    probe = (
        "import sys; from steelyard.cli import main; code = main(sys.argv[1:]); "
        "print(code, 'torch' in sys.modules)"
    )
    found = subprocess.run(
        [sys.executable, "-c", probe, *command.split()],
        cwd=planned.parent,
        capture_output=True,
        text=True,
        check=True,
    )
    assert "scope.cluster.member is not a known key; did you mean members?" in found.stderr
    assert found.stdout.split() == ["2", "False"]


def test_scale_over_more_devices_than_there_are_is_refused_before_the_script_is_loaded(
    api: fake_api.Fake, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["scale", "train.py", "--cluster", "dgx-h100", "--devices", "1..9"]) == 2
    assert "devices 1..9 are not in a cluster of 8" in capsys.readouterr().err
    assert not fake_api.ASKED


def test_doctor_says_what_is_in_the_way(
    api: fake_api.Fake, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["doctor"]) == 0
    assert "note  compiler: none\n      install g++" in capsys.readouterr().out
    assert main(["doctor", "--json", "--forget"]) == 0
    assert [a["forget"] for name, a in fake_api.ASKED if name == "doctor"] == [False, True]
    assert json.loads(capsys.readouterr().out)["rows"][1]["verdict"] == "note"


def test_demo_ends_in_a_receipt(api: fake_api.Fake, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("plain PyTorch: killed at 300 MiB\nplan ")
    assert main(["demo", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["schema"] == "steelyard.receipt/1"


@pytest.mark.parametrize("zoom", ["receipt", "offers", "peak", "frontier"])
def test_explain_at_every_zoom(
    planned: Path, zoom: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    page = tmp_path / "page.html"
    assert main(["explain", str(planned), "--zoom", zoom, "--html", str(page)]) == 0
    assert capsys.readouterr().out.startswith("plan ecd4")
    assert "<svg" in page.read_text()


def test_explain_without_predictions_says_how_to_get_them(
    planned: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    planned.with_suffix(".json").unlink()
    assert main(["explain", str(planned)]) == 0
    out = capsys.readouterr().out
    assert "its predictions file does not exist" in out
    assert "blocks.*.mlp" in out
    assert main(["explain", str(planned), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["status"] == "not predicted"


# --- how it fails ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("plan", "requires an argument"),
        ("pln train.py", "Did you mean"),
        ("plan .", ". is a folder, not a script"),
        ("run .", ". is a folder, not a script"),
        (f"run train.py --plan {'x' * 300}.toml", "File name too long"),
        ("plan train.py --memry 3GiB", "Did you mean"),
        ("plan train.py --memory 2gigs", "unknown unit 'gigs'"),
        ("plan train.py --memory 0", "not a possible amount"),
        ("plan train.py --memory -1", "not"),
        ("plan train.py --step-time fast", "not an amount"),
        ("plan train.py --maximize width", "batch"),
        ("plan train.py --runner triton", "python"),
        ("plan train.py -o plan.json", "ends in .toml"),
        ("plan train.py --what-if memry=4GiB", "did you mean memory?"),
        ("plan train.py --what-if 4GiB", "--what-if memory=4GiB"),
        ("plan train.py --check x.toml --memory 3GiB", "takes its budget from the plan file"),
        ("run train.py --plan none.toml", "does not exist"),
        ("run train.py --steps 0", "--steps 0 is not possible"),
        ("run train.py --steps two", "two"),
        ("run train.py --steps -3", "--steps -3 is not possible"),
        ("run train.py --steps nan", "nan"),
        ("run train.py --steps 1e3", "1e3"),
        (f"run train.py --steps {10**40}", "of more than 30 digits is not possible"),
        (f"run train.py --seed {2**70}", f"--seed {2**70} is not possible"),
        ("run train.py --seed -1", "--seed -1 is not possible"),
        ("run train.py --seed 0.5", "--seed 0.5 is not a whole number"),
        ("run train.py --steps 0x10", "--steps 0x10 is not a whole number"),
        pytest.param(f"run train.py --steps {'9' * 5000}", "--steps 999", id="five thousand 9"),
        ("run train.py --checkpoint c --checkpoint-every 1.0", "1.0 is not a whole number"),
        ("run train.py --rank-timeout nan", "--rank-timeout = 'nan' is not an amount"),
        ("run train.py --rank-timeout inf", "--rank-timeout = 'inf' is not an amount"),
        ("run train.py --rank-timeout 0", "--rank-timeout = '0' is not a possible amount"),
        ("run train.py --rank-timeout -1", "--rank-timeout"),
        ("run train.py --rank-timeout 1us", "--rank-timeout 1us is not possible"),
        ("run train.py --rank-timeout 1e9h", "--rank-timeout 1e9h is not possible"),
        ("run train.py --checkpoint-every 10", "was given without --checkpoint"),
        ("run train.py --checkpoint-every 0 --checkpoint c", "--checkpoint-every 0 is not"),
        ("run train.py --checkpoint-every -1 --checkpoint c", "--checkpoint-every -1 is not"),
        ("run train.py --checkpoint train.py", "--checkpoint train.py is not a folder"),
        ("run train.py --html train.plan.json", "would overwrite an input file"),
        ("run train.py --html train.py", "would overwrite an input file"),
        ("plan train.py --html train.plan.toml", "would overwrite an input file"),
        ("plan train.py --ranks 0", "--ranks 0 is not possible"),
        ("plan train.py --ranks -2 --cluster dgx-h100", "--ranks -2 is not possible"),
        ("plan train.py --ranks nan", "nan"),
        (f"plan train.py --ranks {10**9}", f"--ranks {10**9} is not possible"),
        ("plan train.py --memory nan", "not an amount"),
        ("plan train.py --memory inf", "not an amount"),
        ("plan train.py --memory 1e300", "not a possible amount"),
        ("plan train.py --step-time nan", "not an amount"),
        ("plan train.py --step-time 0", "not a possible amount"),
        ("plan train.py --communication -1ms", "communication"),
        ("plan train.py --computation inf", "not an amount"),
        ("plan train.py --accuracy-loss nan", "not an amount"),
        ("plan train.py --accuracy-loss=-1%", "accuracy_loss"),
        ("plan train.py --accuracy-loss 101%", "more than 100 %"),
        ("plan train.py --ranks 2 --speeds nan,1", "speeds"),
        ("plan train.py --ranks 2 --speeds inf,1", "speeds"),
        ("plan train.py --ranks 2 --speeds 0,1", "speeds"),
        ("plan train.py --ranks 2 --speeds 1e-300,1", "speeds (1e-300, 1.0) of 2 ranks"),
        ("plan train.py --ranks 3 --speeds 1,1", "write --speeds 1,1,1 for equal ranks"),
        ("plan train.py --ranks 3 --speeds 1,fast,1", "is not a list of numbers"),
        ("plan train.py --speeds 1,0.5", "write --ranks 2 as well"),
        ("plan train.py --offload-dir . --offload-rate nan --offload-size 1GiB", "not an amount"),
        (
            "plan train.py --offload-dir . --offload-rate 1GB/s --offload-size 0",
            "not a possible amount",
        ),
        ("plan train.py --offload-dir . --offload-rate 1GB/s", "--offload-size is missing"),
        ("plan train.py --what-if memory=nan", "not an amount"),
        ("plan train.py --why-not recomputing", "did you mean recompute?"),
        ("plan train.py --maximize batch --minimize devices", "exclude each other"),
        ("plan train.py --maximize batch --ranks 2", "--ranks gives several"),
        ("plan train.py --maximize batch --cluster dgx-h100", "--cluster gives several"),
        ("plan train.py --minimize devices", "no --cluster was given"),
        ("plan train.py --runner inductor --cluster dgx-h100", "--cluster declares other devices"),
        ("plan train.py --check none.toml", "does not exist"),
        ("plan train.py --check none.toml --runner inductor", "takes its budget from the plan"),
        ("scale train.py --cluster dgx-h100 --devices 0..8", "is an empty range"),
        ("scale train.py --cluster dgx-h100 --devices 8..1", "is an empty range"),
        ("scale train.py --cluster dgx-h100 --devices ²..8", "is not a range"),
        (f"scale train.py --cluster dgx-h100 --devices 1..{10**20}", "is not a range"),
        ("scale train.py --cluster dgx-h100 --devices 1..8 --tokens nan", "not an amount"),
        ("scale train.py --cluster dgx-h100 --devices 1..8 --samples 0", "not a possible amount"),
        ("run train.py --resume", "--resume names no folder"),
        ("run train.py --resume c --checkpoint d", "are different folders"),
        ("explain none.toml", "does not exist"),
        ("explain none.toml --html", "html"),
        ("explain .", "is not a file"),
        ("run train.py --plan .", "is a directory"),
        ("plan train.py --check .", "is a directory"),
        ("plan train.py -o .", "is a directory"),
        ("simulate train.py --trace t.json --plan .", "is not a file"),
    ],
)
def test_bad_arguments_are_named(
    api: fake_api.Fake, capsys: pytest.CaptureFixture[str], arguments: str, said: str
) -> None:
    assert said in fails(capsys, *arguments.split(), code=2)


def _folder(path: Path) -> None:
    path.mkdir()


def _binary(path: Path) -> None:
    path.write_bytes(Path(sys.executable).read_bytes()[:4096])


@pytest.mark.parametrize("verb", ["plan", "run", "frontier", "scale", "simulate"])
@pytest.mark.parametrize(
    ("name", "make", "said"),
    [
        ("missing.py", None, "missing.py does not exist"),
        ("missing", None, "missing is not a script"),
        ("folder.py", _folder, "folder.py is a folder, not a script"),
        ("program.py", _binary, "program.py is not Python"),
        ("text.py", lambda path: path.write_text("train(\n\n"), "text.py is not Python, line 1"),
        ("latin.py", lambda path: path.write_bytes(b"x = '\xe9'"), "latin.py is not Python"),
        ("deep.py", lambda path: path.write_text("(" * 10**5), "deep.py is not Python"),
        ("train.sh", lambda path: path.write_text("x = 1"), "does not end in .py"),
        ("pipe.py", os.mkfifo, "pipe.py is not a regular file"),
        ("loop.py", lambda path: path.symlink_to(path.name), "loop.py does not exist"),
        ("", None, "not a script"),
        (":name", None, "is not a script"),
    ],
)
def test_what_is_no_script_is_refused_before_torch_is_imported(
    api: fake_api.Fake,
    planned: Path,
    capsys: pytest.CaptureFixture[str],
    verb: str,
    name: str,
    make: Callable[[Path], object] | None,
    said: str,
) -> None:
    if make is not None:
        make(Path(name))
    more = {
        "scale": ["--cluster", "dgx-h100", "--devices", "1..8"],
        "simulate": ["--plan", str(planned), "--trace", "t.json"],
    }
    assert said in fails(capsys, verb, name, *more.get(verb, []), code=2)
    assert fake_api.ASKED == []


@pytest.mark.parametrize("verb", ["plan", "frontier", "scale"])
def test_a_plan_file_in_place_of_its_script_is_called_one(
    api: fake_api.Fake, planned: Path, capsys: pytest.CaptureFixture[str], verb: str
) -> None:
    more = ["--cluster", "dgx-h100", "--devices", "1..8"] if verb == "scale" else []
    said = fails(capsys, verb, "train.plan.toml", *more, code=2)
    assert "is a plan or cluster file, not a script" in said


def test_run_takes_a_plan_by_itself(
    api: fake_api.Fake, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", "other.py", "-o", "x.plan.toml"]) == 0
    fake_api.ASKED.clear()
    assert main(["run", "x.plan.toml", "--steps", "3"]) == 0
    assert asked("load_workload") == {"train": "other.py"}
    assert asked("load_planned")["path"] == Path("x.plan.toml")
    assert read_plan(Path("x.plan.toml")).measured == MEASURED
    # From another folder the script is found beside its plan.
    (tmp_path / "elsewhere").mkdir()
    os.chdir(tmp_path / "elsewhere")
    fake_api.ASKED.clear()
    assert main(["run", "../x.plan.toml", "--steps", "3"]) == 0
    assert asked("load_workload") == {"train": "../other.py"}


def test_run_of_a_plan_without_its_script_is_three_lines(
    api: fake_api.Fake, planned: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def said(*more: str) -> str:
        return fails(capsys, "run", *more, code=2)

    # As it was saved by a program, which has no script.
    assert "does not name its script" in said("train.plan.toml")
    assert "steelyard run train.py --plan train.plan.toml" in said("train.plan.toml")
    assert "is a plan file, and --plan names one too" in said(
        "train.plan.toml", "--plan", "train.plan.toml"
    )
    assert "does not exist" in said("none.plan.toml")
    write_plan(planned, PLAN, asked=Asked(script="gone.py"))
    assert "gone.py does not exist" in said("train.plan.toml")
    write_plan(planned, PLAN, asked=Asked(script="train.py", cluster="dgx-h100"))
    assert "is a plan for the declared cluster" in said("train.plan.toml")
    Path("folder.plan.toml").mkdir()
    assert "is not a file" in said("folder.plan.toml")
    Path("cluster.toml").write_text("[cluster]\n")
    assert "cluster.toml" in said("cluster.toml")
    planned.with_suffix(".json").write_text("{")
    assert "is not JSON" in said("train.plan.toml")
    assert fake_api.ASKED == []


def test_damaged_predictions_keep_nobody_from_checking_the_plan(
    api: fake_api.Fake, planned: Path
) -> None:
    planned.with_suffix(".json").write_text("{")
    assert main(["plan", "train.py", "--check", "train.plan.toml"]) == 0
    assert read_plan(planned).plan is not None


def raising(error: BaseException) -> Callable[[], None]:
    def outcome() -> None:
        raise error

    return outcome


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (CaptureRefused("a branch on data", expected="none", remedy="use torch.where"), 2),
        (Infeasible("nothing fits 3 MiB", expected="171 MiB", remedy="--memory 171MiB"), 3),
        (NonFinite("the loss is nan at step 3", expected="a number", remedy="lower lr"), 4),
    ],
)
def test_errors_of_ours_carry_their_exit_code(
    api: fake_api.Fake, capsys: pytest.CaptureFixture[str], error: Exception, code: int
) -> None:
    api.outcome = raising(error)
    assert error.args[0] in fails(capsys, "plan", "train.py", code=code)


USERS = """
def workload():
    prepare()

def prepare():
    {0}
"""


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("1 / 0", "ZeroDivisionError: division by zero"),
        ("raise SystemExit(7)", "SystemExit: 7"),
        ("raise RuntimeError('x' * 5000 + '\\n' * 50)", "RuntimeError: xxx"),
        ("raise ValueError('\\x1b[2J\\x07')", "ValueError: \\x1b[2J\\x07"),
        ("raise KeyError", "KeyError"),
    ],
)
def test_an_error_in_the_users_script_names_their_line(
    api: fake_api.Fake, capsys: pytest.CaptureFixture[str], body: str, said: str, tmp_path: Path
) -> None:
    script = tmp_path / "train.py"
    script.write_text(USERS.format(body))
    scope: dict[str, Any] = {}
    exec(compile(script.read_text(), str(script), "exec"), scope)  # as api.load_workload does
    api.outcome = scope["workload"]
    lines = fails(capsys, "plan", "train.py", code=2)
    assert "planning failed at train.py:6 in prepare" in lines
    assert said in lines
    assert "--debug" in lines


def test_debug_shows_the_traceback(api: fake_api.Fake, capsys: pytest.CaptureFixture[str]) -> None:
    api.outcome = raising(RuntimeError("deep inside"))
    assert main(["plan", "train.py", "--debug"]) == 2
    err = capsys.readouterr().err
    assert "Traceback" in err
    assert err.splitlines()[-1].startswith("next: ")


@pytest.mark.parametrize("error", [RuntimeError("deep"), Mismatch("a", expected="b", remedy="c")])
def test_what_a_failed_run_has_saved_is_said_last(
    api: fake_api.Fake, planned: Path, capsys: pytest.CaptureFixture[str], error: Exception
) -> None:
    then(error, "step 3 is saved; continue with --resume c")

    def outcome() -> None:
        if fake_api.ASKED[-1][0] == "run_workload":
            raise error

    api.outcome = outcome
    code = 2 if isinstance(error, Mismatch) else 4
    said = fails(capsys, "run", "train.py", "--steps", "2", code=code)
    assert " ".join(said.split()).endswith("; step 3 is saved; continue with --resume c")


def test_memory_that_ran_out_is_called_by_its_name(
    api: fake_api.Fake, planned: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def outcome() -> None:
        if fake_api.ASKED[-1][0] == "run_workload":
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

    api.outcome = outcome
    assert "smaller --memory" in fails(capsys, "run", "train.py", "--steps", "2", code=4)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            "explain train.plan.toml --html no/such/folder/x.html",
            "the folder no/such/folder does not exist",
        ),
        ("run train.py --html .", "is a directory"),
        ("frontier train.py --html no/x.html", "cannot be written"),
        ("plan train.py --html no/x.html", "cannot be written"),
        ("plan train.py -o no/x.toml", "the folder no does not exist"),
        ("plan train.py -o folder.toml", "folder.toml is a directory"),
    ],
)
def test_what_cannot_be_written_is_said_before_any_work(
    api: fake_api.Fake,
    planned: Path,
    arguments: str,
    said: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    Path("folder.toml").mkdir()
    assert said in fails(capsys, *arguments.split(), code=2)
    assert fake_api.ASKED == []


def test_a_disk_that_is_full_costs_the_page_and_not_the_receipt(
    api: fake_api.Fake,
    planned: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def full(path: Path, *_: Any, **__: Any) -> Any:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("steelyard.report.html.to_html", lambda _: "<svg")
    assert main(["run", "train.py", "--steps", "2", "--html", "/dev/full"]) == 2
    assert "<- largest miss" in capsys.readouterr().out
    assert read_plan(planned).measured == MEASURED
    assert main(["explain", str(planned), "--html", "page.html"]) == 0
    monkeypatch.setattr(os, "fsync", full)
    assert main(["explain", str(planned), "--html", "page.html"]) == 2
    assert "page.html cannot be written: No space left" in capsys.readouterr().err
    assert Path("page.html").read_text() == "<svg"
    assert sorted(p.name for p in Path().iterdir() if "page" in p.name) == ["page.html"]


# --- as a process ---------------------------------------------------------------------------------


def steelyard_process(*arguments: str, fake: str = "", **kwargs: Any) -> "subprocess.Popen[str]":
    how = ["-m", "tests.unit.cli.fake_api", fake] if fake else ["-m", "steelyard"]
    return subprocess.Popen(
        [sys.executable, *how, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        env={**os.environ, "PYTHONPATH": PYTHONPATH, **kwargs.pop("env", {})},
        **kwargs,
    )


@pytest.mark.parametrize(
    "verb",
    ["plan train.py", "run train.py --plan train.plan.toml", "frontier train.py", "doctor", "demo"],
)
def test_ctrl_c_is_one_line_and_130(verb: str, planned: Path) -> None:
    process = steelyard_process(
        *verb.split(), fake="wait", cwd=planned.parent, start_new_session=True
    )
    assert process.stderr is not None
    assert process.stderr.readline() == "waiting\n"
    os.killpg(process.pid, signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert err.startswith("steelyard: interrupted")
    assert err.count("\n") == 1
    with pytest.raises(ProcessLookupError):
        os.killpg(process.pid, 0)


def test_ctrl_c_that_an_import_swallowed_still_stops(
    api: fake_api.Fake, capsys: pytest.CaptureFixture[str]
) -> None:
    def swallow() -> None:
        with contextlib.suppress(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)

    api.outcome = swallow
    assert main(["plan", "train.py"]) == 130
    assert capsys.readouterr().err == "steelyard: interrupted\n"
    assert not Path("train.plan.toml").exists()

    def swallow_and_fail() -> None:
        swallow()
        raise AttributeError("partially initialized module")

    api.outcome = swallow_and_fail
    assert main(["plan", "train.py", "--json"]) == 130
    captured = capsys.readouterr()
    assert captured.err.endswith("steelyard: interrupted\n")
    assert json.loads(captured.out)["kind"] == "Interrupted"
    api.outcome = None
    assert main(["plan", "train.py"]) == 0


def test_ctrl_c_in_a_run_says_how_far_it_came(planned: Path) -> None:
    process = steelyard_process(
        *["run", "train.py", "--steps", "100000", "--seed", "50"], fake="answer", cwd=planned.parent
    )
    assert process.stderr is not None
    assert process.stderr.readline() == "note: the first step was taken\n"
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert err.splitlines()[-1].startswith("steelyard: interrupted after step ")


@pytest.mark.parametrize("saved", [True, False])
def test_a_run_that_sigterm_stopped_shows_its_receipt_and_exits_with_143(
    api: fake_api.Fake, planned: Path, saved: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("c/step-000003" if saved else "c").mkdir(parents=True)
    api.measured = replace(MEASURED, steps=3)
    assert main(["run", "train.py", "--steps", "4", "--checkpoint", "c", "--quiet"]) == 143
    captured = capsys.readouterr()
    assert "<- largest miss" in captured.out
    again = "; continue with --resume c" if saved else ""
    assert captured.err == f"steelyard: interrupted after step 4 of 4{again}\n"


def test_a_reader_who_leaves_is_no_error(planned: Path) -> None:
    with steelyard_process("explain", str(planned)) as process:
        assert process.stdout is not None
        process.stdout.close()
        assert process.wait(timeout=60) == 0
        assert process.stderr is not None
        assert process.stderr.read() == ""


def test_a_plan_for_one_rank_has_nothing_to_adapt(
    api: fake_api.Fake, planned: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "nothing to adapt" in fails(capsys, "run", "train.py", "--adapt", code=2)
    assert fake_api.ASKED == []


@pytest.fixture
def on_two_ranks(planned: Path) -> Path:
    shared = ShardBatchRule(ranks=2, bucket=1 << 20)
    target = replace(PLAN.decisions.target, ranks=2)
    write_plan(
        planned.with_name("two.plan.toml"),
        replace(PLAN, decisions=replace(PLAN.decisions, target=target, rules=(shared,))),
    )
    return planned


@pytest.mark.parametrize("error", [RankFailed, KeyboardInterrupt, RuntimeError])
@pytest.mark.parametrize("debug", [False, True])
def test_what_ranks_wrote_stays_only_where_it_is_asked_for(
    api: fake_api.Fake,
    on_two_ranks: Path,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    debug: bool,
    error: type[BaseException],
) -> None:
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    run = ["run", "train.py", "--plan", "two.plan.toml", "--steps", "2", *["--debug"] * debug]
    assert main(run) == 0
    assert not list(folder.iterdir())

    def fail() -> None:
        if fake_api.ASKED[-1][0] == "launch":
            assert fake_api.ASKED[-1][1]["logs_stay"] == debug
            assert list(folder.glob("steelyard-*/run-1"))
            if error is RankFailed:
                raise RankFailed("rank 1 was killed", expected="none", remedy="start again")
            raise error

    api.outcome = fail
    assert main(run) in (4, 130)
    assert bool(list(folder.iterdir())) == (debug and error is not KeyboardInterrupt)


@pytest.mark.parametrize("out", ["file", "pipe"])
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("plan train.py -o new.plan.toml", "memory (peak/rank)"),
        ("run train.py --steps 5", "largest miss"),
        ("run train.py --plan two.plan.toml --steps 5", "largest miss"),
        ("run train.py --steps 5 --quiet", "largest miss"),
        ("frontier train.py", "next cent"),
    ],
)
@pytest.mark.parametrize("in_json", [False, True])
def test_from_a_terminal_stdout_still_goes_where_it_leads(
    on_two_ranks: Path, arguments: str, said: str, in_json: bool, out: str
) -> None:
    """Progress is drawn on the terminal behind stderr, and nothing else is."""
    planned = on_two_ranks
    reader, terminal = pty.openpty()
    path = planned.with_name("out")
    with path.open("wb") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.unit.cli.fake_api", "answer", *arguments.split()]
            + ["--json"] * in_json,
            stdin=subprocess.DEVNULL,
            stdout=file if out == "file" else subprocess.PIPE,
            stderr=terminal,
            env={**os.environ, "PYTHONPATH": PYTHONPATH, "TERM": "xterm-256color"},
            cwd=planned.parent,
        )
        os.close(terminal)
        drawn, piped = _until_closed(reader), b""
        if process.stdout is not None:
            piped = process.stdout.read()
            process.stdout.close()
    assert process.wait(timeout=60) == 0
    written = (path.read_bytes() + piped).decode()
    if in_json:
        assert json.loads(written)["schema"].startswith("steelyard.")
    else:
        assert said in written
    assert said not in drawn
    assert "schema" not in drawn
    assert ("loss" in drawn) == ("run" in arguments and "--quiet" not in arguments)


def _until_closed(reader: int) -> str:
    found = b""
    # Linux says EIO once nobody holds the terminal's other end.
    with contextlib.suppress(OSError):
        while more := os.read(reader, 65536):
            found += more
    os.close(reader)
    return found.decode()


def test_output_that_finds_no_room_is_said_so(planned: Path) -> None:
    with Path("/dev/full").open("w") as full:
        found = subprocess.run(
            [sys.executable, "-m", "steelyard", "explain", str(planned)],
            env={**os.environ, "PYTHONPATH": PYTHONPATH},
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    assert found.returncode == 2
    assert found.stderr.startswith("steelyard: the output cannot be written: No space left")


def test_what_stderr_cannot_take_is_still_in_the_json(planned: Path) -> None:
    """As of a terminal that was closed while a run went on."""
    with Path("/dev/full").open("w") as full:
        found = subprocess.run(
            [sys.executable, "-m", "steelyard", "explain", "none.toml", "--json"],
            env={**os.environ, "PYTHONPATH": PYTHONPATH},
            stdout=subprocess.PIPE,
            stderr=full,
            text=True,
            check=False,
        )
    assert found.returncode == 2
    assert "does not exist" in json.loads(found.stdout)["happened"]


ENDING = """
import atexit, os, sys, threading, time
from concurrent.futures import ThreadPoolExecutor
from steelyard.cli import command, main

class Seen:
    def __del__(self):
        os.write(1, b"modules were taken apart\\n")

def late():
    time.sleep(0.3)
    print("the thread ended")

seen = Seen()
atexit.register(print, "what was registered ran")
ThreadPoolExecutor(1).submit(time.sleep, 0)
threading.Thread(target=late).start()
how = sys.argv.pop(1)
if how == "as a command":
    command()
sys.exit(main())
"""


@pytest.mark.parametrize(
    ("arguments", "code"), [("explain train.plan.toml", 0), ("explain none.toml", 2), ("bogus", 2)]
)
@pytest.mark.parametrize("how", ["as a command", "from Python"])
def test_a_command_ends_without_taking_python_apart(
    planned: Path, how: str, arguments: str, code: int
) -> None:
    """Threads, executors and all that is registered for the end are waited for; the rest is left to
    the operating system. Whoever calls main() has Python's own end."""
    found = subprocess.run(
        [sys.executable, "-c", ENDING, how, *arguments.split()],
        cwd=planned.parent,
        env={**os.environ, "PYTHONPATH": PYTHONPATH},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert found.returncode == code
    assert ("modules were taken apart" in found.stdout) == (how == "from Python")
    said = [line for line in found.stdout.splitlines() if line.startswith(("the thr", "what was"))]
    assert said == ["the thread ended", "what was registered ran"]
    assert ("plan ecd4" in found.stdout) == (code == 0)


def test_a_log_that_is_closed_does_not_stop_training(planned: Path) -> None:
    run = "run train.py --steps 40"
    with steelyard_process(*run.split(), fake="answer", cwd=planned.parent) as process:
        assert process.stderr is not None
        process.stderr.close()
        assert process.stdout is not None
        assert "<- largest miss" in process.stdout.read()
        assert process.wait(timeout=60) == 0


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8"])
def test_any_encoding_is_plain_and_never_crashes(planned: Path, encoding: str) -> None:
    write_explanation(planned, replace(PLAN, title="größe ☃ \udcff"))
    process = steelyard_process(
        "explain", str(planned), env={"PYTHONIOENCODING": encoding, "TERM": "xterm-256color"}
    )
    out, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (0, "")
    assert "\x1b" not in out


@pytest.mark.parametrize(
    "arguments", ["--help", "plan --help", "explain train.plan.toml", "explain none.toml", "bogus"]
)
def test_what_only_reads_a_plan_never_imports_torch(planned: Path, arguments: str) -> None:
    probe = (
        "import sys; from steelyard.cli import main; code = main(sys.argv[1:]); "
        "print(sorted({'torch', 'numpy', 'ortools'} & set(sys.modules)), file=sys.stderr)"
    )
    found = subprocess.run(
        [sys.executable, "-c", probe, *arguments.split()],
        cwd=planned.parent,
        capture_output=True,
        text=True,
        check=True,
    )
    assert found.stderr.splitlines()[-1] == "[]"


def test_help_tells_the_verbs_and_the_exit_codes(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    out = capsys.readouterr().out
    verbs = ("plan", "run", "frontier", "simulate", "scale", "explain", "doctor", "demo")
    for verb in (*verbs, "--install-completion"):
        assert f" {verb} " in out
    for code in ("0 ok", "2 bad input", "3 no plan", "4 the run", "5 a measurement", "130"):
        assert code in out
