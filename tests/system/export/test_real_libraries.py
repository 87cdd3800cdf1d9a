"""Exported files are loaded by the libraries that they are for.

torchtitan is not installed for tests: it needs datasets, wandb, tensorboard and triton. Its fields
are recorded instead (tests/unit/export/torchtitan_fields.json). All cases were loaded with
torchtitan 0.3.0 and SkyPilot 0.14.1 by hand on 2026-11-29.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from steelyard.export.settings import NumberFormats
from steelyard.export.target import ExportTarget
from steelyard.plans.plan import Decisions
from tests.unit.export.plans import CASES, TENSOR
from tests.unit.export.test_target import written

ROOT = Path(__file__).resolve().parents[3]
LOADED = {name: plan for name, plan in CASES.items() if name not in ("unequal", "compiled")}
SINGLE = NumberFormats(weights="float32", products="float32")


def text(target: ExportTarget, decisions: Decisions, *, device: str = "cpu") -> str:
    return written(target, decisions, formats=SINGLE, device=device).file.text


@pytest.mark.slow
@pytest.mark.parametrize("case", LOADED)
def test_transformers_loads_the_arguments(case: str, tmp_path: Path) -> None:
    from transformers import HfArgumentParser, TrainingArguments

    path = tmp_path / "train.trainer.json"
    fields = json.loads(text(ExportTarget.TRAINER, LOADED[case]))
    path.write_text(json.dumps({**fields, "output_dir": str(tmp_path)}))
    (found,) = HfArgumentParser(TrainingArguments).parse_json_file(str(path))
    assert found.per_device_train_batch_size == fields["per_device_train_batch_size"]
    assert found.gradient_accumulation_steps == fields["gradient_accumulation_steps"]
    assert found.activation_checkpointing == fields.get("activation_checkpointing", False)
    if "fsdp" in fields:
        assert found.fsdp_plugin_args["fsdp_version"] == 2
        wanted = fields["fsdp_config"]["reshard_after_forward"]
        assert found.fsdp_plugin_args["reshard_after_forward"] == wanted


@pytest.mark.slow
@pytest.mark.parametrize("case", [*LOADED, "tensor"])
def test_accelerate_loads_the_configuration(case: str, tmp_path: Path) -> None:
    from accelerate.commands.config.config_args import load_config_from_file
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser

    decisions = {**LOADED, "tensor": TENSOR}[case]
    path = tmp_path / "train.accelerate.yaml"
    path.write_text(text(ExportTarget.ACCELERATE, decisions))
    config = load_config_from_file(str(path))
    assert config.num_processes == decisions.target.ranks
    # The launcher reads each key into an argument of its own.
    given = ["--config_file", str(path), "train.py"]
    arguments, _, _ = _validate_launch_command(launch_command_parser().parse_args(given))
    assert arguments.num_processes == decisions.target.ranks
    assert arguments.use_fsdp == bool(config.fsdp_config)
    for key, value in {**config.fsdp_config, **config.parallelism_config}.items():
        assert str(getattr(arguments, key)) == str(value), key


@pytest.mark.slow
def test_deepspeed_loads_the_configuration(tmp_path: Path) -> None:
    """In a process of its own: DeepSpeed looks for accelerators when it is imported."""
    for case, decisions in LOADED.items():
        path = tmp_path / f"{case}.json"
        path.write_text(text(ExportTarget.DEEPSPEED, decisions))
    code = (
        "import json, pathlib, sys\n"
        "from deepspeed.runtime.config import DeepSpeedConfig\n"
        "found = {}\n"
        "for path in pathlib.Path(sys.argv[1]).glob('*.json'):\n"
        "    config = DeepSpeedConfig(str(path))\n"
        "    found[path.stem] = (config.train_micro_batch_size_per_gpu,\n"
        "        config.gradient_accumulation_steps, config.zero_optimization_stage)\n"
        "pathlib.Path(sys.argv[2]).write_text(json.dumps(found))\n"
    )
    result = tmp_path / "found"
    run = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path), str(result)],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    found: dict[str, Any] = json.loads(result.read_text())
    assert found.keys() == LOADED.keys()
    assert found["plain"] == [8, 1, 0]
    assert found["micro-batches"] == [4, 2, 0]
    assert found["weights in host memory"] == [8, 1, 3]
    assert found["sharded"] == [4, 1, 3]


_MODEL = """
import torch
from torch import nn


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))

    def forward(self, x):
        return x + self.inner(x)


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Sequential(*(Block() for _ in range(3))), nn.Linear(16, 4))


def batch():
    torch.manual_seed(1)
    return {"x": torch.randn(8, 16), "y": torch.randint(4, (8,))}


def loss(model, batch):
    return nn.functional.cross_entropy(model(batch["x"]), batch["y"])
"""
_RANK = """
import json, os, sys
sys.path[:0] = [sys.argv[1]]
import torch
import torch.distributed as dist
import the_model
import train_fsdp2 as exported

ranks = exported.RANKS
rank = int(os.environ.get("RANK", "0"))
if ranks > 1:
    dist.init_process_group("gloo")
model = exported.apply(the_model.model(), device_type="cpu")
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
own = {key: value.chunk(ranks)[rank] for key, value in the_model.batch().items()}
losses = []
for _ in range(3):
    value = exported.train_step(model, the_model.loss, own, optimizer)
    if ranks > 1:
        dist.all_reduce(value)
    losses.append(float(value) / ranks)
names = sorted({type(module).__name__ for module in model.modules()})
if rank == 0:
    with open(os.path.join(sys.argv[1], "said.json"), "w") as file:
        json.dump({"losses": losses, "modules": names}, file)
if ranks > 1:
    dist.destroy_process_group()
"""


def plain_losses() -> list[float]:
    import torch

    names: dict[str, Any] = {}
    exec(_MODEL, names)
    model = names["model"]()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        value = names["loss"](model, names["batch"]())
        value.backward()
        optimizer.step()
        losses.append(value.item())
    return losses


@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.parametrize(
    ("case", "module"),
    [
        ("micro-batches", "CheckpointWrapper"),
        ("offload", "OffloadWrapper"),
        ("data", "DistributedDataParallel"),
        ("sharded", "FSDPCheckpointWrapper"),
        ("sharded, offloaded", "FSDPBlock"),
    ],
)
def test_the_exported_python_trains_as_plain_pytorch(
    case: str, module: str, tmp_path: Path
) -> None:
    (tmp_path / "the_model.py").write_text(_MODEL)
    (tmp_path / "rank.py").write_text(_RANK)
    (tmp_path / "train_fsdp2.py").write_text(text(ExportTarget.FSDP2, CASES[case]))
    ranks = CASES[case].target.ranks
    how = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    run = subprocess.run(
        [sys.executable, *(how if ranks > 1 else []), str(tmp_path / "rank.py"), str(tmp_path)],
        capture_output=True, text=True, check=False, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    said = json.loads((tmp_path / "said.json").read_text())
    assert module in said["modules"]
    assert said["losses"] == pytest.approx(plain_losses(), rel=1e-5)
