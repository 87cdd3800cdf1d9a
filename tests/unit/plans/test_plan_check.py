"""Plans whose ranks this machine cannot provide are refused before anything is started."""

import os
import resource
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest

from steelyard.errors import BadInput, Mismatch, PlanFileError
from steelyard.hardware.cluster import most_ranks_here
from steelyard.plan_files.plan_file import decode_decisions, encode_decisions
from steelyard.plans.plan import Decisions
from steelyard.plans.plan_check import check_startable
from steelyard.trades.shard_batch import ShardBatchRule
from tests.support.sample import DECISIONS

MOST = most_ranks_here()


def on_ranks(ranks: int, *, target: int | None = None, hosts: int = 1) -> Decisions:
    """Return a plan that was made for this many ranks and uses them all."""
    rule = ShardBatchRule(ranks=ranks, bucket=1 << 20)
    asked = replace(DECISIONS.target, ranks=target or ranks, hosts=hosts)
    return replace(DECISIONS, target=asked, rules=(rule,) if ranks > 1 else ())


def test_as_many_ranks_as_this_machine_allows_are_accepted() -> None:
    for decisions in (on_ranks(1), on_ranks(2), on_ranks(MOST), on_ranks(2, target=MOST)):
        check_startable("a.plan.toml", decisions)
    check_startable("a.plan.toml", on_ranks(2 * MOST, hosts=2))


@pytest.mark.parametrize(
    "decisions",
    [
        on_ranks(MOST + 1),
        on_ranks(1_000_000),
        on_ranks(2, target=MOST + 1),
        on_ranks(1_000_000, hosts=2),
        on_ranks(4, target=2),
        on_ranks(3, target=4, hosts=2),
        replace(on_ranks(2), target=replace(on_ranks(2).target, speeds=(1.0,))),
        replace(on_ranks(2), target=replace(on_ranks(2).target, runner="another")),
        replace(on_ranks(2), target=replace(on_ranks(2).target, decomposition="python-9")),
    ],
)
def test_a_plan_for_other_ranks_than_can_be_here_is_refused(decisions: Decisions) -> None:
    with pytest.raises((Mismatch, BadInput)) as refused:
        check_startable("a.plan.toml", decisions)
    assert len(str(refused.value).splitlines()) == 3


@pytest.mark.parametrize("count", [0, -1, 1_000_001, 2**31, 2**62, 2**63, 10**400])
@pytest.mark.parametrize("key", ["ranks = {}", "hosts = {}"])
def test_counts_of_ranks_and_hosts_are_bounded_in_the_file(count: int, key: str) -> None:
    text = encode_decisions(DECISIONS)
    head = text.replace("[target]\n", f"[target]\n{key.format(count)}\n")
    with pytest.raises(PlanFileError):
        decode_decisions(head)


@pytest.mark.parametrize("count", [0, -1, 1, 1_000_001, 2**62, 10**400])
@pytest.mark.parametrize(
    "table",
    [
        '[[shard_batch]]\nranks = {}\nbucket = "1 MiB"',
        '[[shard_tensor]]\nranks = {}\nparameter = "a"\ndim = 0',
        '[[shard_states]]\nranks = {}\nparameter = "a"',
        '[[shard_pipeline]]\nranks = {}\nschedule = "1f1b"\nbehind = "a"',
    ],
)
def test_ranks_of_a_rule_are_bounded_in_the_file(count: int, table: str) -> None:
    text = encode_decisions(DECISIONS) + f"\n{table.format(count)}\n"
    with pytest.raises(PlanFileError):
        decode_decisions(text)


@pytest.mark.parametrize("ranks", [1_000_000, MOST + 1, 2**62, -4])
def test_run_refuses_too_many_ranks_before_importing_torch(ranks: int, tmp_path: Path) -> None:
    text = encode_decisions(on_ranks(2))
    assert text.count("ranks = 2") == 2
    (tmp_path / "train.plan.toml").write_text(text.replace("ranks = 2", f"ranks = {ranks}"))
    (tmp_path / "train.py").write_text("raise SystemExit('imported')")
    stand_in = tmp_path / "stand_in"
    stand_in.mkdir()
    (stand_in / "torch.py").write_text("raise SystemExit('torch was imported')")
    root = Path(__file__).resolve().parents[3]
    run = subprocess.run(
        [sys.executable, "-m", "steelyard", "run", "train.py"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": f"{stand_in}:{root / 'src'}"},
        capture_output=True,
        text=True,
        check=False,
        # A process whose memory grows with a count of 2**62 would exceed this limit.
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30)),
    )
    assert run.returncode == 2, run.stderr
    assert run.stdout == ""
    happened, *_, expected, remedy = run.stderr.splitlines()
    assert happened.startswith("steelyard: train.plan.toml "), run.stderr
    # If the count is not allowed in a file, the message has two parts.
    assert len(run.stderr.splitlines()) == (3 if 0 < ranks <= 1_000_000 else 5)
    assert "ranks" in run.stderr
    assert expected.startswith("expected: "), run.stderr
    assert remedy.startswith("next: "), run.stderr


def test_the_largest_number_of_ranks_depends_on_the_cores() -> None:
    with mock.patch("steelyard.hardware.host_os.num_cores", return_value=4):
        assert most_ranks_here() == 32
