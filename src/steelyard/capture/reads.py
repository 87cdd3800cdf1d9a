"""What the captured code read of Python's state, and whether that still is as it was read.

A number that the loss or the model takes from a global, a closure, a dict or an object is part of
the graph for good: changed later, it would be ignored. Dynamo knows of each, since torch.compile
would compile anew. Not for what a step may not change whether it was read or not (modes, hooks,
parameters): see run/watch.py.
"""

import ast
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from steelyard.capture.attribution import clean_path
from steelyard.core.errors import Mismatch

_AGAIN = "plan again after changing it, or give it as a tensor in the batch"


class Reads:
    """``check`` refuses a step of which something that was read has changed since."""

    def __init__(
        self,
        broken: Callable[[], str],
        tensors: Mapping[str, torch.Tensor],
        *,
        scope: Mapping[str, Any],
    ) -> None:
        self._broken = broken
        # Tensors that the code makes of numbers take it.
        self._default_dtype = torch.get_default_dtype()
        self._tensors = [t for t in _looked_up(tensors, scope) if t.now() is t.tensor]

    def check(self) -> None:
        if torch.get_default_dtype() != self._default_dtype:
            raise Mismatch(
                f"torch's default dtype is {torch.get_default_dtype()}",
                expected=f"{self._default_dtype}, as the step was captured",
                remedy="set it back for the step (torch.set_default_dtype), or plan again",
            )
        broken = self._broken()
        if broken:
            raise _changed(broken)
        for read in self._tensors:
            if read.now() is not read.tensor:
                raise Mismatch(
                    f"the tensor {_readable(read.name)}, which the step reads, is another object",
                    expected="the tensor that the step was captured with",
                    remedy="write into it in place (copy_), or plan again",
                )


@dataclass(frozen=True, slots=True)
class _Tensor:
    """Where a tensor was found; its values may change, another object would not be seen."""

    name: str
    tensor: torch.Tensor
    root: Any
    steps: tuple[tuple[Callable[[Any, Any], Any], Any], ...]

    def now(self) -> Any:
        found = self.root
        try:
            for take, key in self.steps:
                found = take(found, key)
        except (LookupError, AttributeError):
            return None
        return found


def _looked_up(tensors: Mapping[str, torch.Tensor], scope: Mapping[str, Any]) -> list[_Tensor]:
    """Those that are found by attributes and keys; parameters and buffers are watch.py's."""
    found = []
    for name, tensor in tensors.items():
        if not re.search(r"\b_(parameters|buffers)\[", name):
            way = _way(ast.parse(name, mode="eval").body)
            if way is not None and way[0] in scope:
                found.append(_Tensor(name, tensor, scope[way[0]], way[1]))
    return found


def _way(tree: ast.expr) -> tuple[str, tuple[tuple[Callable[[Any, Any], Any], Any], ...]] | None:
    match tree:
        case ast.Name(id=name):
            return name, ()
        case ast.Attribute(value=inner, attr=key):
            take: Callable[[Any, Any], Any] = getattr
        case ast.Subscript(value=inner, slice=ast.Constant(value=key)):
            take = _item
        case _:
            return None
    outer = _way(inner)
    return None if outer is None else (outer[0], (*outer[1], (take, key)))


def _item(holder: Any, key: Any) -> Any:
    return holder[key]


def _changed(guard: str) -> Mismatch:
    """In the user's words: ``G['__import_train'].RATE == 1.0  # x * RATE  # train.py:7 in loss``"""
    said, _, where = guard.partition("  # ")
    line = re.search(r"([^/\s]+:\d+) in \w+$", where.strip())
    which = f"which the step reads{f' ({line[1]})' if line else ''}"
    said = _readable(said.strip())
    if equal := re.fullmatch(r"(.+?) == (.+)", said):
        text = f"{equal[1]}, {which}, is no longer {equal[2]}"
    elif same := re.match(r"___check_\w+_id\((.+?), \d+\)", said):
        text = f"{same[1]}, {which}, was replaced"
    else:
        text = f"something {which}, has changed: it was planned with {said}"
    return Mismatch(
        text[:240],
        expected="what the step was captured with, which it would go on using",
        remedy=_AGAIN,
    )


def _readable(name: str) -> str:
    name = re.sub(r"\bG\['__import_(\w+)'\]\.?", _module, name)
    name = re.sub(r"\bG\['(\w+)'\]", r"\1", name)
    name = re.sub(r"(?:L\['self'\]|\bself)(?=\.)", "self", name)
    return re.sub(r"self\.[\w.]*(?:\[[^\]]*\][\w.]*)*", lambda m: _of_step(m[0]), name)


def _module(found: re.Match[str]) -> str:
    name = found[1].replace("_dot_", ".")
    return "" if name == "__main__" else f"{name}."


def _of_step(name: str) -> str:
    """``self`` is the step: its model and its loss are the user's."""
    modules = re.match(r"self((?:\._modules\['[^']*'\])*)", name)
    assert modules is not None
    path = clean_path(modules[1])
    rest = name[modules.end() :].lstrip(".") if not path else name[modules.end() :]
    return f"{path}{rest}"


__all__ = ["Reads"]
