"""The options of ``steelyard fit`` for a transformers configuration.

Not for making its model: see api/fitting/config_workload.py.
"""

from dataclasses import dataclass
from typing import Annotated

from cyclopts import Parameter

from steelyard.cli.arguments import whole_number


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class ConfigOptions:
    """How the model of a configuration is trained; None means the default."""

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
