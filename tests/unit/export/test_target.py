"""The files for each tool: their text, their names, and where they are written."""

from __future__ import annotations

import ast
import json
from dataclasses import dataclass, fields, make_dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

from steelyard.errors import BadInput
from steelyard.export.exported import Exported, ExportedFile, ExportPrice, write_export
from steelyard.export.settings import NumberFormats
from steelyard.export.target import ExportTarget, configuration, settings_for
from steelyard.ir.metrics import Estimate
from steelyard.plans.plan import Decisions
from tests.unit.export.plans import CASES, PIPELINE, TENSOR

CASES_OF_ALL = {name: plan for name, plan in CASES.items() if name != "unequal"}


def written(
    target: ExportTarget,
    decisions: Decisions,
    *,
    formats: NumberFormats | None = None,
    device: str = "",
    price: ExportPrice | None = None,
) -> Exported:
    formats = formats or NumberFormats(weights="float32", products="float32")
    settings = settings_for(target, decisions, formats=formats, device=device)
    name = target.file_name("train")
    return configuration(target, decisions, settings, name=name, price=price)


def arguments(case: str, **asked: Any) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(
        written(ExportTarget.TRAINER, CASES[case], **asked).file.text
    )
    return found


def test_trainer() -> None:
    assert arguments("micro-batches") == {
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "bf16": False,
        "fp16": False,
        "activation_checkpointing": True,
        "activation_checkpointing_kwargs": {"use_reentrant": False},
    }
    assert arguments("offload")["activation_checkpointing_kwargs"] == {"offload": True}
    mixed = arguments("plain", formats=NumberFormats(weights="float32", products="bfloat16"))
    assert mixed["bf16"] is True
    assert arguments("data")["ddp_bucket_cap_mb"] == 4
    assert arguments("compiled")["torch_compile"] is True
    assert arguments("plain", device="cpu")["use_cpu"] is True
    sharded = arguments("sharded")
    assert sharded["fsdp"] is True
    assert sharded["fsdp_config"]["reshard_after_forward"] is True
    # FSDP checkpoints the blocks itself, and refuses to do it twice.
    assert sharded["fsdp_config"]["activation_checkpointing"] is True
    assert "activation_checkpointing" not in sharded
    assert arguments("state in host memory")["fsdp_config"]["cpu_offload"] is True


def test_accelerate() -> None:
    def document(decisions: Decisions, **asked: Any) -> dict[str, Any]:
        text = written(ExportTarget.ACCELERATE, decisions, **asked).file.text
        assert text.startswith("# The nearest settings to plan")
        found: dict[str, Any] = yaml.safe_load(text)
        return found

    assert document(CASES["plain"])["distributed_type"] == "NO"
    assert document(CASES["data"])["distributed_type"] == "MULTI_GPU"
    assert document(CASES["data"], device="cpu")["distributed_type"] == "MULTI_CPU"
    sharded = document(CASES["sharded"])
    assert (sharded["distributed_type"], sharded["num_processes"]) == ("FSDP", 2)
    assert sharded["fsdp_config"]["fsdp_activation_checkpointing"] is True
    tensor = document(TENSOR)
    assert tensor["num_processes"] == 4
    assert tensor["parallelism_config"]["parallelism_config_tp_size"] == 2
    by_hand = written(ExportTarget.ACCELERATE, CASES["micro-batches"]).by_hand
    assert by_hand[0] == "make batches of 4 in the data loader"
    assert "gradient_accumulation_steps=2" in by_hand[1]
    assert "gradient_checkpointing_enable" in by_hand[2]


