"""Options that several commands, or several arguments of one, share: devices and configurations.

Not for making a configuration's model: see api/fitting/config_workload.py.
"""

from dataclasses import dataclass
from typing import Annotated

from cyclopts import Parameter

from steelyard.cli.arguments import whole_number


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class ConfigOptions:
    """The training settings of a model that is built from a configuration; None is the default."""

    batch: Annotated[
        int | None, Parameter(help="Samples of a step, for a config.", converter=whole_number)
    ] = None
    sequence: Annotated[
        int | None, Parameter(help="Tokens of a sample, for a config.", converter=whole_number)
    ] = None
    precision: Annotated[
        str | None,
        Parameter(help="For a config: bf16, fp16, fp32, bf16-mixed or fp16-mixed."),
    ] = None
    lora: Annotated[
        int | None,
        Parameter(
            help="Rank of LoRA adapters, for a config; PEFT adds them.", converter=whole_number
        ),
    ] = None
    optimizer: Annotated[
        str | None,
        Parameter(help="For a config: adamw, adamw-fused, adafactor, sgd or sgd-momentum."),
    ] = None


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class FitDevices:
    """The devices of ``steelyard fit``: one GPU, several of one kind, or a cluster."""

    gpu: Annotated[
        str | None,
        Parameter(help="The device, such as RTX-4090, A100-40 or H100; several as 2xRTX-4090."),
    ] = None
    gpus: Annotated[
        int | None,
        Parameter(
            help="Number of these GPUs, which shard weights, gradients and optimizer state.",
            converter=whole_number,
        ),
    ] = None
    cluster: Annotated[
        str | None,
        Parameter(help="In place of --gpu: a cluster's TOML file, or a preset such as dgx-h100."),
    ] = None


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class OneGpu:
    """One GPU to plan for, and the memory of its host."""

    gpu: Annotated[
        str | None,
        Parameter(help="Plan for one GPU, such as RTX-4090; its memory is the budget."),
    ] = None
    host_memory: Annotated[
        str | None,
        Parameter(help="The memory of its host, such as 64GiB, to which tensors may be offloaded."),
    ] = None
