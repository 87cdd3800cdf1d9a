"""`steelyard simulate`: the trace of a plan, from its script or from its plan file."""

import json
from pathlib import Path

import pytest

from steelyard.cli import main
from steelyard.hardware.cluster import Cluster
from tests.unit.cli import fake_api
from tests.unit.cli.commands import arguments_of, failure_of


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


def test_simulate_finds_the_script_and_cluster_of_a_plan_file(
    api: fake_api.Fake, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", "other.py", "--cluster", "dgx-h100", "-o", "x.plan.toml"]) == 0
    for command in (
        ["simulate", "x.plan.toml", "--trace", "trace.json"],
        ["plan", "other.py", "--check", "x.plan.toml"],
        ["simulate", "x.plan.toml", "--trace", "trace.json"],
    ):
        fake_api.CALLS.clear()
        assert main(command) == 0
        assert arguments_of("load_workload") == {"train": "other.py"}
        found = arguments_of("load_planned")
        assert found["path"] == Path("x.plan.toml")
        assert found["cluster"].fingerprint == Cluster.named("dgx-h100").fingerprint
    assert main(["simulate", "x.plan.toml", "--trace", "t.json", "--cluster", "dgx-a100"]) == 0
    found = [a for n, a in fake_api.CALLS if n == "load_planned"][-1]
    assert found["cluster"].fingerprint == Cluster.named("dgx-a100").fingerprint
    capsys.readouterr()
    said = failure_of(
        capsys, "simulate", "x.plan.toml", "--plan", "y.plan.toml", "--trace", "t.json", code=2
    )
    assert "x.plan.toml is a plan file, and --plan names one too" in said
    Path("x.plan.json").unlink()
    said = failure_of(capsys, "simulate", "x.plan.toml", "--trace", "t.json", code=2)
    assert "the predictions file of x.plan.toml does not name its script" in said
