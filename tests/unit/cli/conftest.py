"""A stand-in for steelyard.api, and plan files to work on."""

import signal
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

import steelyard
from steelyard.plan_files.prediction_file import write_plan
from steelyard.trades.shard_batch import ShardBatchRule
from tests.support.sample import PLAN
from tests.unit.cli import fake_api
from tests.unit.cli.commands import write_scripts


@pytest.fixture(autouse=True)
def _heed_ctrl_c() -> Iterator[None]:
    """Shells start background processes with Ctrl-C ignored, and children inherit this."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def api(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> fake_api.Fake:
    fake = fake_api.Fake("steelyard.api")
    monkeypatch.setitem(sys.modules, "steelyard.api", fake)
    monkeypatch.setattr(steelyard, "api", fake, raising=False)
    monkeypatch.setattr(fake_api, "CALLS", [])
    monkeypatch.chdir(tmp_path)
    write_scripts(tmp_path)
    return fake


@pytest.fixture
def planned(tmp_path: Path) -> Path:
    path = tmp_path / "train.plan.toml"
    write_plan(path, PLAN)
    write_scripts(tmp_path)
    return path


@pytest.fixture
def on_two_ranks(planned: Path) -> Path:
    shared = ShardBatchRule(ranks=2, bucket=1 << 20)
    target = replace(PLAN.decisions.target, ranks=2)
    write_plan(
        planned.with_name("two.plan.toml"),
        replace(PLAN, decisions=replace(PLAN.decisions, target=target, rules=(shared,))),
    )
    return planned
