"""`steelyard frontier`: the Pareto front of a script, without a plan file."""

from pathlib import Path

import pytest

from steelyard.cli import main
from steelyard.plans.budget import Budget
from tests.unit.cli import fake_api
from tests.unit.cli.commands import arguments_of


def test_frontier_shows_the_curve_without_a_budget(
    api: fake_api.Fake, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["frontier", "train.py"]) == 0
    assert arguments_of("plan_workload")["budget"] == Budget()
    assert arguments_of("charted") == {}
    assert "*  ~296 MiB    ~1.24 s" in capsys.readouterr().out
    assert not Path("train.plan.toml").exists()