def test_deepspeed() -> None:
    def fields_of(case: str, **asked: Any) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(
            written(ExportTarget.DEEPSPEED, CASES[case], **asked).file.text
        )
        return found

    assert fields_of("micro-batches")["gradient_accumulation_steps"] == 2
    assert fields_of("data")["zero_optimization"] == {"stage": 0, "reduce_bucket_size": 1 << 20}
    assert fields_of("sharded")["zero_optimization"]["stage"] == 3
    offloaded = fields_of("state in host memory", device="cpu")["zero_optimization"]
    assert offloaded == {"stage": 2, "offload_optimizer": {"device": "cpu", "pin_memory": False}}
    weights = fields_of("weights in host memory")["zero_optimization"]
    assert (weights["stage"], weights["offload_param"]["device"]) == (3, "cpu")
    assert fields_of("offload")["activation_checkpointing"]["cpu_checkpointing"] is True
    half = NumberFormats(weights="bfloat16", products="bfloat16")
    assert fields_of("plain", formats=half)["bf16"] == {"enabled": True}
    notes = written(ExportTarget.DEEPSPEED, CASES["plain"], formats=half).notes
    assert "DeepSpeed keeps a float32 copy of the weights, which the plan does not" in notes


# --- torchtitan: its own fields, as recorded from the library ------------------------------------

FIELDS: dict[str, dict[str, list[Any]]] = json.loads(
    (Path(__file__).parent / "torchtitan_fields.json").read_text(encoding="utf-8")
)


def stand_in() -> tuple[Any, dict[str, ModuleType]]:
    """Return a configuration with the recorded fields and no others, and stand-ins for modules."""
    config = make_dataclass("Config", [*FIELDS, "activation_checkpoint", "loss"], slots=True)
    sections = {
        section: make_dataclass(section, list(names), slots=True)(**dict.fromkeys(names))
        for section, names in FIELDS.items()
    }

    @dataclass
    class ChunkedLossWrapper:
        @dataclass
        class Config:
            loss_fn: Any
            num_chunks: int

    class Policy:
        class Config: ...

    def module(name: str, value: Any) -> ModuleType:
        found = ModuleType(name)
        setattr(found, name, value)
        return found

    trainer = type("Trainer", (), {"Config": config})
    modules = {
        "torchtitan": ModuleType("torchtitan"),
        "torchtitan.components": ModuleType("components"),
        "torchtitan.components.loss": module("ChunkedLossWrapper", ChunkedLossWrapper),
        "torchtitan.distributed": ModuleType("distributed"),
        "torchtitan.distributed.activation_checkpoint": module("FullAC", Policy),
        "torchtitan.trainer": module("Trainer", trainer),
    }
    plain = config(**sections, activation_checkpoint="before", loss="cross entropy")
    return plain, modules


def with_plan(monkeypatch: pytest.MonkeyPatch, decisions: Decisions, **asked: Any) -> Any:
    """Apply the exported file; a field that torchtitan does not have raises an error."""
    config, modules = stand_in()
    for name, module in modules.items():
        monkeypatch.setitem(__import__("sys").modules, name, module)
    names: dict[str, Any] = {}
    exec(written(ExportTarget.TORCHTITAN, decisions, **asked).file.text, names)
    config = names["with_plan"](config)
    for section, known in FIELDS.items():
        for field in fields(getattr(config, section)):
            value, allowed = getattr(getattr(config, section), field.name), known[field.name]
            assert value is None or not allowed or value in allowed, (section, field.name, value)
    return config


