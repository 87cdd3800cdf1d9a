"""Names of tensors that a loss function uses in addition to the model, such as a teacher's weights.

Not for the model's own tensors, which have names already.
"""

import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn


def name_of_tensor(loss: Callable[..., Any], tensor: torch.Tensor) -> str:
    """Return the user's name for a tensor that the loss function can reach; empty if not found."""
    for name, value in _reachable(loss):
        if value is tensor:
            return name
        if isinstance(value, nn.Module):
            for inner, parameter in value.named_parameters(prefix=name):
                if parameter is tensor:
                    return inner
    return ""


def name_of_cell(loss: Callable[..., Any], index: int) -> str:
    """Return the name of the closure variable at ``index``; empty if there is none."""
    code = getattr(getattr(loss, "__func__", loss), "__code__", None)
    names: tuple[str, ...] = code.co_freevars if code is not None else ()
    return names[index] if index < len(names) else ""


def _reachable(loss: Callable[..., Any]) -> Iterator[tuple[str, Any]]:
    if isinstance(loss, functools.partial):
        yield from ((f"argument {i} of the loss", value) for i, value in enumerate(loss.args))
        yield from loss.keywords.items()
        yield from _reachable(loss.func)
        return
    function = getattr(loss, "__func__", loss)
    if inspect.isfunction(function):
        used = inspect.getclosurevars(function)
        yield from used.nonlocals.items()
        yield from used.globals.items()
    owner = getattr(loss, "__self__", loss)
    if isinstance(owner, nn.Module):
        yield "loss", owner
    elif not inspect.isfunction(owner):
        yield from ((f"loss.{name}", value) for name, value in vars(owner).items())
