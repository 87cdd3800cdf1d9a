"""Refusal of uses of ``torch.utils.checkpoint`` whose eager result differs from a captured step.

A captured step ignores the checkpoints: it contains their regions once, and its plan says what is
recomputed. The result is mostly the same; the exceptions are refused here. Not for planning
recompute: see trades/recompute.py.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from steelyard import _torch
from steelyard.capture.tracing.source_lines import line_of
from steelyard.errors import CaptureRefused
from steelyard.ir.graph import Output, OutputKind

_REMEDY = "remove the checkpoint: Steelyard recomputes as the budget requires"


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
                "torch.utils.checkpoint(use_reentrant=True) has no input that requires a "
                f"gradient{_at(node)}: eager PyTorch would not train the weights inside",
                expected="a checkpoint whose weights are trained",
                remedy=f"pass use_reentrant=False, or {_REMEDY}",
            )


def refuse_repeated_writes(
    joint: torch.fx.GraphModule, outputs: Iterable[Output], names: Mapping[str, str]
) -> None:
    """Refuse checkpoints around writes to buffers, which eager's recompute would repeat.

    ``names`` maps placeholders to the names of inputs.
    """
    written = {o.target: o.node for o in outputs if o.kind is OutputKind.UPDATE}
    for node in joint.graph.nodes:
        # Recomputed operators that read the old value would read the new one.
        touched = [names[i.name] for i in node.all_input_nodes if i.name in names]
        touched += [target for target, name in written.items() if name == node.name]
        target = next((t for t in touched if t in written), None)
        if target is not None and _torch.is_checkpointed(node):
            raise CaptureRefused(
                "torch.utils.checkpoint contains an operator that reads or writes "
                f"{target.replace(':', ' ')}{_at(node)}, which eager PyTorch repeats in the "
                "backward pass",
                expected="no checkpoint around updates, such as those of BatchNorm's buffers",
                remedy=f"{_REMEDY}; or exclude that module from it",
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
                "torch.utils.checkpoint(preserve_rng_state=False) contains a random "
                f"operator{_at(node)}: eager PyTorch would draw other numbers in the backward "
                "pass",
                expected="gradients for the numbers drawn in the forward pass",
                remedy=f"remove preserve_rng_state=False, or {_REMEDY}",
            )


def _needs_gradient(value: Any) -> bool:
    leaves = _torch.tree_leaves(value)
    return any(isinstance(x, torch.Tensor) and x.requires_grad for x in leaves)


def _at(node: torch.fx.Node) -> str:
    return f" at {line_of(node)}" if line_of(node) else ""