@pytest.mark.parametrize("case", CASES_OF_ALL)
def test_torchtitan_has_the_fields_that_are_set(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config = with_plan(monkeypatch, CASES[case])
    assert config.training.local_batch_size >= 1


def test_torchtitan(monkeypatch: pytest.MonkeyPatch) -> None:
    config = with_plan(monkeypatch, CASES["micro-batches"])
    training, parallelism = config.training, config.parallelism
    assert (training.local_batch_size, training.global_batch_size, training.seq_len) == (4, 8, 256)
    assert (training.dtype, training.mixed_precision_param) == ("float32", "float32")
    assert type(config.activation_checkpoint).__qualname__.endswith("Policy.Config")
    assert parallelism.data_parallel_replicate_degree == 1
    half = NumberFormats(weights="bfloat16", products="bfloat16")
    training = with_plan(monkeypatch, CASES["plain"], formats=half).training
    assert (training.dtype, training.mixed_precision_param) == ("bfloat16", "bfloat16")
    config = with_plan(monkeypatch, PIPELINE)
    assert config.parallelism.pipeline_parallel_degree == 2
    assert config.training.disable_cuda_graphs is True
    assert config.parallelism.pipeline_parallel_schedule == "1F1B"
    # Four micro-batches of two samples.
    assert config.training.local_batch_size == 8
    assert config.parallelism.pipeline_parallel_microbatch_size == 2
    config = with_plan(monkeypatch, CASES["chunked"])
    # Three chunks do not divide 256 tokens; the next number that does is four.
    assert (config.loss.loss_fn, config.loss.num_chunks) == ("cross entropy", 4)
    assert with_plan(monkeypatch, TENSOR).parallelism.tensor_parallel_degree == 2
    config = with_plan(monkeypatch, CASES["sharded"])
    assert config.parallelism.data_parallel_shard_degree == 2
    assert config.parallelism.fsdp_reshard_after_forward == "always"


@pytest.mark.parametrize("case", CASES_OF_ALL)
@pytest.mark.parametrize("target", [ExportTarget.FSDP2, ExportTarget.TORCHTITAN])
def test_exported_python_is_python(target: ExportTarget, case: str) -> None:
    found = written(target, CASES_OF_ALL[case])
    ast.parse(found.file.text)
    assert found.file.name == f"train_{target.value}.py"


def test_several_nodes_are_started_as_such() -> None:
    for target, said in (
        (ExportTarget.TRAINER, "torchrun --nnodes 2 --nproc-per-node 1 train.py"),
        (ExportTarget.DEEPSPEED, "deepspeed --num_nodes 2 --num_gpus 1 train.py"),
    ):
        settings = settings_for(target, CASES["data"], nodes=2)
        found = configuration(target, CASES["data"], settings, name="file")
        assert found.command == said
    target = ExportTarget.ACCELERATE
    settings = settings_for(target, CASES["data"], nodes=2)
    found = configuration(target, CASES["data"], settings, name="file.yaml")
    assert yaml.safe_load(found.file.text)["num_machines"] == 2
    assert any("main_process_ip" in step for step in found.by_hand)


# --- all tools -----------------------------------------------------------------------------------


def test_files_are_named_by_plan_and_tool() -> None:
    assert ExportTarget.TRAINER.file_name("train") == "train.trainer.json"
    assert ExportTarget.FSDP2.file_name("my.train-2") == "my_train_2_fsdp2.py"
    assert ExportTarget.SLURM.file_name("train") == "train.slurm.sh"


def test_an_export_says_whether_it_keeps_the_budget() -> None:
    def priced(mib: float) -> Exported:
        memory = Estimate.within(mib * 2**20, share=0.05)
        price = ExportPrice(memory_bytes=memory, step_seconds=None)
        return written(ExportTarget.TRAINER, CASES["plain"], price=price)

    assert priced(299).fits
    found = priced(301)
    assert not found.fits
    document = found.to_json()
    assert document["predicted"] == {"memory_bytes": 301 * 2**20, "step_seconds": None}
    assert (document["fits"], document["budget_bytes"]) == (False, 300 * 2**20)
    assert written(ExportTarget.TRAINER, CASES["plain"]).fits, "not predicted"


def test_a_precision_that_is_not_known_is_a_note() -> None:
    found = written(ExportTarget.TRAINER, CASES["plain"], formats=NumberFormats())
    assert "the plan does not say its precision, so none is set: check it" in found.notes


def test_files_that_were_edited_are_kept(tmp_path: Path) -> None:
    path = tmp_path / "train.trainer.json"
    file = ExportedFile(name=path.name, text="{}\n")
    write_export(path, file)
    write_export(path, file)
    path.write_text("{ }\n")
    with pytest.raises(BadInput, match="exists, and is not what this export would write"):
        write_export(path, file)
    assert path.read_text() == "{ }\n"
    with pytest.raises(BadInput):
        write_export(tmp_path, file)
    assert [p.name for p in tmp_path.iterdir()] == [path.name]
