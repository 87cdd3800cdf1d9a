"""A configuration file of ``accelerate launch``, as YAML.

The keys are those of accelerate 1.15. The batch, accumulation and (without FSDP) checkpointing are
not part of such a file. Not for DeepSpeed's own file: see deepspeed.py.
"""

from collections.abc import Iterator

from steelyard.export.exported import ToolConfiguration
from steelyard.export.omissions import Abilities
from steelyard.export.settings import Settings
from steelyard.export.yaml_text import YamlValue, to_yaml

ABILITIES = Abilities(tensor=True, zero_stages=(0, 2, 3))


def configure(settings: Settings, *, name: str, comment: tuple[str, ...]) -> ToolConfiguration:
    """Return the configuration in a file of this name."""
    return ToolConfiguration(
        text=to_yaml(_document(settings), comment=comment),
        by_hand=tuple(_by_hand(settings)),
        command=f"accelerate launch --config_file {name} train.py",
    )


def _document(settings: Settings) -> dict[str, YamlValue]:
    ranks = settings.layout.num_ranks
    is_cpu = settings.device == "cpu"
    document: dict[str, YamlValue] = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": _distributed_type(settings),
        "machine_rank": 0,
        "num_machines": settings.nodes,
        "num_processes": ranks,
        "mixed_precision": settings.formats.mixed_precision,
        "use_cpu": is_cpu,
    }
    if _uses_fsdp(settings):
        document["fsdp_config"] = {
            "fsdp_version": 2,
            "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            "fsdp_reshard_after_forward": settings.zero_stage == 3 and settings.regathers,
            "fsdp_offload_params": bool(settings.offloaded_state),
            "fsdp_activation_checkpointing": settings.recomputes_blocks,
            "fsdp_state_dict_type": "SHARDED_STATE_DICT",
            "fsdp_cpu_ram_efficient_loading": False,
        }
    if settings.layout.tensor > 1:
        document["parallelism_config"] = {
            "parallelism_config_dp_replicate_size": 1,
            "parallelism_config_dp_shard_size": settings.layout.data,
            "parallelism_config_tp_size": settings.layout.tensor,
            "parallelism_config_cp_size": 1,
        }
    if settings.compiles:
        document["dynamo_config"] = {"dynamo_backend": "INDUCTOR"}
    return document


def _uses_fsdp(settings: Settings) -> bool:
    """True if the state is sharded or offloaded; tensor parallelism is composed with FSDP alone."""
    return settings.shards_state or bool(settings.offloaded_state) or settings.layout.tensor > 1


def _distributed_type(settings: Settings) -> str:
    if _uses_fsdp(settings):
        return "FSDP"
    if settings.layout.num_ranks == 1:
        return "NO"
    return "MULTI_CPU" if settings.device == "cpu" else "MULTI_GPU"


def _by_hand(settings: Settings) -> Iterator[str]:
    yield f"make batches of {settings.per_device_batch} in the data loader"
    if settings.micro_batches > 1:
        yield (
            f"Accelerator(gradient_accumulation_steps={settings.micro_batches}), and "
            "accelerator.accumulate(model) around the step"
        )
    if settings.recomputes_blocks and not _uses_fsdp(settings):
        yield "model.gradient_checkpointing_enable(), or checkpoint each block yourself"
    if settings.nodes > 1:
        yield "set machine_rank, main_process_ip and main_process_port on each machine"
    if settings.layout.tensor > 1:
        yield "load the model with tp_plan='auto' (transformers)"
