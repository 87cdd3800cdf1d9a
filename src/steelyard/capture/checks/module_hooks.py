"""Hooks that a captured step could not honour, refused by name.

Tensor hooks on parameters are kept (run/ fires them after the backward pass); forward hooks are
traced through, and refused there when they change Python state.
"""

from collections.abc import Mapping
from typing import Any

from torch import nn

from steelyard import _torch
from steelyard.errors import CaptureRefused


def refuse_hooks(model: nn.Module) -> None:
    for kind, register in _torch.hooks_of_all_modules().items():
        _refuse(
            register,
            f"every module has a global {kind}",
            expected="no hooks of all modules: they would run for the captured step's own, too",
            remedy="register the hook on the modules that it is meant for",
        )
    for name, module in model.named_modules():
        for kind, register in (
            ("backward hook", module._backward_hooks),
            ("backward pre-hook", module._backward_pre_hooks),
        ):
            _refuse(
                register,
                f"module {name or type(module).__name__} has a {kind}",
                expected="no module backward hooks: the captured backward pass is one program",
                remedy="use a hook on the parameter (parameter.register_hook) instead",
            )


def _refuse(register: Mapping[int, Any], what: str, *, expected: str, remedy: str) -> None:
    for hook in register.values():
        name = getattr(hook, "__qualname__", type(hook).__name__)
        raise CaptureRefused(f"{what} ({name})", expected=expected, remedy=remedy)
