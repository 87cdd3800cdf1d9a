"""A configuration of DeepSpeed, as JSON.

The keys are those of DeepSpeed 0.19. DeepSpeed itself checkpoints nothing: its section only says
how ``deepspeed.checkpointing`` does it. Not for DeepSpeed's pipelines, which are code.
"""

import json
from typing import Any

from steelyard.export.exported import ToolConfiguration
from steelyard.export.omissions import Abilities
from steelyard.export.settings import Settings

ABILITIES = Abilities(
    compiles=False, buckets=True, activation_offload=True, offloads_block_inputs=True
)


def configure(settings: Settings, *, name: str) -> ToolConfiguration:
    """Return the configuration in a file of this name."""
    by_hand = [f"deepspeed.initialize(model=..., config={name!r})"]
    if settings.recomputes_blocks:
        by_hand.append(
            "checkpoint each block: model.gradient_checkpointing_enable(), or "
            "deepspeed.checkpointing.checkpoint"
        )
    is_half = settings.formats.weights in ("bfloat16", "float16")
    note = "DeepSpeed keeps a float32 copy of the weights, which the plan does not"
    nodes = f"--num_nodes {settings.nodes} " if settings.nodes > 1 else ""
    return ToolConfiguration(
        text=json.dumps(_fields(settings), indent=2) + "\n",
        by_hand=tuple(by_hand),
        command=f"deepspeed {nodes}--num_gpus {settings.ranks_of_a_node} train.py",
        notes=(note,) if is_half else (),
    )


def _fields(settings: Settings) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": settings.per_device_batch,
        "gradient_accumulation_steps": settings.micro_batches,
        "bf16": {"enabled": _uses(settings, "bfloat16", "bf16")},
        "fp16": {"enabled": _uses(settings, "float16", "fp16")},
        "zero_optimization": _zero(settings),
    }
    if settings.recomputes_blocks:
        fields["activation_checkpointing"] = {
            "partition_activations": False,
            "cpu_checkpointing": settings.offloads_activations,
            "contiguous_memory_optimization": False,
        }
    return fields


def _zero(settings: Settings) -> dict[str, Any]:
    zero: dict[str, Any] = {"stage": _stage(settings)}
    if settings.bucket_bytes:
        # In elements; gradients are reduced in the dtype of the weights.
        item_bytes = 2 if settings.formats.weights in ("bfloat16", "float16") else 4
        zero["reduce_bucket_size"] = max(1, settings.bucket_bytes // item_bytes)
    if settings.offloaded_state:
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": settings.device != "cpu"}
    if "weight" in settings.offloaded_state:
        zero["offload_param"] = {"device": "cpu", "pin_memory": settings.device != "cpu"}
    return zero


def _stage(settings: Settings) -> int:
    """Return the ZeRO stage; offloading needs one, even on one device."""
    if "weight" in settings.offloaded_state:
        return 3
    return max(settings.zero_stage, 2 if settings.offloaded_state else 0)


def _uses(settings: Settings, dtype: str, mixed: str) -> bool:
    return settings.formats.weights == dtype or settings.formats.mixed_precision == mixed
