"""`steelyard export`: from a plan file alone, and with its script."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from steelyard.cli import main
from steelyard.export.target import ExportTarget
from steelyard.plan_files.prediction_file import write_plan
from steelyard.plans.plan_on_file import Asked
from steelyard.trades.shard_batch import ShardBatchRule
from steelyard.trades.shard_tensor import ShardTensorRule
from tests.support.sample import DECISIONS, PLAN
from tests.unit.cli import fake_api
from tests.unit.cli.commands import arguments_of, failure_of


@pytest.mark.parametrize("target", [target.value for target in ExportTarget])
def test_each_target_is_written_next_to_the_plan(
    planned: Path, target: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["export", str(planned), "--as", target]) == 0
    said = capsys.readouterr().out
    path = planned.with_name(ExportTarget(target).file_name("train"))
    assert path.stat().st_size
    assert said.startswith(f"plan {DECISIONS.name} as {target}:")
    assert "next: " in said
    assert main(["export", str(planned), "--as", target, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["schema"], document["target"]) == ("steelyard.export/1", target)
    assert document["file"] == str(path)
    assert document["predicted_plan"]["memory_bytes"] == PLAN.predicted.metrics.memory_bytes.value


def test_from_the_file_alone_settings_have_no_price(
    planned: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["export", str(planned), "--as", "trainer"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "settings 4 samples per device and micro-batch; 2 micro-batches; each block" in said
    assert "predicted not predicted" in said
    assert "lost recompute of 8 single values: each block is recomputed as a whole" in said
    assert "the plan peak ~" in said
    assert "name the script as well" in said
    fields = json.loads(planned.with_name("train.trainer.json").read_text())
    assert fields["gradient_accumulation_steps"] == 2


def test_with_the_script_the_settings_are_priced(
    api: fake_api.Fake, planned: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    capsys.readouterr()
    assert main(["export", "train.plan.toml", "train.py", "--as", "trainer"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "predicted peak ~100 MiB, step ~2.00 s" in said
    assert arguments_of("load_workload") == {"train": "train.py"}
    assert arguments_of("exported") == {
        "target": ExportTarget.TRAINER, "name": "train.trainer.json", "script": "train.py",
        "path": "train.plan.toml",
    }  # fmt: skip


def test_settings_beyond_the_budget_are_written_and_end_with_code_3(
    api: fake_api.Fake, planned: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(fake_api, "EXPORTED_MIB", 301)
    assert main(["export", "train.plan.toml", "train.py", "--as", "fsdp2", "-o", "x.py"]) == 3
    said = " ".join(capsys.readouterr().out.split())
    assert "no settings of fsdp2 keep the budget of the plan, 300 MiB" in said
    assert Path("x.py").exists()


def test_a_launch_file_names_the_script_that_was_planned(
    api: fake_api.Fake, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rules = (ShardBatchRule(ranks=16, bucket=1 << 20),)
    target = replace(DECISIONS.target, ranks=16, declared="all (16 H100)")
    decisions = replace(DECISIONS, rules=rules, target=target)
    (tmp_path / "mine.toml").write_text(
        '[device.gpu]\nprice = "2 USD/h"\nmemory = "80 GiB"\nbandwidth = "3 TB/s"\n'
        'peak.float32 = "60 TFLOP/s"\n[link.fast]\nrate = "400 GB/s"\nlatency = "5 us"\n'
        '[scope.node]\nof = [{ device = "gpu", count = 8, link = "fast" }]\n'
        '[scope.all]\nof = [{ scope = "node", count = 2, link = "fast" }]\n'
    )
    path = tmp_path / "far.plan.toml"
    write_plan(path, replace(PLAN, decisions=decisions), asked=Asked(script="other.py"))
    assert main(["export", "far.plan.toml", "--as", "slurm", "--cluster", "dgx-h100"]) == 0
    text = (tmp_path / "far.slurm.sh").read_text()
    assert "steelyard run other.py --plan far.plan.toml" in text
    assert "#SBATCH --gpus-per-node=8\n" in text
    assert "H100-SXM5" in text


def test_what_cannot_be_exported_is_refused(
    planned: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(planned.parent)
    said = failure_of(capsys, "export", "train.py", "--as", "trainer", code=2)
    assert "train.py is not a plan file" in said
    said = failure_of(capsys, "export", "train.plan.toml", "--as", "trainr", code=2)
    assert "trainr" in said
    assert "--as" in failure_of(capsys, "export", "train.plan.toml", code=2)
    said = failure_of(capsys, "export", "none.plan.toml", "--as", "trainer", code=2)
    assert "none.plan.toml: does not exist" in said
    said = failure_of(capsys, "export", "train.plan.toml", "no.py", "--as", "trainer", code=2)
    assert "no.py does not exist" in said
    for taken in ("train.plan.toml", "train.plan.json"):
        said = failure_of(
            capsys, "export", "train.plan.toml", "--as", "trainer", "-o", taken, code=2
        )
        assert "would overwrite an input file" in said
    said = failure_of(
        capsys, "export", "train.plan.toml", "--as", "trainer", "-o", "no/x.json", code=2
    )
    assert "no/x.json cannot be written" in said
    Path("train.trainer.json").write_text("{}\n")
    said = failure_of(capsys, "export", "train.plan.toml", "--as", "trainer", code=2)
    assert "train.trainer.json exists, and is not what this export would write" in said
    assert Path("train.trainer.json").read_text() == "{}\n"


def test_a_layout_that_the_tool_lacks_is_refused_before_torch_is_imported(
    api: fake_api.Fake, planned: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rules = (ShardTensorRule(ranks=2, parameter="blocks.*.weight", dim=0),)
    target = replace(DECISIONS.target, ranks=2)
    plan = replace(PLAN, decisions=replace(DECISIONS, rules=rules, target=target))
    write_plan(planned.with_name("tensor.plan.toml"), plan)
    said = failure_of(capsys, "export", "tensor.plan.toml", "train.py", "--as", "deepspeed", code=2)
    assert "shard_tensor" in said
    assert fake_api.CALLS == []
    assert not list(planned.parent.glob("*deepspeed*"))
