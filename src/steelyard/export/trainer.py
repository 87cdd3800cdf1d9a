"""Arguments of ``transformers.TrainingArguments``, as JSON.

The keys are those of transformers 5.23. Not for the arguments that a plan does not decide, such as
the learning rate.
"""

import json
from typing import Any

from steelyard.export.exported import ToolConfiguration
from steelyard.export.omissions import Abilities
from steelyard.export.settings import Settings

# FSDP2 shards gradients together with the optimizer's state.
ABILITIES = Abilities(
    buckets=True, activation_offload=True, offloads_block_inputs=True, zero_stages=(0, 2, 3)
)
_MIB = 2**20


def configure(settings: Settings, *, name: str) -> ToolConfiguration:
    """Return the arguments in a file of this name; all others keep their defaults."""
    load = f"TrainingArguments(output_dir=..., **json.load(open({name!r})))"
    return ToolConfiguration(
        text=json.dumps(_arguments(settings), indent=2) + "\n",
        by_hand=(f"args={load} for the Trainer",),
        command=f"{settings.torchrun} train.py",
    )


def _arguments(settings: Settings) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "per_device_train_batch_size": settings.per_device_batch,
        "gradient_accumulation_steps": settings.micro_batches,
        "bf16": settings.formats.mixed_precision == "bf16",
        "fp16": settings.formats.mixed_precision == "fp16",
    }
    uses_fsdp = settings.shards_state or bool(settings.offloaded_state)
    if settings.recomputes_blocks and not (uses_fsdp and not settings.offloads_activations):
        fields["activation_checkpointing"] = True
        kwargs: dict[str, bool] = {"use_reentrant": False}
        if settings.offloads_activations:
            # The key of transformers is the name of a trade too, which is no text out of its file.
            kwargs = dict(offload=True)  # noqa: C408
        fields["activation_checkpointing_kwargs"] = kwargs
    if uses_fsdp:
        fields["fsdp"] = True
        fields["fsdp_config"] = {
            "version": 2,
            "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            "reshard_after_forward": settings.zero_stage == 3 and settings.regathers,
            "cpu_offload": bool(settings.offloaded_state),
            "activation_checkpointing": settings.recomputes_blocks
            and not settings.offloads_activations,
        }
    elif settings.layout.data > 1 and settings.bucket_bytes:
        fields["ddp_bucket_cap_mb"] = max(1, round(settings.bucket_bytes / _MIB))
    if settings.compiles:
        fields["torch_compile"] = True
    if settings.device == "cpu":
        fields["use_cpu"] = True
    return fields
