"""Refusal of module hooks that a captured step could not call.

Tensor hooks on parameters still work (run/ calls them after the backward pass). Forward hooks are
traced, and tracing refuses those that change Python state. Not for wrapped models: see
wrapped_models.py.
"""

from collections.abc import Mapping
from typing import Any

from torch import nn

from steelyard import _torch
from steelyard.errors import CaptureRefused


def refuse_hooks(model: nn.Module) -> None:
    for kind, hooks in _torch.hooks_of_all_modules().items():
        _refuse(
            hooks,
            f"every module has a global {kind}",
            expected="no global module hooks: they would also run for modules of the captured step",
            remedy="register the hook on single modules",
        )
    for name, module in model.named_modules():
        for kind, hooks in (
            ("backward hook", module._backward_hooks),
            ("backward pre-hook", module._backward_pre_hooks),
        ):
            _refuse(
                hooks,
                f"module {name or type(module).__name__} has a {kind}",
                expected="no module backward hooks: the captured backward pass is one program",
                remedy="use a hook on the parameter (parameter.register_hook) instead",
            )


def _refuse(hooks: Mapping[int, Any], what: str, *, expected: str, remedy: str) -> None:
    for hook in hooks.values():
        name = getattr(hook, "__qualname__", type(hook).__name__)
        raise CaptureRefused(f"{what} ({name})", expected=expected, remedy=remedy)
