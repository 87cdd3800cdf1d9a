"""Refusal of uses of ``torch.utils.checkpoint`` whose eager result differs from a captured step.

A captured step contains a checkpointed region once, and recomputes what its plan says. Mostly the
result is the same; the exceptions are refused here. Not for planning recompute: see
trades/recompute.py.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from steelyard import _torch
from steelyard.capture.tracing.source_lines import line_of
from steelyard.errors import CaptureRefused
from steelyard.ir.graph import Output, OutputKind

_REMEDY = "take the checkpoint away: Steelyard recomputes what the budget asks for by itself"


def refuse_reentrant_without_gradient(step: Any) -> None:
    """Refuse reentrant checkpoints without an input that needs a gradient.

    Eager PyTorch gives the weights inside them no gradients.
    """
    for node in _torch.checkpoints(step):
        if not node.kwargs.get("use_reentrant", True):
            continue
        arguments = [a.meta.get("example_value") for a in node.all_input_nodes]
        # Dynamo adds the weights to the user's arguments.
        inputs = [a for a in arguments if not isinstance(a, nn.Parameter)]
        if _needs_gradient(node.meta.get("example_value")) and not _needs_gradient(inputs):
            raise CaptureRefused(
                "torch.utils.checkpoint(use_reentrant=True) is given no tensor that requires a "
                f"gradient{_at(node)}: eager PyTorch would not train the weights inside",
                expected="a checkpoint that trains what is in it",
                remedy=f"use_reentrant=False trains them; or {_REMEDY}",
            )


def refuse_repeated_writes(
    joint: torch.fx.GraphModule, outputs: Iterable[Output], names: Mapping[str, str]
) -> None:
    """Refuse checkpoints around writes to buffers, which eager's recompute would repeat.

    ``names`` maps placeholders to the names of inputs.
    """
    written = {o.target: o.node for o in outputs if o.kind is OutputKind.UPDATE}
    for node in joint.graph.nodes:
        # Recomputed readers of the old value would read the new one.
        touched = [names[i.name] for i in node.all_input_nodes if i.name in names]
        touched += [target for target, name in written.items() if name == node.name]
        target = next((t for t in touched if t in written), None)
        if target is not None and _torch.is_checkpointed(node):
            raise CaptureRefused(
                f"torch.utils.checkpoint is around what reads or writes {target.replace(':', ' ')}"
                f"{_at(node)}, which eager PyTorch would do again in the backward pass",
                expected="no checkpoint around what the step writes, such as BatchNorm's buffers",
                remedy=f"{_REMEDY}; or keep that module out of it",
            )


def refuse_repeated_draws(step: Any, joint: torch.fx.GraphModule) -> None:
    """Refuse random draws without ``preserve_rng_state``: eager's recompute draws other numbers."""
    if all(node.kwargs.get("preserve_rng_state", True) for node in _torch.checkpoints(step)):
        return
    for node in joint.graph.nodes:
        is_operator = isinstance(node.target, _torch.OpOverload)
        if not is_operator or not _torch.is_checkpointed(node):
            continue
        if _torch.draws(node.target, node.args, node.kwargs):
            raise CaptureRefused(
                "torch.utils.checkpoint(preserve_rng_state=False) is around what draws random "
                f"numbers{_at(node)}: eager PyTorch would draw others in the backward pass",
                expected="gradients of what the forward pass has drawn",
                remedy=f"leave preserve_rng_state out; or {_REMEDY}",
            )


def _needs_gradient(value: Any) -> bool:
    leaves = _torch.tree_leaves(value)
    return any(isinstance(x, torch.Tensor) and x.requires_grad for x in leaves)


def _at(node: torch.fx.Node) -> str:
    return f" at {line_of(node)}" if line_of(node) else ""
