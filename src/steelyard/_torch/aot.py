"""AOTAutograd internals: joint graph export and the descriptors of its inputs.

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

from steelyard._torch.private_names import require

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
    """Export forward and backward pass as one graph, with descriptors of its inputs and outputs.

    Matching inputs and outputs by position instead failed silently.
    """
    require("aot")
    from torch._functorch import aot_autograd

    return aot_autograd.aot_export_joint_with_descriptors(*args, **kwargs)
