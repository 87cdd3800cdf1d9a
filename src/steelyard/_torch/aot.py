"""AOTAutograd: forward and backward pass in one graph, and the descriptors of its inputs.

Not for Dynamo: see dynamo.py.
"""

from typing import Any

# The descriptors of a captured step's inputs and outputs.
from torch._functorch._aot_autograd.descriptors import (
    BufferAOTInput,
    GradAOTOutput,
    InputMutationAOTOutput,
    ParamAOTInput,
    PlainAOTInput,
    PlainAOTOutput,
    TangentAOTInput,
)

__all__ = [
    "BufferAOTInput",
    "GradAOTOutput",
    "InputMutationAOTOutput",
    "ParamAOTInput",
    "PlainAOTInput",
    "PlainAOTOutput",
    "TangentAOTInput",
    "aot_export_joint_with_descriptors",
]


def aot_export_joint_with_descriptors(*args: Any, **kwargs: Any) -> Any:
    """Forward and backward pass in one graph whose inputs and outputs say what they are: matching
    them by position went silently wrong."""
    from torch._functorch import aot_autograd

    return aot_autograd.aot_export_joint_with_descriptors(*args, **kwargs)
