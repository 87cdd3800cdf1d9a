"""Hooks that a captured step could not honour, refused by name.

Tensor hooks on parameters are kept (run/ fires them after the backward pass); forward hooks are
traced through, and refused there when they change Python state.
"""

from torch import nn

from steelyard.core.errors import CaptureRefused


def refuse_hooks(model: nn.Module) -> None:
    if "_orig_mod" in model._modules:
        raise CaptureRefused(
            "the model has been through torch.compile",
            expected="the model itself: its step is captured, and compiled if you ask for that",
            remedy="give the model as it was before torch.compile, and runner='inductor' if wanted",
        )
    for name, module in model.named_modules():
        for held, what in (
            (module._backward_hooks, "backward hook"),
            (module._backward_pre_hooks, "backward pre-hook"),
        ):
            for hook in held.values():
                raise CaptureRefused(
                    f"module {name or type(module).__name__} has a {what} "
                    f"({getattr(hook, '__qualname__', type(hook).__name__)})",
                    expected="no module backward hooks: the captured backward pass is one program",
                    remedy="use a hook on the parameter (parameter.register_hook) instead",
                )
